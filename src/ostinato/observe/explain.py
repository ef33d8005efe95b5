"""Explains why each token of a prompt missed.

From what the history remembers, when it is asked for; nothing is worked out before. A prompt is
cut from its first token on::

    0 ... hits ... known here ... known elsewhere ... new to all ... n
          └ shared,  └ evicted,     └ other tenant,     └ differs at
            waited     removed,       adapter, image,     token k, or
            copied     in flight,     weights             never seen
                       block boundary

Rules:

1. The stretches cover the prompt without gaps, and their fates agree with what was counted at
   admission.
2. Of other tenants nothing is told but that they are others, and that to administrators alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ostinato.core.errors import RequestError
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.observe.explanation import Cause, Difference, Explanation, Fate, Stretch
from ostinato.observe.history import Loss, RequestHistory
from ostinato.observe.prompt_diff import Decode, is_alike, show_difference, similarity
from ostinato.observe.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who wants to know.

    Attributes:
        administrator: Whether other tenants may be mentioned.
        decode: From token ids to text; None shows no text.
        prompt: Packed tokens of the prompt, for requests whose tokens are not kept.
        tenant: Salt of the one who asks: others' requests are unknown to it; None may ask of all.
    """

    administrator: bool = False
    decode: Decode | None = None
    prompt: bytes = b""
    tenant: bytes | None = None

    def may_ask_of(self, record: RequestRecord) -> bool:
        """Whether a request is its own."""
        return self.tenant is None or record.identity.belongs_to(self.tenant)


def explain(history: RequestHistory, name: str, viewer: Viewer | None = None) -> Explanation:
    """Say why a request's prompt hit and missed what it did.

    Args:
        history: Of the cache that served it.
        name: The request's name; of several, the newest is meant.
        viewer: Who wants to know.

    Raises:
        RequestError: No such request is remembered.

    Cost: a comparison with each remembered sequence.
    """
    viewer, record = viewer or Viewer(), history.record_of(name)
    if record is None or not viewer.may_ask_of(record):
        raise RequestError(_unknown(history, name))
    return _ExplanationBuilder(history, record, viewer).explanation()


def _unknown(history: RequestHistory, name: str) -> str:
    if not history.keep:
        return f"request {name!r} cannot be explained with keep_explanations=0: raise it"
    return (
        f"request {name!r} is not remembered: it is unknown, has not been admitted yet, was "
        f"erased, or is not among the last {history.keep} (keep_explanations)"
    )


class _ExplanationBuilder:
    """One prompt that is looked into."""

    def __init__(self, history: RequestHistory, record: RequestRecord, viewer: Viewer) -> None:
        self.history, self.record, self.viewer = history, record, viewer
        self.length = record.num_prompt_tokens
        self.prompt = viewer.prompt or record.tokens[: self.length * TOKEN_BYTES]
        earlier = [v for v in history.records() if v.number < record.number and v.tokens]
        # What is not written is never found.
        self.earlier = [v for v in earlier if v.writes]
        self.unwritten = [v for v in history.records() if v.number < record.number and not v.writes]

    def explanation(self) -> Explanation:
        """Cut the prompt into stretches."""
        difference: Difference | None = None
        stretches = list(self._hits())
        if self.record.off:
            off = {"cause": Cause.SWITCHED_OFF, "setting": self.record.off}
            stretches = [Stretch(0, self.length, Fate.COMPUTED, **off)]  # type: ignore[arg-type]
        elif not self.prompt:
            stretches.append(self._computed(self.record.num_hits, self.length, Cause.NOT_KEPT,
                                            setting="cache_write=False"))  # fmt: skip
        else:
            misses, difference = self._misses()
            stretches += misses
        # How much others ask is not for a tenant to know.
        tells_all = self.viewer.tenant is None or self.viewer.administrator
        return Explanation(
            self.record.name,
            tuple(_merged(stretches)),
            difference,
            sum(tells_all or self.viewer.may_ask_of(record) for record in self.earlier),
            self.history.num_forgotten if tells_all else 0,
            self.record.num_kept,
        )

    def _hits(self) -> Iterator[Stretch]:
        record = self.record
        found = record.num_shared - record.num_awaited
        yield Stretch(0, found, Fate.HIT)
        yield Stretch(found, record.num_shared, Fate.WAITED, request=record.awaited)
        yield Stretch(record.num_shared, record.num_hits, Fate.COPIED)

    def _misses(self) -> tuple[list[Stretch], Difference | None]:
        """Cut what did not hit; the last token is computed whatever is cached (law 4)."""
        hits, length = self.record.num_hits, self.length
        nearest, common = self._nearest()
        here = max(common, hits)
        elsewhere, end = self._elsewhere(here)
        known = max(here, end)
        # Of hits whose owner is no longer remembered nothing is known but that they are there.
        is_whole = known >= length or (hits == length - 1 and common < hits)
        stop = length - 1 if is_whole else length
        stretches = list(self._known(nearest, hits, min(here, stop)))
        if elsewhere is not None:
            stretches.append(replace(elsewhere, start=min(here, stop), stop=min(end, stop)))
        if is_whole:
            return [*stretches, self._computed(stop, length, Cause.LAST_TOKEN)], None
        unwritten = self._unwritten(known)
        if unwritten is not None:
            stretches.append(unwritten)
            is_all = unwritten.stop >= length - 1
            if is_all:
                last = replace(unwritten, start=length - 1, stop=length)
                return [*stretches, last], None
            return [*stretches, self._computed(unwritten.stop, length, Cause.NEVER_SEEN)], None
        new, difference = self._new(nearest, known, is_apart=known == common)
        return [*stretches, new], difference

    def _unwritten(self, known: int) -> Stretch | None:
        """Find what an earlier request computed without writing it to the cache."""
        best, count = None, known
        for other in self.unwritten:
            if other.identity == self.record.identity and other.images == self.record.images:
                common = self._num_common_unwritten(other)
                if common > count:
                    best, count = other, common
        if best is None:
            return None
        return self._computed(
            known, count, Cause.NOT_WRITTEN, request=best.name, setting="cache_write=False"
        )

    def _num_common_unwritten(self, other: RequestRecord) -> int:
        """Count tokens in common: all while it runs, whole blocks when it has ended."""
        if other.digests is not None:
            return self.history.digest_key.num_common_tokens(other.digests, self.prompt)
        return other.num_common(self.record, self.prompt)

    def _nearest(self) -> tuple[RequestRecord | None, int]:
        """Find the sequence of this identity that begins most like the prompt.

        Returns:
            It and the tokens in common; of several the newest, and if no token is in common, the
            one that is most alike behind the first.
        """
        mine = [v for v in self.earlier if v.identity == self.record.identity]
        common = [v.num_common(self.record, self.prompt) for v in mine]
        most = max(common, default=0)
        best = [v for v, count in zip(mine, common, strict=True) if count == most]
        if not most and best:
            best.sort(key=lambda v: -similarity(v.prompt, self.prompt, 0))
        return (best[0], most) if best else (None, 0)

    def _known(self, owner: RequestRecord | None, start: int, stop: int) -> Iterator[Stretch]:
        """Say of each block that was computed for another why it was not found."""
        size = self.history.block_size
        while owner is not None and start < stop:
            edges = ((start // size + 1) * size, owner.num_computed, owner.num_findable)
            end = min([stop, *(edge for edge in edges if edge > start)])
            yield replace(self._known_block(owner, start), start=start, stop=end)
            start = end

    def _known_block(self, owner: RequestRecord, start: int) -> Stretch:
        """Say why the tokens behind ``start``, in one block of another's, were not found."""
        stretch = self._computed(start, start, Cause.BLOCK_BOUNDARY, request=owner.name)
        if owner.lived_at(self.record.number):
            return replace(stretch, cause=Cause.IN_FLIGHT)
        if start >= owner.num_computed:
            return replace(stretch, cause=Cause.NEVER_COMPUTED)
        if start >= owner.num_findable:
            return replace(stretch, setting="seal_tails")
        loss = self._loss(owner, start // self.history.block_size)
        if loss is not None:
            return self._lost(stretch, loss)
        return replace(stretch, cause=Cause.EVICTED) if self._is_old(owner) else stretch

    def _is_old(self, owner: RequestRecord) -> bool:
        """Whether a loss may have been forgotten, or happened where none is noted."""
        return self.history.has_windows or not self.history.remembers_since(owner.ended or 0)

    def _loss(self, owner: RequestRecord, place: int) -> Loss | None:
        """Find out how a block of an ended sequence was lost before this prompt came."""
        if place >= owner.num_blocks or owner.ended is None:
            return None
        block = BlockId(owner.blocks[place])
        return self.history.loss_of(block, owner.ended, self.record.number)

    def _lost(self, stretch: Stretch, loss: Loss) -> Stretch:
        cause = Cause.REMOVED if loss.reason == "removed" else Cause.EVICTED
        setting = "quota" if loss.reason == "quota" else None
        ago_s = max(0.0, self.record.at_s - loss.at_s)
        by = None
        if loss.by is not None:
            is_mine = loss.by.identity.tenant == self.record.identity.tenant
            by = loss.by.name if is_mine else None
            if not is_mine and self.viewer.administrator:
                by = "a request of another tenant"
        return replace(stretch, cause=cause, by=by, ago_s=ago_s, idle_s=loss.idle_s,
                       setting=setting)  # fmt: skip

    def _elsewhere(self, known: int) -> tuple[Stretch | None, int]:
        """Find content of more of the prompt that may not be shared with it.

        Returns:
            A stretch with the cause, and up to where it goes; None if there is no such content.
        """
        best: tuple[int, RequestRecord] | None = None
        for other in self.earlier:
            if other.identity == self.record.identity and other.images == self.record.images:
                continue
            if not self._may_know(other):
                continue
            if other.identity == self.record.identity:
                common = num_common_tokens(other.tokens, self.prompt)  # whatever the images
            else:
                common = other.num_common(self.record, self.prompt)
            common = min(common, self._num_alive(other))
            if common > max(known, best[0] if best else 0):
                best = common, other
        if best is None:
            return None, 0
        cause = self._what_differs(best[1])
        whose = None if cause is Cause.OTHER_TENANT else best[1].name
        return self._computed(0, 0, cause, request=whose), best[0]

    def _may_know(self, other: RequestRecord) -> bool:
        return self.viewer.administrator or other.identity.tenant == self.record.identity.tenant

    def _num_alive(self, other: RequestRecord) -> int:
        """Count the first tokens of a sequence that were cached when the prompt came."""
        if other.lived_at(self.record.number):
            return len(other.tokens) // TOKEN_BYTES
        if other.identity.epoch != self.record.identity.epoch:
            return other.num_computed  # the update itself forgot them
        for place in range(other.num_blocks):
            if self._loss(other, place) is not None:
                return place * self.history.block_size
        return other.num_computed

    def _what_differs(self, other: RequestRecord) -> Cause:
        mine, theirs = self.record.identity, other.identity
        if mine.tenant != theirs.tenant:
            return Cause.OTHER_TENANT
        if mine.adapter != theirs.adapter:
            return Cause.OTHER_ADAPTER
        if mine == theirs:
            return Cause.OTHER_IMAGE
        return Cause.OTHER_HEAD if mine.head != theirs.head else Cause.OTHER_WEIGHTS

    def _new(
        self, nearest: RequestRecord | None, start: int, is_apart: bool
    ) -> tuple[Stretch, Difference | None]:
        """Say what is new to all, and how it differs from the nearest prompt.

        Args:
            nearest: The sequence that begins most like the prompt.
            start: Where the new begins.
            is_apart: Whether the prompt and the nearest part here.
        """
        never = self._computed(start, self.length, Cause.NEVER_SEEN)
        if nearest is None or not is_apart:
            return never, None
        if len(nearest.tokens) // TOKEN_BYTES <= start:
            return replace(never, request=nearest.name), None
        if not is_alike(nearest.prompt, self.prompt, start, self.history.block_size):
            return never, None
        shown = show_difference(nearest, self.record, self.prompt, start, self.viewer.decode)
        cause = Cause.SAME_TEXT if shown is not None and shown.is_same_text else Cause.DIFFERS
        difference = None if shown is None else shown.difference
        in_answer = start >= nearest.num_prompt_tokens
        new = replace(never, cause=cause, request=nearest.name, in_answer=in_answer)
        return new, difference

    def _computed(
        self, start: int, stop: int, cause: Cause, request: str | None = None,
        setting: str | None = None,
    ) -> Stretch:  # fmt: skip
        return Stretch(start, stop, Fate.COMPUTED, cause, request, setting=setting)


def _merged(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Leave out empty stretches, and join neighbours that say the same.

    Blocks that went one after the other for one request went at one time: the first tells it.
    """
    last: Stretch | None = None
    for stretch in stretches:
        if stretch.start == stretch.stop:
            continue
        joined = None if last is None else replace(last, stop=stretch.stop)
        if last is not None and joined == replace(
            stretch, start=last.start, ago_s=last.ago_s, idle_s=last.idle_s
        ):
            last = joined
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last

"""Explains why each token of a prompt missed.

Works on what the history remembers, when an explanation is requested. A prompt is cut from its
first token on::

    0 ... hits ... known here ... known elsewhere ... new ......... n
          └ shared,  └ evicted,     └ other tenant,     └ differs at
            waited     removed,       adapter, image,     token k, or
            copied     in flight,     weights             never seen
                       block boundary

Rules:

1. The spans cover the prompt without gaps, and agree with what was counted at admission.
2. Nothing about other tenants is revealed, except to administrators that they exist.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostinato.core.errors import RequestError
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.observe.explanation import (
    Difference,
    Explanation,
    MissReason,
    PromptSpan,
    SpanOutcome,
)
from ostinato.observe.history import BlockLoss, RequestHistory, RequestRecord
from ostinato.observe.prompt_diff import Decode, is_alike, show_difference, similarity


@dataclass(frozen=True, slots=True)
class Viewer:
    """The caller that asks for an explanation, and what it may see.

    Attributes:
        administrator: Whether other tenants may be mentioned.
        decode: From token ids to text; None shows no text.
        prompt: Packed tokens of the prompt, for requests whose tokens are not kept.
        tenant: Salt of the caller's tenant, which sees its own requests only; None sees all.
        adapter_names: Names of adapters by their digests; others are shown by digest.
    """

    administrator: bool = False
    decode: Decode | None = None
    prompt: bytes = b""
    tenant: bytes | None = None
    adapter_names: Mapping[bytes, str] = field(default_factory=dict)

    def model_of(self, identity: Identity) -> str:
        """Return what computes a request: the base model, or an adapter."""
        digest = identity.adapter
        name = self.adapter_names.get(digest, digest.hex()[:12])
        return f"adapter {name!r}" if digest else "the base model"

    def may_see(self, record: RequestRecord) -> bool:
        """Return whether a request belongs to the caller."""
        return self.tenant is None or record.identity.belongs_to(self.tenant)


def explain(history: RequestHistory, name: str, viewer: Viewer | None = None) -> Explanation:
    """Explain which tokens of a request's prompt hit, and why the others missed.

    Args:
        history: History of the cache that served it.
        name: The request's name; among several, the newest.
        viewer: The caller.

    Raises:
        RequestError: No such request is remembered.

    Cost: a comparison with each remembered sequence.
    """
    viewer, record = viewer or Viewer(), history.record_of(name)
    if record is None or not viewer.may_see(record):
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
    """Explains one prompt."""

    def __init__(self, history: RequestHistory, record: RequestRecord, viewer: Viewer) -> None:
        self.history, self.record, self.viewer = history, record, viewer
        self.length = record.num_prompt_tokens
        self.prompt = viewer.prompt or record.tokens[: self.length * TOKEN_BYTES]
        earlier = [v for v in history.records() if v.number < record.number and v.tokens]
        # Sequences that were not written are never found.
        self.earlier = [v for v in earlier if v.writes]
        self.unwritten = [v for v in history.records() if v.number < record.number and not v.writes]

    def explanation(self) -> Explanation:
        """Cut the prompt into spans."""
        difference: Difference | None = None
        spans = list(self._hits())
        if self.record.off:
            off = {"reason": MissReason.SWITCHED_OFF, "setting": self.record.off}
            spans = [PromptSpan(0, self.length, SpanOutcome.COMPUTED, **off)]  # type: ignore[arg-type]
        elif not self.prompt:
            spans.append(self._computed(self.record.num_hits, self.length, MissReason.NOT_KEPT,
                                            setting="cache_write=False"))  # fmt: skip
        else:
            misses, difference = self._misses()
            spans += misses
        # A tenant must not learn how many requests others send.
        tells_all = self.viewer.tenant is None or self.viewer.administrator
        return Explanation(
            self.record.name,
            tuple(_merged(spans)),
            difference,
            sum(tells_all or self.viewer.may_see(record) for record in self.earlier),
            self.history.num_forgotten if tells_all else 0,
            self.record.num_kept,
        )

    def _hits(self) -> Iterator[PromptSpan]:
        record = self.record
        end = record.num_shared - record.num_awaited
        yield PromptSpan(0, end, SpanOutcome.HIT)
        yield PromptSpan(end, record.num_shared, SpanOutcome.WAITED, request=record.awaited)
        yield PromptSpan(record.num_shared, record.num_hits, SpanOutcome.COPIED)

    def _misses(self) -> tuple[list[PromptSpan], Difference | None]:
        """Cut the part that did not hit; the last token is always computed (law 4)."""
        hits, length = self.record.num_hits, self.length
        nearest, common = self._nearest()
        here = max(common, hits)
        elsewhere, end = self._elsewhere(here)
        known = max(here, end)
        # The owner of a hit may no longer be remembered.
        is_whole = known >= length or (hits == length - 1 and common < hits)
        stop = length - 1 if is_whole else length
        spans = list(self._known(nearest, hits, min(here, stop)))
        if elsewhere is not None:
            spans.append(replace(elsewhere, start=min(here, stop), stop=min(end, stop)))
        if is_whole:
            return [*spans, self._computed(stop, length, MissReason.LAST_TOKEN)], None
        unwritten = self._unwritten(known)
        if unwritten is not None:
            spans.append(unwritten)
            if unwritten.stop >= length - 1:
                last = replace(unwritten, start=length - 1, stop=length)
                return [*spans, last], None
            return [*spans, self._computed(unwritten.stop, length, MissReason.NEVER_SEEN)], None
        new, difference = self._new(nearest, known, is_apart=known == common)
        return [*spans, new], difference

    def _unwritten(self, known: int) -> PromptSpan | None:
        """Find the part that an earlier request computed without writing it to the cache."""
        best, count = None, known
        for other in self.unwritten:
            if other.identity == self.record.identity and other.images == self.record.images:
                common = self._num_common_unwritten(other)
                if common > count:
                    best, count = other, common
        if best is None:
            return None
        return self._computed(
            known, count, MissReason.NOT_WRITTEN, request=best.name, setting="cache_write=False"
        )

    def _num_common_unwritten(self, other: RequestRecord) -> int:
        """Count tokens in common: all while it runs, whole blocks when it has ended."""
        if other.digests is not None:
            return self.history.digest_key.num_common_tokens(other.digests, self.prompt)
        return other.num_common(self.record, self.prompt)

    def _nearest(self) -> tuple[RequestRecord | None, int]:
        """Find the sequence with the longest common prefix of the same identity.

        Returns:
            It and the tokens in common; of several the newest, and if no token is in common, the
            most similar one.
        """
        limits = {v: self._num_of_one_identity(v) for v in self.earlier}
        visible = [v for v in self.earlier if limits[v]]
        common = [min(limits[v], v.num_common(self.record, self.prompt)) for v in visible]
        longest = max(common, default=0)
        best = [v for v, count in zip(visible, common, strict=True) if count == longest]
        if not longest and best:
            best.sort(key=lambda v: -similarity(v.prompt, self.prompt, 0))
        return (best[0], longest) if best else (None, 0)

    def _num_of_one_identity(self, other: RequestRecord) -> int:
        """Count the tokens up to where an adapter is active in one of two sequences alone."""
        identity, other_identity = self.record.identity, other.identity
        if identity.tenant != other_identity.tenant:
            return 0
        parted = {*identity.stages} ^ {*other_identity.stages}
        return min((stage.start for stage in parted), default=self.length)

    def _known(self, owner: RequestRecord | None, start: int, stop: int) -> Iterator[PromptSpan]:
        """Explain each block that was computed for another request and not found."""
        size, seen = self.history.block_size, min(self.record.num_seen, stop)
        if seen > start:  # within a block no state is kept
            end = stop if stop - seen < size else seen
            part = None if owner is None or stop >= self.length - 1 else owner.name
            yield self._computed(start, end, MissReason.NO_STATE, request=part)
            start = end
        while owner is not None and start < stop:
            edges = ((start // size + 1) * size, owner.num_computed, owner.num_findable)
            end = min([stop, *(edge for edge in edges if edge > start)])
            yield replace(self._known_block(owner, start), start=start, stop=end)
            start = end

    def _known_block(self, owner: RequestRecord, start: int) -> PromptSpan:
        """Explain the tokens from ``start`` on, in one block of another request."""
        span = self._computed(start, start, MissReason.BLOCK_BOUNDARY, request=owner.name)
        if owner.lived_at(self.record.number):
            return replace(span, reason=MissReason.IN_FLIGHT)
        if start >= owner.num_computed:
            return replace(span, reason=MissReason.NEVER_COMPUTED)
        if start >= owner.num_findable:
            return replace(span, setting="seal_tails")
        loss = self._loss(owner, start // self.history.block_size)
        if loss is not None:
            return self._lost(span, loss)
        return replace(span, reason=MissReason.EVICTED) if self._is_old(owner) else span

    def _is_old(self, owner: RequestRecord) -> bool:
        """Whether a loss may have been dropped from the history, or was in a window."""
        return self.history.has_windows or not self.history.remembers_since(owner.ended or 0)

    def _loss(self, owner: RequestRecord, place: int) -> BlockLoss | None:
        """Find how a block of an ended sequence was lost before this prompt arrived."""
        if place >= owner.num_blocks or owner.ended is None:
            return None
        block = BlockId(owner.blocks[place])
        return self.history.loss_of(block, owner.ended, self.record.number)

    def _lost(self, span: PromptSpan, loss: BlockLoss) -> PromptSpan:
        reason = MissReason.REMOVED if loss.reason == "removed" else MissReason.EVICTED
        setting = "quota" if loss.reason == "quota" else None
        ago_s = max(0.0, self.record.at_s - loss.at_s)
        by = None
        if loss.by is not None:
            is_own_tenant = loss.by.identity.tenant == self.record.identity.tenant
            by = loss.by.name if is_own_tenant else None
            if not is_own_tenant and self.viewer.administrator:
                by = "a request of another tenant"
        return replace(span, reason=reason, by=by, ago_s=ago_s, idle_s=loss.idle_s,
                       setting=setting)  # fmt: skip

    def _elsewhere(self, known: int) -> tuple[PromptSpan | None, int]:
        """Find a longer match in content that the prompt may not share.

        Returns:
            A span with the reason, and where it ends; None if there is none.
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
        reason = self._what_differs(best[1])
        other_request = None if reason is MissReason.OTHER_TENANT else best[1].name
        setting = None
        if reason is MissReason.OTHER_ADAPTER:
            models = map(self.viewer.model_of, (best[1].identity, self.record.identity))
            setting = "computed by {}, and this request asks for {}".format(*models)
        return self._computed(0, 0, reason, request=other_request, setting=setting), best[0]

    def _may_know(self, other: RequestRecord) -> bool:
        return self.viewer.administrator or other.identity.tenant == self.record.identity.tenant

    def _num_alive(self, other: RequestRecord) -> int:
        """Count the first tokens of a sequence that were cached when the prompt arrived."""
        if other.lived_at(self.record.number):
            return len(other.tokens) // TOKEN_BYTES
        if other.identity.epoch != self.record.identity.epoch:
            return other.num_computed  # removed by the update itself
        for place in range(other.num_blocks):
            if self._loss(other, place) is not None:
                return place * self.history.block_size
        return other.num_computed

    def _what_differs(self, other: RequestRecord) -> MissReason:
        identity, other_identity = self.record.identity, other.identity
        if identity.tenant != other_identity.tenant:
            return MissReason.OTHER_TENANT
        if (identity.adapter, identity.adapter_start) != (
            other_identity.adapter,
            other_identity.adapter_start,
        ):
            return MissReason.OTHER_ADAPTER
        if identity == other_identity:
            return MissReason.OTHER_IMAGE
        public, others = ((x.root.tenant, x.num_public_tokens) for x in (identity, other_identity))
        return MissReason.OTHER_WEIGHTS if public == others else MissReason.OTHER_PUBLIC_PREFIX

    def _new(
        self, nearest: RequestRecord | None, start: int, is_apart: bool
    ) -> tuple[PromptSpan, Difference | None]:
        """Explain what no sequence has, and how it differs from the nearest prompt.

        Args:
            nearest: The sequence with the longest common prefix.
            start: Where the new part begins.
            is_apart: Whether the prompt and the nearest one differ here.
        """
        never = self._computed(start, self.length, MissReason.NEVER_SEEN)
        if nearest is None or not is_apart:
            return never, None
        if len(nearest.tokens) // TOKEN_BYTES <= start:
            return replace(never, request=nearest.name), None
        if not is_alike(nearest.prompt, self.prompt, start, self.history.block_size):
            return never, None
        difference, is_same_text = show_difference(
            nearest, self.record, self.prompt, start, self.viewer.decode
        )
        reason = MissReason.SAME_TEXT if is_same_text else MissReason.DIFFERS
        in_answer = start >= nearest.num_prompt_tokens
        new = replace(never, reason=reason, request=nearest.name, in_answer=in_answer)
        return new, difference

    def _computed(
        self, start: int, stop: int, reason: MissReason, request: str | None = None,
        setting: str | None = None,
    ) -> PromptSpan:  # fmt: skip
        return PromptSpan(start, stop, SpanOutcome.COMPUTED, reason, request, setting=setting)


def _merged(spans: Sequence[PromptSpan]) -> Iterator[PromptSpan]:
    """Drop empty spans, and join neighbours that differ in their times only.

    Blocks evicted for one request were evicted at one time: that of the first is kept.
    """
    last: PromptSpan | None = None
    for span in spans:
        if span.start == span.stop:
            continue
        joined = None if last is None else replace(last, stop=span.stop)
        if last is not None and joined == replace(
            span, start=last.start, ago_s=last.ago_s, idle_s=last.idle_s
        ):
            last = joined
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last

"""Explanations: which tokens of a prompt hit, and why the others missed.

An ``Explanation`` cuts a prompt into spans, from its first token to its last. Each one hit, was
waited for, was copied, or was computed; a computed span has a reason (law 10)::

    tokens    0 ........ 32 ... 41 ..................... 80
              hit         copied differs at token 41 from request-0

``str(explanation)`` is human-readable, ``as_dict()`` machine-readable.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from html import escape
from typing import Any

LONG_WAIT_S = 0.1
"""Time for other requests from which on a text tells of it."""

_WIDEST_LABEL = 16
"""Longest name of a request that is shown as a label; the server's ids are longer."""


class SpanOutcome(StrEnum):
    """How a span of a prompt was served."""

    HIT = "hit"
    """Found in whole blocks."""
    WAITED = "waited"
    """Found in whole blocks that another request computed after this one arrived."""
    LOADED = "loaded"
    """Loaded from a tier, such as the disk, when the request came."""
    COPIED = "copied"
    """Copied out of a block whose first tokens match."""
    COMPUTED = "computed"
    """Computed by the model."""


class MissReason(StrEnum):
    """Why a span was computed."""

    NEVER_SEEN = "never seen"
    DIFFERS = "differs"
    SAME_TEXT = "same text, other tokens"
    OTHER_TENANT = "other tenant"
    OTHER_ADAPTER = "other adapter"
    OTHER_IMAGE = "other image"
    OTHER_PUBLIC_PREFIX = "other public prefix"
    OTHER_WEIGHTS = "other weights"
    OTHER_MODEL = "other model"
    EVICTED = "evicted"
    REMOVED = "removed"
    NOT_WRITTEN = "not written"
    NEVER_COMPUTED = "never computed"
    IN_FLIGHT = "in flight"
    BLOCK_BOUNDARY = "block boundary"
    NO_STATE = "no state"
    SWITCHED_OFF = "switched off"
    TEMPLATE_DROPPED = "template dropped"
    LAST_TOKEN = "last token"
    NOT_KEPT = "not kept"
    CHEAPER = "cheaper to compute"
    CHECKSUM = "checksum"
    TOO_SLOW = "too slow"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive tokens of a prompt with one outcome and one reason.

    Attributes:
        start: Position of the first of them.
        stop: Position after the last.
        outcome: How they were served.
        reason: Why they were computed; None if they were not.
        request: The request that had them, or the nearest one; None if another tenant's.
        by: The request for which they were evicted; None if unknown, or another tenant's.
        ago_s: Seconds between that and this request's admission.
        idle_s: Seconds since their last use then.
        setting: The setting that switched the cache off, or that limits it; of what a tier had,
            the tier.
        in_answer: Whether the prompt differs from the other's answer rather than its prompt.
    """

    start: int
    stop: int
    outcome: SpanOutcome
    reason: MissReason | None = None
    request: str | None = None
    by: str | None = None
    ago_s: float | None = None
    idle_s: float | None = None
    setting: str | None = None
    in_answer: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens in it."""
        return self.stop - self.start

    @property
    def sentence(self) -> str:
        """Description of the span."""
        by = "" if self.by is None else f" for {self.by}"
        quota = " because its tenant is at its own quota" if self.setting == "quota" else ""
        idle = "" if self.idle_s is None else f", {seconds(self.idle_s)} after their last use"
        when = "" if self.ago_s is None else f" {seconds(self.ago_s)} earlier"
        return self._template.format(
            other=self.request or "another request",
            start=self.start,
            position=f"{self.start:,}",
            again=f"{self.num_tokens:,} token{'s' * (self.num_tokens != 1)} computed again",
            end=f"{self.stop:,}",
            setting=self.setting,
            when=when,
            eviction=f"{by}{quota}{when}{idle}",
        )

    @property
    def _template(self) -> str:
        if self.reason is None:
            return _OUTCOMES[self.outcome]
        if self.reason is MissReason.NEVER_SEEN and self.request:
            return "never seen: the nearest prompt, that of {other}, ends before"
        if self.reason is MissReason.NEVER_SEEN and not self.start:
            return "never seen: no remembered prompt begins like this"
        if self.reason is MissReason.NO_STATE and self.request:
            return "state kept at {position}, the prompts part at {end}: {again}"
        if self.reason is MissReason.DIFFERS and self.in_answer:
            return "differs at token {start} from the answer to {other}"
        return _COMPUTED[self.reason]


_OUTCOMES = {
    SpanOutcome.HIT: "found in the cache",
    SpanOutcome.WAITED: "found in the cache: {other} computed them while this one waited",
    SpanOutcome.LOADED: "loaded from the {setting}",
    SpanOutcome.COPIED: "copied from a cached block that the prompt leaves in its middle",
}
_COMPUTED = {
    MissReason.NEVER_SEEN: "never seen: no remembered prompt continues like this",
    MissReason.DIFFERS: "differs at token {start} from {other}, the nearest prompt",
    MissReason.SAME_TEXT: "the same text as {other}, but other tokens from token {start} on",
    MissReason.OTHER_TENANT: "seen from another tenant; tenants share nothing",
    MissReason.OTHER_ADAPTER: "seen from {other}: {setting}",
    MissReason.OTHER_IMAGE: "the tokens of {other}, but another image at or before them",
    MissReason.OTHER_PUBLIC_PREFIX: (
        "seen from {other}, which began with another public prefix or with none"
    ),
    MissReason.OTHER_WEIGHTS: "computed for {other} with the weights before the update",
    MissReason.OTHER_MODEL: "seen from {other}, which asked for another model",
    MissReason.EVICTED: "computed for {other}, and evicted{eviction}",
    MissReason.REMOVED: "computed for {other}, and removed by an administrator{when}",
    MissReason.NOT_WRITTEN: "computed for {other}, and kept out of the cache ({setting})",
    MissReason.NEVER_COMPUTED: "part of {other}, which did not compute them",
    MissReason.IN_FLIGHT: (
        "{other} holds them, but was not done: only full blocks are shared early"
    ),
    MissReason.BLOCK_BOUNDARY: "computed for {other}, in a partly filled block that was not kept",
    MissReason.NO_STATE: "state kept at {position}: {again}",
    MissReason.TEMPLATE_DROPPED: "the template dropped {setting}",
    MissReason.SWITCHED_OFF: "reading the cache was switched off: {setting}",
    MissReason.LAST_TOKEN: "the last token is always computed: the next one needs its query",
    MissReason.NOT_KEPT: "not known: its tokens were not kept ({setting})",
    MissReason.CHEAPER: "was on the {setting}, cheaper to compute",
    MissReason.CHECKSUM: "was on the {setting}, but the read failed its checksum",
    MissReason.TOO_SLOW: "was on the {setting}, but could not be read in time",
    MissReason.UNREADABLE: "was on the {setting}, but could not be read",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt differs from the nearest one, both sides decoded.

    Attributes:
        token: Position of the first token that differs.
        request: The request with the nearest prompt.
        mine: This prompt around the difference, on one line.
        theirs: The nearest prompt there.
        caret: Place of the first character that differs, in both.
        width: Characters of this prompt's token there, at least 1.
        place: Where it is in the request, such as ``messages[0] (system)`` or ``line 2``.
        num_alike_after: Tokens after the difference that match again, but cannot hit.
    """

    token: int
    request: str
    mine: str
    theirs: str
    caret: int
    width: int
    place: str
    num_alike_after: int

    @property
    def lines(self) -> tuple[str, ...]:
        """Both sides, and a caret under the difference."""
        name = self.request if len(self.request) <= _WIDEST_LABEL else "the nearest"
        label = max(len("this prompt"), len(name))
        behind = "" if not self.place else f" in {self.place}"
        carets = "^" * self.width
        return (
            f"{name:>{label}}  {self.theirs}",
            f"{'this prompt':>{label}}  {self.mine}",
            f"{'':>{label}}  {'':>{self.caret}}{carets} token {self.token}{behind}",
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """What passed from a request's arrival to its first token, or to its end without one.

    Attributes:
        seconds: In all; what is in none of the others passed without a step.
        own_s: Steps' time for its own tokens.
        tenant_s: Steps' time for other requests of its tenant.
        others_s: Steps' time for other tenants.
    """

    seconds: float
    own_s: float
    tenant_s: float
    others_s: float

    @property
    def sentence(self) -> str:
        """Description of the wait."""
        return (
            f"Its first token took {seconds(self.seconds)}: {seconds(self.own_s)} its own work, "
            f"{seconds(self.tenant_s)} other work of its tenant, {seconds(self.others_s)} the work "
            "of others."
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which tokens of a prompt hit, and why the others missed.

    Attributes:
        request_id: The request.
        spans: From token 0 to the last, without gaps.
        difference: Where it differs from the nearest prompt; None if it does not, or if there is
            no tokenizer.
        num_remembered: Sequences that it was compared with.
        num_forgotten: Earlier ones that were no longer remembered.
        num_kept: Prompt tokens of earlier answers that stand as they were generated.
        wait: For whose work it waited; None if that is not remembered.
        num_prepared: Cached tokens that were computed for it in idle steps, after the last answer.
        num_restored_turns: Earlier answers that stand as they were written, although the client
            sent them otherwise, or the template would write them otherwise.
        num_restored_tokens: The tokens of those.
    """

    request_id: str
    spans: tuple[PromptSpan, ...]
    difference: Difference | None = None
    num_remembered: int = 0
    num_forgotten: int = 0
    num_kept: int = 0
    wait: Wait | None = None
    num_prepared: int = 0
    num_restored_turns: int = 0
    num_restored_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.spans[-1].stop if self.spans else 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were not computed."""
        return sum(s.num_tokens for s in self.spans if s.outcome is not SpanOutcome.COMPUTED)

    @property
    def num_copied_tokens(self) -> int:
        """Those of them that were copied."""
        return sum(s.num_tokens for s in self.spans if s.outcome is SpanOutcome.COPIED)

    @property
    def reasons(self) -> tuple[MissReason, ...]:
        """Why it missed, in the order of the prompt."""
        return tuple(s.reason for s in self.spans if s.reason is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values, for JSON."""
        spans = [
            {k: v for k, v in asdict(s).items() if v is not None and v is not False}
            | {"sentence": s.sentence}
            for s in self.spans
        ]
        return {
            "request_id": self.request_id,
            "num_tokens": self.num_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_copied_tokens": self.num_copied_tokens,
            **{_WRITTEN.get(name, name): value for name, value in asdict(self).items()},
            "spans": spans,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Explanation":
        """Read what ``as_dict`` wrote; unknown fields are ignored.

        Raises:
            ValueError: It is no explanation.
        """
        from pydantic import TypeAdapter  # imported here: an embedded cache needs NumPy alone

        values = {name: plain.get(_WRITTEN.get(name, name)) for name in _FIELDS}
        return TypeAdapter(cls).validate_python({k: v for k, v in values.items() if v is not None})

    @property
    def title(self) -> str:
        """The request, and how much was cached."""
        return (
            f"{self.request_id}: {self.num_cached_tokens:,} of {self.num_tokens:,} prompt tokens "
            "were cached"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Hints besides the spans."""
        notes = []
        if self.difference is not None and self.difference.num_alike_after:
            num = self.difference.num_alike_after
            what = "1 token after it matches" if num == 1 else f"{num:,} tokens after it match"
            notes += [
                f"The {what} but cannot hit, because the prefix differs.",
                f"Move the changing part after {'it' if num == 1 else 'them'}.",
            ]
        if self.wait is not None and self.wait.tenant_s + self.wait.others_s >= LONG_WAIT_S:
            notes.append(self.wait.sentence)
        if self.num_kept:
            what = _were(self.num_kept, "token")
            notes.append(f"{what} kept as generated, in the answers of earlier turns.")
        if self.num_prepared:
            what = _were(self.num_prepared, "cached token")
            notes.append(f"{what} computed in idle steps, after the last answer (idle_rebase).")
        if self.num_restored_turns:
            what = _were(self.num_restored_turns, "turn")
            tokens = f"{self.num_restored_tokens:,} token{'s' * (self.num_restored_tokens != 1)}"
            notes.append(f"{what} put back as the model wrote them: {tokens}.")
        if self.num_forgotten:
            notes.append(
                f"Compared with {self.num_remembered:,} sequences; {self.num_forgotten:,} earlier "
                "ones are no longer remembered (keep_explanations)."
            )
        return tuple(notes)

    def _repr_html_(self) -> str:
        """Return a table for notebooks: one row per span, all texts escaped."""
        rows = "".join(
            f"<tr><td>{s.start:,}</td><td>{s.stop - 1:,}</td><td>{escape(s.outcome)}</td>"
            f'<td style="text-align:left">{escape(s.sentence)}</td></tr>'
            for s in self.spans
        )
        lines = "\n".join(self.difference.lines) if self.difference else ""
        below = f"<pre>{escape(lines)}</pre>" if lines else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        names = ("first token", "last token", "outcome", "why")
        return (
            f"<p><b>{escape(self.title)}</b></p><table><thead><tr>"
            f"{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>"
            f"<tbody>{rows}</tbody></table>{below}{notes}"
        )

    def __str__(self) -> str:
        lines = [self.title, ""]
        width = len(str(self.num_tokens))
        lines += [
            f"{s.start:>{width}}..{s.stop - 1:<{width}}  {s.outcome:<8}  {s.sentence}"
            for s in self.spans
        ]
        if self.difference is not None:
            lines += ["", *self.difference.lines]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)


_WRITTEN = {"num_kept": "num_kept_tokens", "num_prepared": "num_prepared_tokens"}
"""Fields that have another name in plain values."""

_FIELDS = tuple(field.name for field in fields(Explanation))


def _were(number: int, noun: str) -> str:
    """Begin a sentence: ``1 token was``, ``1,000 tokens were``."""
    return f"1 {noun} was" if number == 1 else f"{number:,} {noun}s were"


def seconds(amount: float) -> str:
    """Format a duration with at most three digits."""
    if amount < 1:
        return f"{amount * 1000:.3g} ms"
    if amount < 120:
        return f"{amount:.3g} s"
    return f"{amount / 60:.0f} min" if amount < 7200 else f"{amount / 3600:.1f} h"

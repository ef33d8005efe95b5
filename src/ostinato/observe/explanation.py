"""Explanations: what became of each token of a prompt, and why.

An ``Explanation`` cuts a prompt into stretches, from its first token to its last; each one hit,
was waited for, was copied, or was computed, and what was computed has a cause (law 10)::

    tokens    0 ........ 32 ... 41 ..................... 80
              hit         copied differs at token 41 from request-0

``str(explanation)`` is the page for people, ``as_dict()`` the same for programs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from html import escape
from typing import Any

_WIDEST_LABEL = 16
"""Letters of a request's name that leave room for both sides; ids of servers are longer."""


class Fate(StrEnum):
    """What became of a stretch of a prompt."""

    HIT = "hit"
    """Found in whole blocks."""
    WAITED = "waited"
    """Found in whole blocks that another request computed after this one had come."""
    COPIED = "copied"
    """Copied out of a block that the prompt leaves in its middle."""
    COMPUTED = "computed"
    """Went through the model."""


class Cause(StrEnum):
    """Why a stretch was computed."""

    NEVER_SEEN = "never seen"
    DIFFERS = "differs"
    SAME_TEXT = "same text, other tokens"
    OTHER_TENANT = "other tenant"
    OTHER_ADAPTER = "other adapter"
    OTHER_IMAGE = "other image"
    OTHER_HEAD = "other public prefix"
    OTHER_WEIGHTS = "other weights"
    OTHER_MODEL = "other model"
    EVICTED = "evicted"
    REMOVED = "removed"
    NOT_WRITTEN = "not written"
    NEVER_COMPUTED = "never computed"
    IN_FLIGHT = "in flight"
    BLOCK_BOUNDARY = "block boundary"
    SWITCHED_OFF = "switched off"
    LAST_TOKEN = "last token"
    NOT_KEPT = "not kept"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of a prompt with one fate and one cause.

    Attributes:
        start: Position of the first of them.
        stop: Position after the last.
        fate: What became of them.
        cause: Why they were computed; None if they were not.
        request: Whose content they are, or were compared with; None if another tenant's.
        by: The request for which they were evicted; None if unknown, or another tenant's.
        ago_s: Seconds between that and this request's admission.
        idle_s: Seconds since their last use then.
        setting: What switched the cache off, or sets the bound that they met.
        in_answer: Whether the prompt parts from the other's answer rather than from its prompt.
    """

    start: int
    stop: int
    fate: Fate
    cause: Cause | None = None
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
        """What happened, in words."""
        whose = self.request or "another request"
        if self.fate is Fate.HIT:
            return "found in the cache"
        if self.fate is Fate.COPIED:
            return "copied from a cached block that the prompt leaves in its middle"
        if self.fate is Fate.WAITED:
            return f"found in the cache: {whose} computed them while this one waited"
        match self.cause:
            case Cause.NEVER_SEEN if self.request:
                return f"never seen: the nearest prompt, that of {whose}, ends before"
            case Cause.NEVER_SEEN if self.start:
                return "never seen: no prompt that is remembered goes on like this"
            case Cause.NEVER_SEEN:
                return "never seen: no prompt that is remembered begins like this"
            case Cause.DIFFERS:
                if self.in_answer:
                    return f"differs at token {self.start} from the answer to {whose}"
                return f"differs at token {self.start} from {whose}, the nearest prompt"
            case Cause.SAME_TEXT:
                return f"the same text as {whose}, but other tokens from token {self.start} on"
            case Cause.OTHER_TENANT:
                return "seen from another tenant; tenants share nothing"
            case Cause.OTHER_ADAPTER:
                return f"seen from {whose}, under another adapter"
            case Cause.OTHER_IMAGE:
                return f"the tokens of {whose}, but another image at or before them"
            case Cause.OTHER_HEAD:
                return f"seen from {whose}, who began with another public prefix or with none"
            case Cause.OTHER_WEIGHTS:
                return f"computed for {whose} with the weights before the update"
            case Cause.OTHER_MODEL:
                return f"seen from {whose}, which asked for another model"
            case Cause.EVICTED:
                return self._eviction(whose)
            case Cause.REMOVED:
                return f"computed for {whose}, and removed by an administrator{self._when()}"
            case Cause.NOT_WRITTEN:
                return f"computed for {whose}, and kept out of the cache ({self.setting})"
            case Cause.NEVER_COMPUTED:
                return f"part of {whose}, which did not compute them"
            case Cause.IN_FLIGHT:
                return f"{whose} holds them, but was not done: only full blocks are shared early"
            case Cause.BLOCK_BOUNDARY:
                return f"computed for {whose}, in a partly filled block that was not kept"
            case Cause.SWITCHED_OFF:
                return f"reading the cache was switched off: {self.setting}"
            case Cause.LAST_TOKEN:
                return "the last token is always computed: the next one needs its query"
            case _:
                return f"not known: its tokens were not kept ({self.setting})"

    def _eviction(self, whose: str) -> str:
        by = "" if self.by is None else f" for {self.by}"
        idle = "" if self.idle_s is None else f", {seconds(self.idle_s)} after their last use"
        quota = " because its tenant is at its own quota" if self.setting == "quota" else ""
        return f"computed for {whose}, and evicted{by}{quota}{self._when()}{idle}"

    def _when(self) -> str:
        return "" if self.ago_s is None else f" {seconds(self.ago_s)} earlier"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt parts from the nearest one, both sides decoded.

    Attributes:
        token: Position of the first token that differs.
        request: Whose prompt the nearest one is.
        mine: This prompt around the difference, on one line.
        theirs: The nearest prompt there.
        caret: Place of the first character that differs, in both.
        width: Characters of this prompt's token behind it, at least 1.
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
        theirs = self.request if len(self.request) <= _WIDEST_LABEL else "the nearest"
        label = max(len("this prompt"), len(theirs))
        behind = "" if not self.place else f" in {self.place}"
        carets = "^" * self.width
        return (
            f"{theirs:>{label}}  {self.theirs}",
            f"{'this prompt':>{label}}  {self.mine}",
            f"{'':>{label}}  {'':>{self.caret}}{carets} token {self.token}{behind}",
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hit and missed what it did.

    Attributes:
        request_id: Whose prompt it is.
        stretches: From token 0 to the last, without gaps.
        difference: Where it parts from the nearest prompt; None if it does not, or if there is
            no tokenizer.
        num_remembered: Sequences that it could be compared with.
        num_forgotten: Earlier ones that were no longer remembered.
        num_kept: Prompt tokens of earlier answers that stand as they were generated.
    """

    request_id: str
    stretches: tuple[Stretch, ...]
    difference: Difference | None = None
    num_remembered: int = 0
    num_forgotten: int = 0
    num_kept: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.stretches[-1].stop if self.stretches else 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that need not be computed."""
        return sum(s.num_tokens for s in self.stretches if s.fate is not Fate.COMPUTED)

    @property
    def num_copied_tokens(self) -> int:
        """Those of them that were copied."""
        return sum(s.num_tokens for s in self.stretches if s.fate is Fate.COPIED)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why it missed, in the order of the prompt."""
        return tuple(s.cause for s in self.stretches if s.cause is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values, for JSON."""
        stretches = [
            {k: v for k, v in asdict(s).items() if v is not None and v is not False}
            | {"sentence": s.sentence}
            for s in self.stretches
        ]
        return {
            "request_id": self.request_id,
            "num_tokens": self.num_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_copied_tokens": self.num_copied_tokens,
            "stretches": stretches,
            "difference": None if self.difference is None else asdict(self.difference),
            "num_remembered": self.num_remembered,
            "num_forgotten": self.num_forgotten,
            "num_kept_tokens": self.num_kept,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Explanation":
        """Return what ``as_dict`` wrote; what it does not know is left out.

        Raises:
            KeyError, TypeError, ValueError: It is no explanation.
        """
        difference = plain["difference"]
        return cls(
            str(plain["request_id"]),
            tuple(_stretch(stretch) for stretch in plain["stretches"]),
            None if difference is None else Difference(**_known(Difference, difference)),
            int(plain["num_remembered"]),
            int(plain["num_forgotten"]),
            int(plain.get("num_kept_tokens", 0)),
        )

    @property
    def title(self) -> str:
        """What it is of, and how much was cached."""
        return (
            f"{self.request_id}: {self.num_cached_tokens:,} of {self.num_tokens:,} prompt tokens "
            "were cached"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What else is worth knowing."""
        notes = []
        if self.difference is not None and self.difference.num_alike_after:
            num = self.difference.num_alike_after
            what = "1 token after it matches" if num == 1 else f"{num:,} tokens after it match"
            notes.append(
                f"The {what} but cannot hit, because the prefix differs. "
                f"Move the changing part after {'it' if num == 1 else 'them'}."
            )
        if self.num_kept:
            what = "1 token was" if self.num_kept == 1 else f"{self.num_kept:,} tokens were"
            notes.append(f"{what} kept as generated, in the answers of earlier turns.")
        if self.num_forgotten:
            notes.append(
                f"Compared with {self.num_remembered:,} sequences; {self.num_forgotten:,} earlier "
                "ones are no longer remembered (keep_explanations)."
            )
        return tuple(notes)

    def _repr_html_(self) -> str:
        """Return a table for notebooks: one row per stretch, all texts escaped."""
        rows = "".join(
            f"<tr><td>{s.start:,}</td><td>{s.stop - 1:,}</td><td>{escape(s.fate)}</td>"
            f'<td style="text-align:left">{escape(s.sentence)}</td></tr>'
            for s in self.stretches
        )
        lines = [*(self.difference.lines if self.difference else ())]
        below = f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        head = "".join(f"<th>{name}</th>" for name in ("first token", "last token", "fate", "why"))
        return (
            f"<p><b>{escape(self.title)}</b></p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>{below}{notes}"
        )

    def __str__(self) -> str:
        lines = [self.title, ""]
        width = len(str(self.num_tokens))
        lines += [
            f"{s.start:>{width}}..{s.stop - 1:<{width}}  {s.fate:<8}  {s.sentence}"
            for s in self.stretches
        ]
        if self.difference is not None:
            lines += ["", *self.difference.lines]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)


def _stretch(plain: Mapping[str, Any]) -> Stretch:
    known = _known(Stretch, plain)
    cause = known.get("cause")
    return Stretch(
        **known | {"fate": Fate(known["fate"]), "cause": None if cause is None else Cause(cause)}
    )


def _known(kind: type[Stretch] | type[Difference], plain: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in plain.items() if name in names}


def seconds(amount: float) -> str:
    """Write a duration for people, in three digits at most."""
    if amount < 1:
        return f"{amount * 1000:.3g} ms"
    if amount < 120:
        return f"{amount:.3g} s"
    return f"{amount / 60:.0f} min" if amount < 7200 else f"{amount / 3600:.1f} h"

"""What a chat template keeps and loses of earlier turns."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["appends", "loses", "refused", "unused"]
"""``unused``: the template shows nothing of what the dialogue has, such as tools."""

Cause = Literal["reasoning", "opening", "end mark", "variable", "tokens", "text"]
"""``reasoning`` is dropped, the ``opening`` of an answer is written differently later, so is its
``end mark``; a ``variable`` changed; the text goes on, but its ``tokens`` do not; other ``text``
changed."""


@dataclass(frozen=True, slots=True)
class TurnLoss:
    """Tokens that were computed, and that the next prompt does not have at their place.

    Attributes:
        at: What comes next: ``tool result``, ``user message``, or what was changed.
        message: Number of that message in the dialogue, from 0.
        cause: Why.
        lost_tokens: Tokens of the prompt and the answer that the next prompt does not reuse.
        known_tokens: Tokens that the prompt and the answer had.
        before: The end of what is kept.
        written: What was written after it.
        rendered: What the next prompt has instead.
    """

    at: str
    message: int
    cause: Cause
    lost_tokens: int
    known_tokens: int
    before: str
    written: str
    rendered: str


@dataclass(frozen=True, slots=True)
class Case:
    """One dialogue, or one variable that changes.

    Attributes:
        name: Of the dialogue or the variable.
        status: The outcome.
        losses: In order; empty unless it ``loses``.
        error: What the template raised, if it ``refused``.
        by_client: Whether it is the client that drops something, or changes a variable.
    """

    name: str
    status: Status
    losses: tuple[TurnLoss, ...] = ()
    error: str = ""
    by_client: bool = False

    @property
    def lost_tokens(self) -> int:
        """Tokens lost over the whole dialogue."""
        return sum(loss.lost_tokens for loss in self.losses)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What a template does to each dialogue.

    Attributes:
        digest: SHA-256 of template and tokenizer, in hex.
        cases: In the order of ``DIALOGUES`` and ``SWITCHES``.
    """

    digest: str
    cases: tuple[Case, ...]

    def case(self, name: str) -> Case:
        """Return the case of that name."""
        return next(case for case in self.cases if case.name == name)

    @property
    def broken(self) -> str:
        """Why the template renders nothing at all; empty if it renders plain turns."""
        return self.cases[0].error if self.cases[0].status == "refused" else ""

    @property
    def losing(self) -> tuple[Case, ...]:
        """Cases in which turns lose tokens."""
        return tuple(case for case in self.cases if case.status == "loses")

    @property
    def drops_at_user_message(self) -> bool:
        """Whether a further user message removes text of earlier turns, not only an end mark."""
        return any(
            loss.at == "user message" and loss.cause not in ("end mark", "tokens")
            for case in self.dialogues
            for loss in case.losses
        )

    @property
    def is_append_only(self) -> bool:
        """Whether every dialogue that it renders is only appended to, whatever clients keep.

        Variables that change are not among them: an append-only client changes none.
        """
        return not self.broken and not any(case.status == "loses" for case in self.dialogues)

    @property
    def dialogues(self) -> tuple[Case, ...]:
        """The cases in which the client sends back all that it got and changes no variable."""
        return tuple(case for case in self.cases if not case.by_client)

    def summary(self) -> str:
        """Return one line about what is lost; empty if nothing is."""
        if self.broken:
            return f"the chat template renders no conversation: {self.broken}"
        parts = [_sentence(case) for case in self.dialogues if case.status == "loses"]
        listed = "; ".join(parts)
        return f"the chat template loses tokens of earlier turns: {listed}" if parts else ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "digest": self.digest,
            "append_only": self.is_append_only,
            "drops_at_user_message": self.drops_at_user_message,
            "summary": self.summary(),
            "cases": [{**asdict(case), "lost_tokens": case.lost_tokens} for case in self.cases],
        }


def _sentence(case: Case) -> str:
    """Such as ``reasoning (38 of 71 tokens at a user message: reasoning)``."""
    worst = max(case.losses, key=lambda loss: loss.lost_tokens)
    return (
        f"{case.name} ({worst.lost_tokens} of {worst.known_tokens} tokens at "
        f"{_article(worst.at)}: {worst.cause})"
    )


def _article(noun: str) -> str:
    return noun if noun.startswith("the ") else f"a {noun}"


def first_difference(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])

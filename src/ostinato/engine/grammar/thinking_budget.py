"""A bound on a model's reasoning: beyond it, the closing mark is forced.

The bound is a constraint of the output, as a grammar is, and so it moves with the sequence: forks
copy its state, and a preempted sequence keeps it::

    undecided ──<think>──► thinking ──N tokens──► closing ──</think>──► done
        └──anything else────────┬────</think>──────────────────────────►┘

Source: ``thinking_token_budget`` of vLLM's ``SamplingParams``.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ostinato.core.plan import TokenConstraint
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.errors import InvalidSamplingParams

MAX_MARK_CHARACTERS = 256
"""Longest mark: the end of the text is searched for it after each token."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens a model may reason before it answers.

    Attributes:
        num_tokens: Tokens between the marks; then the closing mark is forced.
        closing: The mark that ends the reasoning.
        opening: The mark that begins it, where the model writes it; an answer that begins with
            anything else has no reasoning. None if the prompt ends with it.
    """

    num_tokens: int
    closing: str = "</think>"
    opening: str | None = "<think>"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidSamplingParams: The number is negative, or a mark is empty or too long.
        """
        number = self.num_tokens
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise InvalidSamplingParams(
                f"thinking_budget.num_tokens={number!r:.80}: must be an integer, at least 0"
            )
        for name in ("closing", "opening"):
            mark = getattr(self, name)
            if mark is None and name == "opening":
                continue
            if not isinstance(mark, str) or not 0 < len(mark) <= MAX_MARK_CHARACTERS:
                raise InvalidSamplingParams(
                    f"thinking_budget.{name}={mark!r:.80}: must be a text of 1 to "
                    f"{MAX_MARK_CHARACTERS} characters"
                )


class ThinkingConstraint:
    """A ``TokenConstraint`` that ends the reasoning, beside another one that may bind the rest."""

    def __init__(
        self,
        budget: ThinkingBudget,
        closing_ids: tuple[int, ...],
        tokens: TokenTable,
        num_bytes: int,
        other: TokenConstraint | None = None,
    ) -> None:
        """Begin before the first token of an answer.

        Args:
            budget: The bound.
            closing_ids: The tokens of its closing mark.
            tokens: The texts of the model's tokens.
            num_bytes: Of a mask.
            other: What constrains the answer besides; it sees all tokens.
        """
        self._budget, self._closing_ids, self._tokens = budget, closing_ids, tokens
        self._num_bytes, self._other = num_bytes, other
        self._text = ""  # the end of what was written, as far as a mark may begin in it
        self._num_tokens, self._num_forced = 0, 0
        self._phase: Literal["undecided", "thinking", "closing", "done"] = "undecided"
        if budget.opening is None:
            self._phase = "thinking" if budget.num_tokens else "closing"

    @property
    def is_complete(self) -> bool:
        """Whether the other constraint is complete."""
        return self._other is not None and self._other.is_complete

    @property
    def allows_all(self) -> bool:
        """Whether neither the mark nor the other constraint binds the next token."""
        return self._phase != "closing" and (self._other is None or self._other.allows_all)

    @property
    def error(self) -> str:
        """Why the other constraint cannot go on; empty if it can."""
        return "" if self._other is None else self._other.error

    def copy(self) -> "ThinkingConstraint":
        """Return an independent constraint in the same state."""
        copied = copy.copy(self)
        copied._other = None if self._other is None else self._other.copy()
        return copied

    def mask(self) -> NDArray[np.uint8]:
        """Return which ids may come next, one bit each: one alone while the mark is written."""
        if self._phase != "closing":
            if self._other is not None:
                return self._other.mask()
            return np.full(self._num_bytes, 255, dtype=np.uint8)
        mask = np.zeros(self._num_bytes, dtype=np.uint8)
        token = self._closing_ids[self._num_forced]
        mask[token // 8] = 1 << token % 8
        if self._other is not None:
            allowed = self._other.mask()[: self._num_bytes]
            mask[: len(allowed)] &= allowed
        return mask

    def advance(self, token_id: int) -> None:
        """Add a sampled token, which may begin or end the reasoning."""
        if self._other is not None:
            self._other.advance(token_id)
        if self._phase == "undecided":
            self._look_for_opening(self._tokens.text(token_id))
        elif self._phase == "thinking":
            self._think(self._tokens.text(token_id))
        elif self._phase == "closing":
            self._num_forced += 1
            if self._num_forced == len(self._closing_ids):
                self._phase = "done"

    def _look_for_opening(self, text: str) -> None:
        """Decide whether the answer begins with reasoning, once that can be told."""
        opening = self._budget.opening or ""
        self._text = (self._text + text).lstrip()
        if self._text.startswith(opening):
            self._phase = "thinking" if self._budget.num_tokens else "closing"
            self._text = self._text[len(opening) :]
            if self._budget.closing in self._text:
                self._phase = "done"
        elif not opening.startswith(self._text):
            self._phase = "done"

    def _think(self, text: str) -> None:
        """Count a token of the reasoning, unless it ends it."""
        closing = self._budget.closing
        self._num_tokens += 1
        self._text += text
        if closing in self._text:
            self._phase = "done"
        elif self._num_tokens >= self._budget.num_tokens:
            self._phase = "closing"
        self._text = self._text[-len(closing) :]

"""Compiled grammars as token constraints of running requests, within a budget of time.

Masks are computed in the engine's thread, so every request of a step waits for them. An ambiguous
grammar makes them dear: with ``s: s s | "a"`` the parser follows all ways in which a text can be
derived, and the thousandth token costs a thousand times what the first did. So each request has a
budget of processor time, which its continuations share, and ends with an error where it is spent.
"""

import copy
import time
from array import array
from collections.abc import Callable

import numpy as np
import regex
from llguidance import LLMatcher
from numpy.typing import NDArray

from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.engine.text.detokenizer import TokenTable

ADVANCE_TOKENS = 250
"""Tokens whose time is in the budget from the start: the first masks of a grammar cost more."""

SEARCH_S = 0.05
"""Longest search for an expression in the end of a text; it is looked for after each token."""


class GrammarBudget:
    """Processor time that the grammar of one request may take."""

    def __init__(self, max_ms: int, clock: Callable[[], float] = time.thread_time) -> None:
        """Allow ``max_ms`` a token; a clock's seconds are those of the thread."""
        self._max_ms, self._clock = max_ms, clock
        self._num_tokens, self._spent_s, self._begun_s = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self._begun_s = self._clock()

    def __exit__(self, *error: object) -> None:
        self._spent_s += self._clock() - self._begun_s

    def add_token(self) -> None:
        """Earn a token's time."""
        self._num_tokens += 1

    @property
    def error(self) -> str:
        """Why the request ends; empty while there is time left."""
        if self._spent_s * 1_000 <= self._max_ms * (ADVANCE_TOKENS + self._num_tokens):
            return ""
        return (
            f"it took {self._spent_s:.2f} s of processor time for {self._num_tokens} tokens, and "
            f"max_grammar_ms={self._max_ms} allows that much for each, with {ADVANCE_TOKENS} in "
            "advance: make it less ambiguous, such as by recursion on the left alone, or raise "
            "max_grammar_ms"
        )


class GrammarConstraint:
    """A matcher of ``llguidance`` as a ``TokenConstraint``, whose masks have ``num_bytes``."""

    def __init__(self, matcher: LLMatcher, num_bytes: int, budget: GrammarBudget) -> None:
        """Wrap a matcher; the budget is that of its request."""
        self.num_bytes = num_bytes
        self._matcher, self._budget = matcher, budget

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def allows_all(self) -> bool:
        """Never, as far as is known without the mask."""
        return False

    @property
    def error(self) -> str:
        """Why it cannot go on; empty if it can."""
        if self._matcher.is_error():
            return brief(self._matcher.get_error())
        return self._budget.error

    def copy(self) -> "GrammarConstraint":
        """Return an independent constraint in the same state, with the same budget."""
        return self.begin(self._budget)

    def begin(self, budget: GrammarBudget) -> "GrammarConstraint":
        """Return an independent constraint in the same state, of another request."""
        return GrammarConstraint(self._matcher.deep_copy(), self.num_bytes, budget)

    def mask(self) -> NDArray[np.uint8]:
        """Return which ids may come next, one bit each; none after a failure."""
        bits = b""
        if not self.error:
            with self._budget:
                bits = self._matcher.compute_bitmask()
        if self._matcher.is_error() or not bits:
            return np.zeros(self.num_bytes, dtype=np.uint8)
        return np.frombuffer(bits, dtype=np.uint8)

    def advance(self, token_id: int) -> None:
        """Add a sampled token; one that is not allowed puts the matcher into error."""
        self._budget.add_token()
        with self._budget:
            self._matcher.consume_token(token_id)

    def forced(self) -> list[int]:
        """Return the ids of text that must come next, as the tokenizer would write it."""
        if self.error or self.is_complete:
            return []
        with self._budget:
            return self._matcher.compute_ff_tokens()

    def num_allowed(self, tokens: "array[int]") -> int:
        """Return how many of some tokens it would allow to come next, one after the other."""
        if self.error or self.is_complete:
            return 0
        with self._budget:
            return self._matcher.validate_tokens(tokens.tolist())


class DelayedConstraint:
    """A constraint that applies once the output has passed an expression: after the reasoning."""

    _MAX_TEXT = 256
    """Characters at the end of the text that the expression is looked for in."""

    def __init__(
        self,
        constraint: GrammarConstraint,
        form: StructuredOutputs,
        tokens: TokenTable,
        budget: GrammarBudget,
    ) -> None:
        """Begin free, or undecided where an opening token is named."""
        self._constraint = constraint
        self._num_bytes, self._budget, self._tokens = constraint.num_bytes, budget, tokens
        self._after = regex.compile(form.after or "")
        self._opening = form.opening
        self._text, self._failure = "", ""
        self._is_free = form.opening is None
        self._is_undecided = not self._is_free

    @property
    def is_complete(self) -> bool:
        """Whether the output satisfies the constraint and nothing may follow."""
        return not self._is_free and self._constraint.is_complete

    @property
    def allows_all(self) -> bool:
        """Whether it does not apply yet."""
        return self._is_free and not self.error

    @property
    def error(self) -> str:
        """Why it cannot go on; empty if it can."""
        return self._failure or (self._budget.error if self._is_free else self._constraint.error)

    def copy(self) -> "DelayedConstraint":
        """Return an independent constraint in the same state, with the same budget."""
        other = copy.copy(self)
        other._constraint = self._constraint.copy()
        return other

    def mask(self) -> NDArray[np.uint8]:
        """Return which ids may come next, one bit each: all before the constraint applies."""
        if self.error:
            return np.zeros(self._num_bytes, dtype=np.uint8)
        if self._is_free:
            return np.full(self._num_bytes, 255, dtype=np.uint8)
        mask = self._constraint.mask()
        opening = self._tokens.id_of(self._opening or "") if self._is_undecided else None
        if opening is not None:
            mask = mask.copy()
            mask[opening // 8] |= 1 << opening % 8
        return mask

    def advance(self, token_id: int) -> None:
        """Add a sampled token, which may end the unconstrained part."""
        if self._is_undecided:
            self._is_undecided = False
            self._is_free = token_id == self._tokens.id_of(self._opening or "")
        if not self._is_free:
            self._constraint.advance(token_id)
            return
        self._text = (self._text + self._tokens.text(token_id))[-self._MAX_TEXT :]
        self._budget.add_token()
        with self._budget:
            self._search()

    def forced(self) -> list[int]:
        """Return the ids that must come next, once the constraint applies."""
        is_certain = not (self._is_free or self._is_undecided)
        return self._constraint.forced() if is_certain else []

    def num_allowed(self, tokens: "array[int]") -> int:
        """Return how many of some tokens could come next; all before the constraint applies."""
        return len(tokens) if self._is_free else self._constraint.num_allowed(tokens)

    def _search(self) -> None:
        """Look for the expression; one that backtracks for long ends the request."""
        try:
            self._is_free = self._after.search(self._text, timeout=SEARCH_S) is None
        except TimeoutError:
            self._failure = (
                f"structured_outputs.after={self._after.pattern!r:.80}: to look for it in "
                f"{len(self._text)} characters takes more than {SEARCH_S * 1000:.0f} ms: use an "
                "expression that does not backtrack"
            )


def brief(message: str) -> str:
    """Leave out the library's dump of its state, and keep the message to a few lines."""
    return message.split("<state>")[0].strip()[:400]

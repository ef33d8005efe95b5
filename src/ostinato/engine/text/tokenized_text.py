"""A text with its tokens, and the places where another text may branch off.

::

    text       <|im_start|>user Hi<|im_end|> <|im_start|>assistant Hello there<|im_end|>
    ends                   ^                ^            ^        ´     ´              ^
    counts                 1                4            6        8     9             10

``ends`` are boundaries: a new text that agrees so far takes the tokens so far. Places between the
tokens of the newest answer (´) serve as well where the new text goes on with such a special token,
as after an answer whose trailing white space a template drops.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from ostinato.core.tokens import TOKEN_BYTES

_OVERHEAD_BYTES = 1024
"""Of the Python objects around the arrays."""


_row: "Callable[[], array[int]]" = partial(array, "I")


@dataclass(frozen=True, slots=True)
class Places:
    """Places in a text, in order, and how many tokens stand before each."""

    ends: "array[int]" = field(default_factory=_row)  # bytes of the text before each place
    counts: "array[int]" = field(default_factory=_row)  # tokens before it
    # Of the special tokens there; empty for an answer.
    widths: "array[int]" = field(default_factory=_row)

    def add(self, end: int, count: int, width: int | None = None) -> None:
        """Append a place."""
        self.ends.append(end)
        self.counts.append(count)
        if width is not None:
            self.widths.append(width)

    def up_to(self, end: int) -> "Places":
        """Return a copy of those at or before ``end``."""
        num = bisect_right(self.ends, end)
        return Places(self.ends[:num], self.counts[:num], self.widths[:num])

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return TOKEN_BYTES * (len(self.ends) + len(self.counts) + len(self.widths))


@dataclass(frozen=True, slots=True)
class TokenizedText(Sequence[int]):
    """A row of token ids, with the text that it encodes."""

    text: bytes  # in UTF-8
    tokens: "array[int]"  # packed, shape (num_tokens,)
    boundaries: Places = field(default_factory=Places)  # where it may be cut after a special token
    answer: Places = field(default_factory=Places)  # cuts within the newest answer, if any
    generated: tuple[tuple[int, int], ...] = ()  # ranges of tokens that a model generated, in order

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "array[int]": ...
    def __getitem__(self, place: Any) -> Any:
        return self.tokens[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that a model generated."""
        return sum(stop - start for start, stop in self.generated)

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        places = self.boundaries.num_bytes + self.answer.num_bytes
        return len(self.text) + TOKEN_BYTES * len(self.tokens) + places + _OVERHEAD_BYTES

    def head(self, max_tokens: int) -> "TokenizedText":
        """Return it up to the last boundary that is no more than ``max_tokens`` tokens in."""
        num = bisect_right(self.boundaries.counts, max_tokens)
        end = self.boundaries.ends[num - 1] if num else 0
        count = self.boundaries.counts[num - 1] if num else 0
        places, generated = self.boundaries.up_to(end), self.generated_before(count)
        return TokenizedText(self.text[:end], self.tokens[:count], places, generated=generated)

    def generated_before(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of generated tokens among the first ``count``."""
        return tuple((a, min(b, count)) for a, b in self.generated if a < count)

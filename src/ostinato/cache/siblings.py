"""Which cached blocks may follow a prefix, and which of them begins most alike?

The children of one prefix, found in two ways:

* by the whole block: a dict from the block's tokens and extras;
* by its first tokens: a sorted list of the packed tokens. The run that shares the longest
  beginning with a query is a neighbour of the query's place in sorted order, so the best of
  100,000 siblings is found by bisection.

A sealed tail (the partial last block of a sequence that ended) is found the second way only.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from ostinato.core.tokens import num_common_tokens

ChildT = TypeVar("ChildT")


class Siblings(Generic[ChildT]):
    """The children of one prefix."""

    __slots__ = ("_by_block", "_by_text", "_texts")

    def __init__(self) -> None:
        """Make an empty family."""
        self._by_block: dict[bytes, ChildT] = {}
        self._by_text: dict[bytes, list[ChildT]] = {}
        self._texts: list[bytes] = []

    def __len__(self) -> int:
        """Number of children, sealed tails included."""
        return sum(map(len, self._by_text.values()))

    def __bool__(self) -> bool:
        """Whether there is any child."""
        return bool(self._by_text)

    def __iter__(self) -> Iterator[ChildT]:
        """Walk all children, sealed tails included."""
        for children in self._by_text.values():
            yield from children

    def get(self, block: bytes) -> ChildT | None:
        """Find the child whose first full block has these packed tokens and extras."""
        return self._by_block.get(block)

    def add(self, block: bytes | None, text: bytes, child: ChildT) -> None:
        """Add a child.

        Args:
            block: Packed tokens and extras of its first block; None for a sealed tail.
            text: The packed tokens of that block before its first image token.
            child: Who it is.

        Cost: O(log n) comparisons and a memmove of n pointers.
        """
        if block is not None:
            assert block not in self._by_block, "a block has one place among its siblings"
            self._by_block[block] = child
        if text not in self._by_text:
            insort(self._texts, text)
        self._by_text.setdefault(text, []).append(child)

    def remove(self, block: bytes | None, text: bytes, child: ChildT) -> None:
        """Take out what ``add`` was told."""
        if block is not None:
            del self._by_block[block]
        namesakes = self._by_text[text]
        namesakes.remove(child)
        if not namesakes:
            del self._by_text[text]
            del self._texts[bisect_left(self._texts, text)]

    def replace(self, block: bytes, text: bytes, old: ChildT, new: ChildT) -> None:
        """Put one child in another's place."""
        self._by_block[block] = new
        namesakes = self._by_text[text]
        namesakes[namesakes.index(old)] = new

    def most_alike(self, text: bytes) -> tuple[ChildT, int] | None:
        """Find the child that shares the most first tokens with a packed run.

        Returns:
            The child and the number of shared tokens, at least 1; None if no child begins
            with the run's first token.

        Cost: O(log n) comparisons.
        """
        place = bisect_left(self._texts, text)
        best, most = None, 0
        for candidate in self._texts[max(0, place - 1) : place + 1]:
            common = num_common_tokens(candidate, text)
            if common > most:
                best, most = candidate, common
        return None if best is None else (self._by_text[best][0], most)

"""Which cached blocks may follow a prefix, and which of them begins most alike?

The children of one prefix, found in two ways:

* by the whole block: a dict from the block's tokens and extras;
* by its first tokens: a sorted list of the packed tokens. The run that shares the longest
  beginning with a query is a neighbour of the query's place in sorted order, so the best of
  100,000 siblings is found by bisection.

Where several share the longest beginning, the one that came last is taken: which of them is the
neighbour hangs on the numbers that tokens happen to have, and a replay under other numbers must
find the same.

A sealed tail (the partial last block of a sequence that ended) is found the second way only.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

ChildT = TypeVar("ChildT")


class Namesakes(list[ChildT]):
    """Children of one text, and which of all texts of the family it was."""

    __slots__ = ("number",)

    number: int


class Siblings(Generic[ChildT]):
    """The children of one prefix.

    Attributes:
        get: Finds the child whose first full block has these packed tokens and extras, or None.
        newest: The child that came last of those with a full block, None without one: behind most
            prefixes there is one, and it is known without its name.
        by_text: All children by the text that they begin with, in the order in which texts came;
            to be read alone.
    """

    __slots__ = ("_by_block", "_num_texts", "_texts", "by_text", "get", "newest")

    def __init__(self) -> None:
        """Make an empty family."""
        self._by_block: dict[bytes, ChildT] = {}
        self.get = self._by_block.get
        self.newest: ChildT | None = None
        self.by_text: dict[bytes, Namesakes[ChildT]] = {}
        self._texts: list[bytes] = []
        self._num_texts = 0  # that ever came

    def __len__(self) -> int:
        """Number of children, sealed tails included."""
        return sum(map(len, self.by_text.values()))

    def __bool__(self) -> bool:
        """Whether there is any child."""
        return bool(self.by_text)

    def __iter__(self) -> Iterator[ChildT]:
        """Walk all children, sealed tails included."""
        for children in self.by_text.values():
            yield from children

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
            self._by_block[block] = self.newest = child
        namesakes = self.by_text.get(text)
        if namesakes is None:
            insort(self._texts, text)
            namesakes = self.by_text[text] = Namesakes()
            namesakes.number = self._num_texts
            self._num_texts += 1
        namesakes.append(child)

    def remove(self, block: bytes | None, text: bytes, child: ChildT) -> None:
        """Take out what ``add`` was told."""
        if block is not None:
            del self._by_block[block]
            if child is self.newest:
                self.newest = next(reversed(self._by_block.values()), None)
        namesakes = self.by_text[text]
        namesakes.remove(child)
        if not namesakes:
            del self.by_text[text]
            del self._texts[bisect_left(self._texts, text)]

    def sealed_tails(self, most: int) -> list[ChildT] | None:
        """List the sealed tails, those that came first first.

        Returns:
            None if there are other children, or tails of more than ``most`` texts.
        """
        if self._by_block or len(self._texts) > most:
            return None
        return [child for namesakes in self.by_text.values() for child in namesakes]

    def clear(self) -> None:
        """Take all children out."""
        self._by_block.clear()
        self.newest = None
        self.by_text.clear()
        self._texts.clear()

    def replace(self, block: bytes, text: bytes, old: ChildT, new: ChildT) -> None:
        """Put one child in another's place."""
        self._by_block[block] = new
        if old is self.newest:
            self.newest = new
        namesakes = self.by_text[text]
        namesakes[namesakes.index(old)] = new

    def most_alike(self, text: bytes) -> tuple[ChildT, int] | None:
        """Find the child that shares the most first tokens with a packed run.

        Returns:
            The child and the number of shared tokens, at least 1; None if no child begins
            with the run's first token.

        Cost: O(log n) comparisons, and as a rule O(sqrt(n)) where many share that beginning.
        """
        texts = self._texts
        if not texts:
            return None
        if len(texts) == 1:  # as behind most prompts: one tail, or one turn
            only = texts[0]
            if only.startswith(text):
                most = len(text) // TOKEN_BYTES
            elif text.startswith(only):
                most = len(only) // TOKEN_BYTES
            else:
                most = num_common_tokens(only, text)
            return (self.by_text[only][0], most) if most else None
        place = bisect_left(texts, text)
        most = num_common_tokens(texts[place], text) if place < len(texts) else 0
        if place:
            most = max(most, num_common_tokens(texts[place - 1], text))
        if not most:
            return None
        return self.by_text[self._newest(text[: most * TOKEN_BYTES])][0], most

    def _newest(self, beginning: bytes) -> bytes:
        """Name the text that came last among those with a beginning, of which there are some."""
        texts, size = self._texts, len(beginning)
        first = bisect_left(texts, beginning)
        if first + 1 == len(texts) or not texts[first + 1].startswith(beginning):
            return texts[first]
        last = bisect_right(texts, beginning, first, key=lambda text: text[:size])
        if (last - first) ** 2 <= len(texts):  # few: look at each
            return max(texts[first:last], key=lambda text: self.by_text[text].number)
        # Many: one of them is soon met on the way back from the newest of all.
        return next(text for text in reversed(self.by_text) if text.startswith(beginning))

"""The children of one prefix, the cached blocks that may follow it; both indexes keep them.

They are found by the whole block, or by its first tokens: the text with the longest common prefix
is a neighbour of the query in sorted order, so the best of 100,000 children is found by bisection.
Where several share the longest prefix, the newest is taken: which of them is the neighbour depends
on the numbers of the tokens, and a replay with other numbers must find the same one. A partial
block, the last one of a sequence that ended, is found the second way only.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ostinato.core.identity import PrefixKey
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

ChildT = TypeVar("ChildT")


class _Bucket(list[ChildT]):
    """Children of one text; ``number`` counts the texts in order of arrival."""

    __slots__ = ("number",)
    number: int


class ChildIndex(Generic[ChildT]):
    """The children of one prefix.

    Attributes:
        get: Finds the child whose first full block has these packed tokens and extras, or None.
        newest: The newest child with a full block, or None; most prefixes have one child.
        by_text: All children by their first text, in order of arrival; read-only.
    """

    __slots__ = ("_by_block", "_num_texts", "_texts", "by_text", "get", "newest")

    def __init__(self) -> None:
        """Make an index without children."""
        self._by_block: dict[bytes, ChildT] = {}
        self.get = self._by_block.get
        self.newest: ChildT | None = None
        self.by_text: dict[bytes, _Bucket[ChildT]] = {}
        self._texts: list[bytes] = []
        self._num_texts = 0  # that were ever added

    def __len__(self) -> int:
        """Number of children, partial blocks included."""
        return sum(map(len, self.by_text.values()))

    def __bool__(self) -> bool:
        """Whether there is any child."""
        return bool(self.by_text)

    def __iter__(self) -> Iterator[ChildT]:
        """Walk all children, partial blocks included."""
        for children in self.by_text.values():
            yield from children

    def add(self, block: bytes | None, text: bytes, child: ChildT) -> None:
        """Add a child, in O(log n) comparisons and a memmove of n pointers.

        Args:
            block: Packed tokens and extras of its first block; None for a partial block.
            text: The packed tokens of that block before its first image token.
            child: The child.
        """
        if block is not None:
            assert block not in self._by_block, "a block has one place among its siblings"
            self._by_block[block] = self.newest = child
        bucket = self.by_text.get(text)
        if bucket is None:
            insort(self._texts, text)
            bucket = self.by_text[text] = _Bucket()
            bucket.number = self._num_texts
            self._num_texts += 1
        bucket.append(child)

    def remove(self, block: bytes | None, text: bytes, child: ChildT) -> None:
        """Remove what was added with these arguments."""
        if block is not None:
            del self._by_block[block]
            if child is self.newest:
                self.newest = next(reversed(self._by_block.values()), None)
        bucket = self.by_text[text]
        bucket.remove(child)
        if not bucket:
            del self.by_text[text]
            del self._texts[bisect_left(self._texts, text)]

    def replace(self, block: bytes | None, text: bytes, old: ChildT, new: ChildT) -> None:
        """Replace one child, which is no partial block, by another that begins with it."""
        assert block is not None
        self._by_block[block] = new
        if old is self.newest:
            self.newest = new
        bucket = self.by_text[text]
        bucket[bucket.index(old)] = new

    def longest_common_prefix(self, text: bytes) -> tuple[ChildT, int] | None:
        """Find the child with the longest common prefix with a packed run.

        Returns:
            The child and the shared tokens, at least 1; None if no child begins with the first.

        Cost: O(log n) comparisons, and as a rule O(sqrt(n)) where many share that beginning.
        """
        texts = self._texts
        if not texts:
            return None
        if len(texts) == 1:  # the common case
            only = texts[0]
            is_begun = only.startswith(text)
            most = len(text) // TOKEN_BYTES if is_begun else num_common_tokens(only, text)
            return (self.by_text[only][0], most) if most else None
        place = bisect_left(texts, text)
        most = num_common_tokens(texts[place], text) if place < len(texts) else 0
        if place:
            most = max(most, num_common_tokens(texts[place - 1], text))
        if not most:
            return None
        return self.by_text[self._newest(text[: most * TOKEN_BYTES])][0], most

    def begins_with(self, text: bytes) -> bool:
        """Whether any child begins with a packed run."""
        best = self.longest_common_prefix(text) if self.by_text else None
        return best is not None and best[1] * TOKEN_BYTES == len(text)

    def _newest(self, beginning: bytes) -> bytes:
        """Return the newest text that starts with ``beginning``; there is one."""
        texts, size = self._texts, len(beginning)
        first = bisect_left(texts, beginning)
        if first + 1 == len(texts) or not texts[first + 1].startswith(beginning):
            return texts[first]
        last = bisect_right(texts, beginning, first, key=lambda text: text[:size])
        if (last - first) ** 2 <= len(texts):  # few: look at each
            return max(texts[first:last], key=lambda text: self.by_text[text].number)
        # Many: one of them is found soon, searching back from the newest of all.
        return next(text for text in reversed(self.by_text) if text.startswith(beginning))


class _Node(Protocol):
    """What has children: a radix node, or a content of the hash index."""

    children: Any


NodeT = TypeVar("NodeT", bound=_Node)


def walk(roots: Iterable[NodeT]) -> Iterator[tuple[int | None, NodeT]]:
    """Walk all that continues some roots, each with the number of its parent in the walk."""
    stack: list[tuple[int | None, NodeT]] = [(None, child) for r in roots for child in r.children]
    number = 0
    while stack:
        parent, node = stack.pop()
        yield parent, node
        stack += [(number, child) for child in node.children]
        number += 1


def tail_text(key: PrefixKey, start: int, num_tokens: int, block_size: int) -> bytes:
    """Return the packed tokens after a match that may be copied out of the next block.

    Of ``num_tokens`` that may hit, ``start`` hit in whole blocks.
    """
    stop = min(num_tokens, start + block_size)
    if key.has_extras:
        stop = start + key.num_text_tokens(start, stop)
    return key.tokens[start:stop].tobytes() if stop > start and block_size > 1 else b""


def partial_text(key: PrefixKey, start: int, num_tokens: int) -> bytes | None:
    """Return the packed tokens of a partial block; None if some of them are an image's."""
    if key.has_extras and key.num_text_tokens(start, num_tokens) < num_tokens - start:
        return None  # only text is shared token by token
    return key.packed_range(start, num_tokens)

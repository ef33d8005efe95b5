"""The children of one prefix, the cached blocks that may follow it; both indexes keep them.

Blocks are found by name: their packed tokens, and what images add. Names that begin alike are
neighbours in sorted order, so the block with the longest common prefix is found by bisection, among
100,000 children too. Where several share the longest prefix, the newest is taken: which of them is
the neighbour depends on the numbers of the tokens, and a replay with other numbers must find the
same one.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

ChildT = TypeVar("ChildT")


class ChildIndex(Generic[ChildT]):
    """The children of one prefix, by the names of their first blocks."""

    __slots__ = ("_by_name", "_names", "_num_added", "_numbers", "get", "newest")

    def __init__(self) -> None:
        """Make an index without children."""
        self._by_name: dict[bytes, ChildT] = {}  # oldest first
        self.get = self._by_name.get
        self.newest: ChildT | None = None  # most prefixes have one child
        self._names: list[bytes] = []  # sorted
        self._numbers: dict[bytes, int] = {}  # in order of arrival
        self._num_added = 0

    def __len__(self) -> int:
        """Number of children."""
        return len(self._names)

    def __iter__(self) -> Iterator[ChildT]:
        """Iterate over all children, oldest first."""
        return iter(self._by_name.values())

    def add(self, name: bytes, child: ChildT) -> None:
        """Add a child, in O(log n) comparisons and a memmove of n pointers."""
        assert name not in self._by_name, "a block has one place among its siblings"
        self._by_name[name] = self.newest = child
        insort(self._names, name)
        self._numbers[name] = self._num_added
        self._num_added += 1

    def remove(self, name: bytes) -> None:
        """Remove a child."""
        child = self._by_name.pop(name)
        if child is self.newest:
            self.newest = next(reversed(self._by_name.values()), None)
        del self._numbers[name], self._names[bisect_left(self._names, name)]

    def replace(self, name: bytes, child: ChildT) -> None:
        """Replace a child by one that begins with it."""
        if self._by_name[name] is self.newest:
            self.newest = child
        self._by_name[name] = child

    def closest(self, run: bytes) -> tuple[ChildT | None, int]:
        """Find the child whose name has the longest common prefix with a packed run.

        Returns:
            The child and the tokens that are alike; None and 0 if no child begins with the first.

        Cost: O(log n) comparisons, and as a rule O(sqrt(n)) where many share that prefix.
        """
        names = self._names
        if len(names) == 1:  # the common case
            most = num_common_tokens(names[0], run)
            return (self.newest, most) if most else (None, 0)
        place, most = bisect_left(names, run), 0
        for name in names[max(0, place - 1) : place + 1]:
            most = max(most, num_common_tokens(name, run))
        return (self._by_name[self._newest(run[: most * TOKEN_BYTES])], most) if most else (None, 0)

    def _newest(self, beginning: bytes) -> bytes:
        """Return the newest name that starts with ``beginning``; there is one."""
        names, size = self._names, len(beginning)
        first = bisect_left(names, beginning)
        if first + 1 == len(names) or not names[first + 1].startswith(beginning):
            return names[first]
        last = bisect_right(names, beginning, first, key=lambda name: name[:size])
        if (last - first) ** 2 <= len(names):  # few: look at each
            return max(names[first:last], key=self._numbers.__getitem__)
        # Many: one of them is found soon, searching back from the newest of all.
        return next(name for name in reversed(self._by_name) if name.startswith(beginning))


def walk(roots: Iterable[Any]) -> Iterator[tuple[int | None, Any]]:
    """Iterate over the nodes below some roots, each with the number of its parent among them."""
    found: list[tuple[int | None, Any]] = [(None, child) for r in roots for child in r.children]
    for number, (parent, node) in enumerate(found):  # which grows meanwhile
        yield parent, node
        found += [(number, child) for child in node.children]

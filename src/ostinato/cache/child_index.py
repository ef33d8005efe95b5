"""The children of one prefix, the cached blocks that may follow it; both indexes keep them.

Blocks are found by name: their packed tokens, and what images add. Names that begin alike are
neighbours in sorted order, so the block with the longest common prefix is found by bisection, among
100,000 children too. Where several share the longest prefix, the newest is taken: which of them is
the neighbour depends on the numbers of the tokens, and a replay with other numbers must find the
same one. Each prefix that three or more names share has a group, newest last::

    names    ABCD  ABXY  ABXZ  EFGH
    groups   A, AB: ABCD ABXY ABXZ
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

ChildT = TypeVar("ChildT")


class ChildIndex(Generic[ChildT]):
    """The children of one prefix, by the names of their first blocks."""

    __slots__ = ("_by_name", "_groups", "_names", "_num_added", "_numbers", "get", "newest")

    def __init__(self) -> None:
        """Make an index without children."""
        self._by_name: dict[bytes, ChildT] = {}  # oldest first
        self.get = self._by_name.get
        self.newest: ChildT | None = None  # most prefixes have one child
        self._names: list[bytes] = []  # sorted
        self._numbers: dict[bytes, int] = {}  # in order of arrival
        self._num_added = 0
        self._groups: dict[bytes, dict[bytes, None]] = {}  # by shared prefix, oldest first

    def __len__(self) -> int:
        """Number of children."""
        return len(self._names)

    def __iter__(self) -> Iterator[ChildT]:
        """Iterate over all children, oldest first."""
        return iter(self._by_name.values())

    def add(self, name: bytes, child: ChildT) -> None:
        """Add a child, in O(log n) comparisons and a memmove of n pointers.

        And a step for each token that it shares with two or more siblings.
        """
        assert name not in self._by_name, "a block has one place among its siblings"
        self._by_name[name] = self.newest = child
        self._numbers[name] = self._num_added
        self._num_added += 1
        place = bisect_left(self._names, name)
        for prefix, siblings in self._shared(name, place, place) if self._names else ():
            self._groups.setdefault(prefix, siblings)[name] = None
        self._names.insert(place, name)

    def remove(self, name: bytes) -> None:
        """Remove a child, at the cost of ``add``."""
        child = self._by_name.pop(name)
        if child is self.newest:
            self.newest = self._by_name[_last(self._by_name)] if self._by_name else None
        place = bisect_left(self._names, name)
        for prefix, _ in self._shared(name, place, place + 1):
            group = self._groups[prefix]
            del group[name]
            if len(group) == 2:
                del self._groups[prefix]
        del self._names[place], self._numbers[name]

    def replace(self, name: bytes, child: ChildT) -> None:
        """Replace a child by one that begins with it."""
        if self._by_name[name] is self.newest:
            self.newest = child
        self._by_name[name] = child

    def closest(self, run: bytes) -> tuple[ChildT | None, int]:
        """Find the child whose name has the longest common prefix with a packed run.

        Returns:
            The child and the tokens that are alike; None and 0 if no child begins with the first.

        Cost: O(log n) comparisons.
        """
        names = self._names
        if len(names) == 1:  # the common case
            begins = names[0].startswith(run)
            length = len(run) // TOKEN_BYTES if begins else num_common_tokens(names[0], run)
            return (self.newest, length) if length else (None, 0)
        place, length = bisect_left(names, run), 0
        for name in names[max(0, place - 1) : place + 1]:
            length = max(length, num_common_tokens(name, run))
        if not length:
            return None, 0
        prefix = run[: length * TOKEN_BYTES]
        if prefix in self._groups:
            return self._by_name[_last(self._groups[prefix])], length
        place = bisect_left(names, prefix)
        few = [name for name in names[place : place + 2] if name.startswith(prefix)]
        return self._by_name[max(few, key=self._numbers.__getitem__)], length

    def begins_with(self, run: bytes) -> bool:
        """Whether any child's name begins with a packed run."""
        place = bisect_left(self._names, run)
        return place < len(self._names) and self._names[place].startswith(run)

    def _shared(self, name: bytes, left: int, right: int) -> list[tuple[bytes, dict[bytes, None]]]:
        """Return each prefix that a name shares with two siblings or more, and two of them.

        Its neighbours are before ``left`` and from ``right`` on. Without a group there are no more
        than the two; they come oldest first.
        """
        names, first = self._names, name[:TOKEN_BYTES]
        near = [*names[max(0, left - 2) : left], *names[right : right + 2]]
        near = [neighbour for neighbour in near if neighbour.startswith(first)]
        if len(near) < 2:
            return []
        common = {neighbour: num_common_tokens(name, neighbour) for neighbour in near}
        siblings = sorted(common, key=self._numbers.__getitem__)
        lengths = range(1, sorted(common.values())[-2] + 1)
        return [
            (name[: size * TOKEN_BYTES], {n: None for n in siblings if common[n] >= size})
            for size in lengths
        ]


def _last(names: dict[bytes, Any]) -> bytes:
    """Return the last key of a dict that has one.

    Going back from the end would pass all that was removed there; ``popitem`` drops it for good.
    """
    name, value = names.popitem()
    names[name] = value
    return name


def walk(roots: Iterable[Any]) -> Iterator[tuple[int | None, Any]]:
    """Iterate over the nodes below some roots, each with the number of its parent among them."""
    visited: list[tuple[int | None, Any]] = [(None, child) for r in roots for child in r.children]
    for number, (parent, node) in enumerate(visited):  # which grows meanwhile
        yield parent, node
        visited += [(number, child) for child in node.children]

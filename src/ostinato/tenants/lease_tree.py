"""Leased prefixes that are renewed by use, and when each was used last.

The use of a prefix is a use of all prefixes that it begins with. It is noted at the longest of
them alone; a shorter one collects what is new below it when its own time is up::

    A ──── AB ──── ABC      used: noted at ABC; ABC is news of AB, and AB of A
            └───── ABD      used as well: noted at ABD; AB has that news, and is news already

Each step up is taken once between two collections, so a use costs O(1) amortised however deep
leases are nested. Prefixes are named by their last block, which is theirs while it is leased.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True, eq=False)
class LeasedPrefix:
    """A prefix with at least one lease, or with longer ones below it."""

    blocks: "array[int]"
    above: "LeasedPrefix | None"  # the longest one that it begins with
    num_leases: int = 0
    used_s: float = -inf  # when it was used last, as far as it was told
    below: "dict[int, dict[LeasedPrefix, None]]" = field(default_factory=dict)
    """Longer ones, by the block that follows it."""
    news: "list[LeasedPrefix]" = field(default_factory=list)  # those used since the last collection
    is_news: bool = False  # whether it is in ``above.news``

    def last_used_s(self) -> float:
        """Collect what is new below it, and return when it was used last."""
        prefixes = [self]
        for prefix in prefixes:  # which grows meanwhile
            prefixes += prefix.news
        for prefix in reversed(prefixes):
            for longer in prefix.news:
                longer.is_news = False
                prefix.used_s = max(prefix.used_s, longer.used_s)
            prefix.news.clear()
        return self.used_s


class LeaseTree:
    """The leased prefixes of one identity."""

    def __init__(self) -> None:
        """Start without a prefix."""
        self._by_block: dict[int, LeasedPrefix] = {}  # by last block
        self._lengths: list[int] = []  # of all, in blocks, sorted, each once
        self._counts: dict[int, int] = {}  # prefixes by length
        self._roots: dict[int, dict[LeasedPrefix, None]] = {}  # without another above, by block

    def __bool__(self) -> bool:
        """Whether anything is leased."""
        return bool(self._by_block)

    def longest(self, blocks: "array[int]") -> LeasedPrefix | None:
        """Find the longest leased prefix of a sequence's first blocks.

        Cost: a look-up for each length between it and the sequence's.
        """
        for place in range(bisect_right(self._lengths, len(blocks)) - 1, -1, -1):
            prefix = self._by_block.get(blocks[self._lengths[place] - 1])
            if prefix is not None:
                return prefix
        return None

    def use(self, blocks: "array[int]", now_s: float) -> None:
        """Note that a sequence has used its first blocks."""
        prefix = self.longest(blocks)
        if prefix is None:
            return
        prefix.used_s = now_s
        while prefix.above is not None and not prefix.is_news:
            prefix.is_news = True
            prefix.above.news.append(prefix)
            prefix = prefix.above

    def add(self, blocks: "array[int]") -> LeasedPrefix:
        """Add a lease of a prefix."""
        above = self.longest(blocks)
        if above is not None and len(above.blocks) == len(blocks):
            above.num_leases += 1
            return above
        prefix = LeasedPrefix(blocks, above, 1)
        self._by_block[blocks[-1]] = prefix
        if len(blocks) not in self._counts:
            insort(self._lengths, len(blocks))
        self._counts[len(blocks)] = self._counts.get(len(blocks), 0) + 1
        siblings = self._siblings(prefix)
        may_be_longer = siblings if len(blocks) < self._lengths[-1] else ()
        longer = [
            p for p in may_be_longer if p.blocks[len(blocks) - 1 : len(blocks)] == blocks[-1:]
        ]
        if longer and above is not None:
            above.last_used_s()  # what is new of them is no longer its news
        for other in longer:
            del siblings[other]
            other.above = prefix
            self._siblings(other)[other] = None
        siblings[prefix] = None
        return prefix

    def remove(self, prefix: LeasedPrefix) -> None:
        """Remove a lease; a prefix goes with its last one, unless there are longer ones."""
        prefix.num_leases -= 1
        while not prefix.num_leases and not prefix.below:
            used_s, above, length = prefix.last_used_s(), prefix.above, len(prefix.blocks)
            del self._by_block[prefix.blocks[-1]]
            self._counts[length] -= 1
            if not self._counts[length]:
                del self._counts[length], self._lengths[bisect_left(self._lengths, length)]
            siblings = self._siblings(prefix)
            del siblings[prefix]
            if not siblings:
                del (self._roots if above is None else above.below)[self._next_block(prefix)]
            if above is None:
                return
            above.used_s = max(above.used_s, used_s)
            prefix = above

    def _siblings(self, prefix: LeasedPrefix) -> dict[LeasedPrefix, None]:
        """Return those that are directly below the same one and go on with the same block."""
        group = self._roots if prefix.above is None else prefix.above.below
        return group.setdefault(self._next_block(prefix), {})

    @staticmethod
    def _next_block(prefix: LeasedPrefix) -> int:
        return prefix.blocks[0 if prefix.above is None else len(prefix.above.blocks)]

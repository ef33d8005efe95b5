"""What would a cache of another size find by what this one has learned?

How long blocks of a class wait until they are used again is a fact about the traffic, and not
about the memory: ``ReuseHazard`` counts it for evicted blocks as well. A small cache that had to
learn it from its own few blocks would find less than a large one does. So this one learns nothing:
it has the classes of the real turns, and asks the index that the real policy has fitted, which is
also ten times as fast. It has no account against LRU, and evicts what is worth least.
"""

from bisect import bisect_right

from ostinato.cache.policies.hazard_table import EDGES_S, NUM_BINS
from ostinato.cache.policies.reuse_hazard import ReuseHazard, class_of
from ostinato.cache.small_cache import SampledTurn

_MEMORY = 8
"""Evicted blocks whose uses are remembered, in caches."""

_AGES_S = EDGES_S[1:-1]


class _Block:
    """One sampled block.

    Attributes:
        name: Which.
        uses: How often it was in use.
        parent: The sampled one before it; None for the first.
        num_children: Cached ones that build on it.
        row: Where the index of its class begins.
        born_s: When it was let go of.
        is_held: Whether the running turn uses it.
    """

    __slots__ = ("born_s", "is_held", "name", "num_children", "parent", "row", "uses")

    def __init__(self, name: int, uses: int, parent: "_Block | None") -> None:
        self.name, self.uses, self.parent = name, uses, parent
        self.num_children = self.row = 0
        self.born_s, self.is_held = 0.0, True


class LearnedCache:
    """Blocks, and somebody else's experience."""

    def __init__(self, num_blocks: int, experience: ReuseHazard) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._index = experience.index
        self._blocks: dict[int, _Block] = {}  # in order of release
        self._uses: dict[int, int] = {}  # of evicted ones, in order of eviction

    def serve(self, turn: SampledTurn) -> int:
        """Look a turn's blocks up, insert what is missing, and let go of them.

        Returns:
            How many of those that were looked up were there.
        """
        blocks, path = self._blocks, list[_Block]()
        for name in turn.names:
            block = blocks.get(name)
            if block is None:
                break
            block.uses += 1
            block.is_held = True
            path.append(block)
        num_found = len(path)
        self._insert(turn, path)
        for block in reversed(path):  # tails first
            block.row = class_of(turn.kinds, block.uses) * NUM_BINS
            block.born_s, block.is_held = turn.at_s, False
            blocks[block.name] = blocks.pop(block.name)
        return min(num_found, turn.num_asked)

    def check(self) -> None:
        """Assert that what is cached is counted, and that nothing was evicted before its tail."""
        blocks = self._blocks
        assert len(blocks) <= self._num_blocks, "more blocks than there is room for"
        parents = [block.parent for block in blocks.values() if block.parent is not None]
        assert all(blocks.get(parent.name) is parent for parent in parents), "a tail without roots"
        assert sum(block.num_children for block in blocks.values()) == len(parents)
        assert not any(block.is_held for block in blocks.values()), "nobody holds it"

    def _insert(self, turn: SampledTurn, path: list[_Block]) -> None:
        """Put what is missing behind a path, for as long as there is room."""
        for name in turn.names[len(path) :]:
            if len(self._blocks) >= self._num_blocks and not self._evict(turn.at_s):
                return
            parent = path[-1] if path else None
            if parent is not None:
                parent.num_children += 1
            block = _Block(name, self._uses.pop(name, 0) + 1, parent)
            self._blocks[name] = block
            path.append(block)

    def _evict(self, now_s: float) -> bool:
        """Evict the leaf that is worth least, the oldest of equals; False if all are held.

        Cost: O(blocks), some tenths of a microsecond each.
        """
        index, worst, least = self._index, None, float("inf")
        for block in self._blocks.values():
            if block.num_children or block.is_held:
                continue
            worth = index[block.row + bisect_right(_AGES_S, now_s - block.born_s)]
            if worth < least:
                worst, least = block, worth
        if worst is None:
            return False
        del self._blocks[worst.name]
        if worst.parent is not None:
            worst.parent.num_children -= 1
        self._uses[worst.name] = worst.uses
        if len(self._uses) > _MEMORY * self._num_blocks:
            del self._uses[next(iter(self._uses))]
        return True

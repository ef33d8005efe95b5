"""Small caches without KV, which replay sampled requests.

Each counts how many of a request's sampled blocks it would have found:

* ``LruSimulation``: LRU, in a dict;
* ``LearnedPolicySimulation``: the real cache's own policy at another size, if it is one that
  learns. It learns nothing from its few blocks: the time until blocks of a class are used again
  depends on the traffic and not on the memory, so it uses what the real policy has learned.

Source: Waldspurger, Saemundsson, Ahmad, Park, Cache modeling and optimization using miniature
simulations, ATC 2017.
"""

from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.ghost.sampler import SampledRequest

_RANKED_SHARE = 16
"""One ranking names a sixteenth of the blocks as the next victims."""


class LruSimulation:
    """A cache under LRU."""

    def __init__(self, num_blocks: int) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._blocks: dict[int, None] = {}  # in order of use

    def serve(self, request: SampledRequest) -> int:
        """Look a request's blocks up, and use them all."""
        blocks, names = self._blocks, request.names
        num_hits = 0
        for name in names[: request.num_requested]:
            if name not in blocks:
                break
            num_hits += 1
        for name in reversed(names):  # tails are evicted first, so they count as used first
            blocks.pop(name, None)
            blocks[name] = None
        while len(blocks) > self._num_blocks:
            del blocks[next(iter(blocks))]
        return num_hits


class _RankedBlock:
    """One sampled block of a learned simulation.

    Attributes:
        name: Its name.
        parent: The sampled block before it; None for the first.
        num_children: Cached blocks after it.
        row: Row of its class in the learned table.
        released_s: When it was released; infinite while it is in use.
    """

    __slots__ = ("name", "num_children", "parent", "released_s", "row")

    def __init__(self, name: int, parent: "_RankedBlock | None") -> None:
        self.name, self.parent = name, parent
        self.num_children = self.row = 0
        self.released_s = _IN_USE


_IN_USE = float("inf")


class LearnedPolicySimulation:
    """A cache of another size that uses what the real policy has learned.

    It evicts the leaves that are worth least, without a budget against LRU.
    """

    def __init__(self, num_blocks: int, learned: ReuseHazard) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._learned = learned
        self._blocks: dict[int, _RankedBlock] = {}
        self._victims: list[tuple[float, _RankedBlock]] = []  # when released; the next one last

    def serve(self, request: SampledRequest) -> int:
        """Look a request's blocks up, insert what is missing, and release them."""
        blocks, path = self._blocks, list[_RankedBlock]()
        for name in request.names:
            block = blocks.get(name)
            if block is None:
                break
            block.released_s = _IN_USE
            path.append(block)
        num_hits = len(path)
        self._insert(request, path)
        row_of, at_s = self._learned.row_of, request.at_s
        for block, uses in zip(path, request.uses, strict=False):
            block.row, block.released_s = row_of(request.request_class, uses), at_s
        return min(num_hits, request.num_requested)

    def check(self) -> None:
        """Assert that what is cached is counted, and that nothing was evicted before its tail."""
        blocks = self._blocks
        assert len(blocks) <= self._num_blocks, "more blocks than there is room for"
        parents = [block.parent for block in blocks.values() if block.parent is not None]
        assert all(blocks.get(parent.name) is parent for parent in parents), "a tail without roots"
        assert sum(block.num_children for block in blocks.values()) == len(parents)
        assert all(block.released_s < _IN_USE for block in blocks.values()), "a block is in use"

    def _insert(self, request: SampledRequest, path: list[_RankedBlock]) -> None:
        """Insert what is missing after a path, while there is room."""
        for name in request.names[len(path) :]:
            if len(self._blocks) >= self._num_blocks and not self._evict(request.at_s):
                return
            parent = path[-1] if path else None
            if parent is not None:
                parent.num_children += 1
            block = _RankedBlock(name, parent)
            self._blocks[name] = block
            path.append(block)

    def _evict(self, now_s: float) -> bool:
        """Evict the next victim that has not been used since the last ranking."""
        while True:
            if not self._victims and not self._rank(now_s):
                return False
            released_s, block = self._victims.pop()
            if block.released_s == released_s and not block.num_children:
                del self._blocks[block.name]
                block.released_s = _IN_USE
                if block.parent is not None:
                    block.parent.num_children -= 1
                return True

    def _rank(self, now_s: float) -> bool:
        """List the leaves that are worth least, the oldest of equals; False if all are in use."""
        worth = self._learned.worth
        leaves = [
            (worth(block.row, now_s - block.released_s), block.released_s, number, block)
            for number, block in enumerate(self._blocks.values())
            if not block.num_children and block.released_s < _IN_USE
        ]
        leaves.sort()
        num_ranked = max(1, self._num_blocks // _RANKED_SHARE)
        self._victims = [
            (released_s, block) for _, released_s, _, block in leaves[:num_ranked][::-1]
        ]
        return bool(self._victims)


SimulatedCache = LruSimulation | LearnedPolicySimulation
"""A cache that replays sampled requests; ``serve`` returns how many requested blocks it found."""

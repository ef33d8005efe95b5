"""Small caches without KV, which replay sampled requests.

Each counts how many of a request's sampled blocks it would have found:

* ``LruSimulation``: LRU, in a dict;
* ``PolicySimulation``: any policy, through the contract by which the real cache drives it;
* ``LearnedPolicySimulation``: the real cache's own policy at another size. It learns nothing from
  its few blocks: the time until blocks of a class are used again depends on the traffic and not on
  the memory, so it uses what the real policy has learned.

Source: Waldspurger, Saemundsson, Ahmad, Park, Cache modeling and optimization using miniature
simulations, ATC 2017.
"""

from array import array
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import EvictionPolicy, RequestSummary
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.eviction import make_policy
from ostinato.eviction.learned_policy import LearnedPolicy, note_gap
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.ghost.sampler import SampledRequest
from ostinato.settings import PolicyName

_REQUESTS_PER_FIT = 200
"""A fit takes as long as a hundred requests, and a sample has too few for frequent ones."""

_RANKED_SHARE = 16
"""One ranking names a sixteenth of the blocks as the next victims."""


class SimulatedCache(Protocol):
    """A cache that replays sampled requests."""

    def serve(self, request: SampledRequest) -> int:
        """Look a request's blocks up, insert what is missing, and release them.

        Returns:
            How many of those that were looked up were found.
        """


class LruSimulation:
    """A cache under LRU."""

    def __init__(self, num_blocks: int) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._blocks: dict[int, None] = {}  # in order of use

    def serve(self, request: SampledRequest) -> int:
        """Look a request's blocks up, and use them all."""
        blocks, names = self._blocks, request.names
        found = 0
        for name in names[: request.num_asked]:
            if name not in blocks:
                break
            found += 1
        for name in reversed(names):  # tails are evicted first, so they count as used first
            blocks.pop(name, None)
            blocks[name] = None
        while len(blocks) > self._num_blocks:
            del blocks[next(iter(blocks))]
        return found


class _Shared(Identity):
    """One identity for all blocks, since names include theirs; policies hash it often."""

    def __hash__(self) -> int:
        return 0


_SHARED = _Shared()


class _Block(CacheEntry):
    """One sampled block of a policy simulation."""

    __slots__ = ("index", "name", "num_children", "parent")

    def __init__(self, name: int, index: int, parent: "_Block | None") -> None:
        super().__init__(_SHARED)
        self.name, self.index, self.parent = name, index, parent
        self.num_blocks, self.num_children = 1, 0

    @property
    def is_leaf(self) -> bool:
        return not self.num_children

    def run_from(self, first: int) -> tuple[int, bytes]:
        return self.index, self.name.to_bytes(TOKEN_BYTES, "little")


class PolicySimulation:
    """A cache of sampled blocks under a real policy."""

    def __init__(self, num_blocks: int, policy: PolicyName) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._now_s, self._tick = 0.0, 0
        self._policy: EvictionPolicy = (
            ReuseHazard(num_blocks, lambda: self._now_s, _REQUESTS_PER_FIT)
            if policy == "reuse_hazard"
            else make_policy(policy, num_blocks, lambda: self._now_s)
        )
        self._blocks: dict[int, _Block] = {}

    def serve(self, request: SampledRequest) -> int:
        """Look a request's blocks up, insert what is missing, and release them."""
        policy, self._now_s = self._policy, request.at_s
        path, summary = (
            self._hold(request.names),
            RequestSummary(num_output_tokens=request.num_output_tokens),
        )
        num_found = len(path)
        # Names stand for tokens in what the policy remembers of evicted blocks.
        key = PrefixKey(_SHARED, request.names)
        if isinstance(policy, LearnedPolicy):
            policy.look_up(key, num_found, request.num_asked, 1, summary)
        if path:
            note_gap(summary, request.at_s - path[-1].idle_since_s, path[-1].uses)
        self._insert(request, key, path, summary)
        path.reverse()
        for block in path:
            self._tick += 1
            block.idle_tick, block.idle_since_s, block.ref_count = self._tick, request.at_s, 0
        if path:
            policy.add(path, summary)
        return min(num_found, request.num_asked)

    def check(self) -> None:
        """Assert that policy and blocks agree."""
        self._policy.check()
        held = {block.name for block in self._policy if isinstance(block, _Block)}
        assert held == {*self._blocks}, "the policy has other blocks"
        assert len(self._blocks) <= self._num_blocks, "more blocks than there is room for"

    def _hold(self, names: "array[int]") -> list[_Block]:
        """Acquire what is cached, up to the first gap."""
        path = list[_Block]()
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            path.append(block)
        if path:
            self._policy.remove(path)
        for block in path:
            block.uses += 1
            block.ref_count = 1
        return path

    def _insert(
        self,
        request: SampledRequest,
        key: PrefixKey,
        path: list[_Block],
        summary: RequestSummary,
    ) -> None:
        """Insert what is missing after a path, while there is room."""
        names, uses, known = request.names, 0, 0
        for index in range(len(path), len(names)):
            if not known:
                uses, known = self._policy.recall(key, index, len(names) - index, 1, summary)
            known -= 1
            if len(self._blocks) >= self._num_blocks and not self._evict(len(names) - index):
                return
            parent = path[-1] if path else None
            block = _Block(names[index], index, parent)
            block.uses, block.ref_count = uses + 1, 1
            if parent is not None:
                parent.num_children += 1
            self._blocks[block.name] = block
            path.append(block)

    def _evict(self, num_wanted: int) -> bool:
        """Evict one block; False if all are held."""
        victim = self._policy.victim(num_wanted)
        if victim is None:
            return False
        block, _ = victim
        assert isinstance(block, _Block)
        self._policy.evict(block, 1)
        del self._blocks[block.name]
        parent = block.parent
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_children and not parent.ref_count:
                self._policy.became_leaf(parent)
        return True


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

    def __init__(self, num_blocks: int, learned: LearnedPolicy) -> None:
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
        num_found = len(path)
        self._insert(request, path)
        row_of, at_s = self._learned.row_of, request.at_s
        for block, uses in zip(path, request.uses, strict=False):
            block.row, block.released_s = row_of(request.request_class, uses), at_s
        return min(num_found, request.num_asked)

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
        most = max(1, self._num_blocks // _RANKED_SHARE)
        self._victims = [(released_s, block) for _, released_s, _, block in leaves[:most][::-1]]
        return bool(self._victims)

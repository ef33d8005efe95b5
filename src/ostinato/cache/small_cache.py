"""What would a cache of another size or policy have found of the same blocks?

Nothing lies behind these caches: a block is a name and a place in its prompt. Two ways to find
out, and both are told of one turn after another:

* ``SmallCache`` plays any policy, by the one contract that the large cache drives it by;
* ``LruStack`` knows what LRU finds at *every* size at once, for LRU of any size holds the blocks
  that were in use last: how many those are since a block's last use is the size that still has
  it. It does in half a microsecond what takes a small cache several, size by size.

Source: the stack: Mattson, Gecsei, Slutz, Traiger, Evaluation techniques for storage
hierarchies, 1970.
"""

from array import array
from bisect import bisect_left
from typing import NamedTuple

from ostinato.cache.block import CacheEntry
from ostinato.cache.policies import make_policy
from ostinato.cache.policies.contract import Turn
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.cache.pool import MANY_USES
from ostinato.core.config import PolicyName
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES


class _Nobody(Identity):
    """Names tell whose blocks they are, so one identity does for all; policies hash it often."""

    def __hash__(self) -> int:
        return 0


_NOBODY = _Nobody()

_TURNS_PER_FIT = 200
"""A fit takes as long as a hundred turns, and tells little more of as few as a sample has."""


class SampledTurn(NamedTuple):
    """What is known of a request when it has ended.

    Attributes:
        names: Of its sampled blocks, in order.
        places: Blocks between the root and each of them, shape (num_names,).
        num_asked: How many of them were looked up: those of its prompt.
        at_s: When it ended.
        num_output_tokens: Tokens that were generated for it.
        kinds: Class of what it let go of, by a policy that learns, uses left out.
    """

    names: "array[int]"
    places: "array[int]"
    num_asked: int
    at_s: float
    num_output_tokens: int
    kinds: int = 0

    @property
    def key(self) -> PrefixKey:
        """Names in the place of tokens, for policies that remember what they evicted."""
        return PrefixKey(_NOBODY, self.names)


class LruStack:
    """What LRU would have found, at sizes up to a largest."""

    def __init__(self, most_blocks: int) -> None:
        """Start empty; sizes beyond ``most_blocks`` are not told apart."""
        self._most_blocks = most_blocks
        self._uses: dict[int, int] = {}  # by name, in order of use
        self._ticks: list[int] = []  # the same numbers, in order
        self._tick = 0

    def fills(self, num_blocks: int) -> bool:
        """Whether a size has evicted, or is about to."""
        return len(self._ticks) >= num_blocks

    def serve(self, names: "array[int]", num_asked: int) -> list[int]:
        """Use a turn's blocks.

        Args:
            names: Of its blocks, in order.
            num_asked: How many of them were looked up.

        Returns:
            For each block that was looked up, from the first on, the least size that still has
            it; it never falls, and ends where no size does.
        """
        ticks, uses = self._ticks, self._uses
        sizes: list[int] = []
        for name in names[:num_asked]:
            used = uses.get(name)
            if used is None:
                break
            sizes.append(len(ticks) - bisect_left(ticks, used))
        for name in reversed(names):  # tails go first, so they count as used first
            used = uses.pop(name, None)
            if used is not None:
                del ticks[bisect_left(ticks, used)]
            self._tick += 1
            uses[name] = self._tick
            ticks.append(self._tick)
        while len(ticks) > self._most_blocks:
            del uses[next(iter(uses))]
            del ticks[0]
        return sizes


class _Block(CacheEntry):
    """One sampled block that a small cache has."""

    __slots__ = ("index", "name", "num_children", "parent", "place")

    def __init__(self, name: int, index: int, place: int, parent: "_Block | None") -> None:
        super().__init__(_NOBODY)
        self.name = name
        self.index = index
        self.place = place
        self.parent = parent
        self.num_children = 0

    @property
    def num_blocks(self) -> int:
        return 1

    @property
    def is_leaf(self) -> bool:
        return not self.num_children

    @property
    def depth(self) -> int:
        return self.place + 1

    def run_from(self, first: int) -> tuple[int, bytes]:
        return self.index, self.name.to_bytes(TOKEN_BYTES, "little")


class SmallCache:
    """A policy, the blocks that it decides about, and one turn at a time."""

    def __init__(self, num_blocks: int, policy: PolicyName) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._now_s = 0.0
        self._policy = make_policy(policy, num_blocks, lambda: self._now_s)
        if isinstance(self._policy, ReuseHazard):
            self._policy.turns_per_fit = _TURNS_PER_FIT
        self._blocks: dict[int, _Block] = {}
        self._tick = 0

    def serve(self, turn: SampledTurn) -> int:
        """Look a turn's blocks up, insert what is missing, and let go of them.

        Returns:
            How many of those that were looked up were there.
        """
        self._now_s = turn.at_s
        path, note = self._hold(turn.names), Turn(num_output_tokens=turn.num_output_tokens)
        num_found = len(path)
        key = turn.key if self._policy.remembers else None
        if key is not None:
            self._policy.look_up(key, num_found, turn.num_asked, 1, note)
        if path and path[-1].uses < MANY_USES:
            note.gap_s = turn.at_s - path[-1].idle_since_s
        self._insert(turn, key, path, note)
        for block in reversed(path):
            self._tick += 1
            block.idle_tick, block.idle_since_s, block.ref_count = self._tick, turn.at_s, 0
            self._policy.add_all((block,), note)
        return min(num_found, turn.num_asked)

    def check(self) -> None:
        """Assert that policy and blocks agree."""
        self._policy.check()
        assert {block.name for block in self._policy if isinstance(block, _Block)} == {
            *self._blocks
        }, "the policy has other blocks"
        assert len(self._blocks) <= self._num_blocks, "more blocks than there is room for"

    def _hold(self, names: "array[int]") -> list[_Block]:
        """Take what is there from the policy, as far as it goes on without a gap."""
        path = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            self._policy.remove_all((block,))
            block.uses += 1
            block.ref_count = 1
            path.append(block)
        return path

    def _insert(
        self, turn: SampledTurn, key: PrefixKey | None, path: list[_Block], note: Turn
    ) -> None:
        """Put what is missing behind a path, for as long as there is room."""
        names, uses, known = turn.names, 0, 0
        for index in range(len(path), len(names)):
            if key is not None and not known:
                recalled = self._policy.recall(key, index, len(names) - index, 1, note)
                known, uses = recalled.num_blocks, recalled.uses
                if recalled.idle_since_s is None:
                    note.num_new_blocks += known
                elif uses < MANY_USES:
                    note.gap_s = turn.at_s - recalled.idle_since_s
            known -= 1
            missing = len(names) - index
            if len(self._blocks) >= self._num_blocks and not self._evict(missing):
                return
            parent = path[-1] if path else None
            block = _Block(names[index], index, turn.places[index], parent)
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
        assert isinstance(victim, _Block)
        self._policy.evict(victim, 1)
        del self._blocks[victim.name]
        parent = victim.parent
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_children and not parent.ref_count:
                self._policy.expose(parent)
        return True

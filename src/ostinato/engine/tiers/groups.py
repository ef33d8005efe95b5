"""What each group of layers keeps in tiers, and what of it a hit needs.

Each group has records of its own, under a namespace of its own::

    full attention   0 1 2 3 4 5 6 7 8 9      every block
    window                 3 4       8 9      the window before each stored end
    states                   4         9      a state for each checkpoint, by its unit of tokens

A hit ends where every group can continue: the longest run of full attention, shortened by each
window and by the states until all agree. Blocks of windows and states follow gaps, so that their
namespaces are sparse.
"""

from collections.abc import Container
from dataclasses import dataclass
from math import inf

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import PrefixKey
from ostinato.hybrid.manager import HybridCacheManager
from ostinato.hybrid.pool_sizes import TOKENS_PER_CHECKPOINT
from ostinato.runner.kv.block_copies import BlockCopies, block_copies
from ostinato.runner.model_runner import ModelRunner
from ostinato.settings import StateConfig

FULL, STATE = "full", "state"


@dataclass(frozen=True, slots=True)
class TierGroup:
    """One group of layers."""

    name: str  # of its namespace: ``full``, ``window-512``, ``state``
    number: int  # of its pool
    unit: int  # tokens of one of its blocks on a tier
    layout: str  # name of the order of a block's bytes
    copies: BlockCopies  # between its pool and host memory
    window: int = 0  # tokens that a query sees; 0 if it has no window

    @property
    def is_full(self) -> bool:
        """Whether it keeps all of a prefix."""
        return self.name == FULL

    def first_needed(self, num_tokens: int) -> int:
        """Return the first of its blocks that a hit of ``num_tokens`` tokens needs."""
        if self.is_full:
            return 0
        if self.window:
            return max(0, num_tokens - self.window + 1) // self.unit
        return max(0, num_tokens // self.unit - 1)

    def needed(self, num_tokens: int, num_known: int) -> range:
        """Return its blocks that a hit needs beside those of a hit of ``num_known`` tokens."""
        first = max(self.first_needed(num_tokens), num_known // self.unit)
        return range(first, num_tokens // self.unit)

    def longest_hit(self, num_tokens: int, num_known: int, stored: Container[int]) -> int:
        """Return the longest hit, of up to ``num_tokens`` tokens, that its stored blocks continue.

        Args:
            num_tokens: Bound on the answer.
            num_known: What hits without a tier.
            stored: Its blocks on tiers.
        """
        num_tokens -= 0 if self.window else num_tokens % self.unit
        while num_tokens > num_known:
            blocks = reversed(self.needed(num_tokens, num_known))
            missing = next((block for block in blocks if block not in stored), None)
            if missing is None:
                return num_tokens
            num_tokens = missing * self.unit  # a longer one that ends before needs this one too
        return num_known

    def block_of(self, table: BlockTable, place: int) -> int:
        """Return the pool's block, or slot, that takes one of its blocks of a loaded sequence."""
        if self.name != STATE:
            return table.groups[self.number][place]
        assert table.state_slot is not None, "it is loaded"
        return table.state_slot


@dataclass(frozen=True, slots=True)
class TierGroups:
    """The groups of a model, as its tiers and its pools have them.

    Attributes:
        groups: Those with bytes; full attention, if any layer has it, is the first.
        block_size: Tokens of a block of the pool.
    """

    groups: tuple[TierGroup, ...]
    block_size: int

    @property
    def sparse(self) -> tuple[TierGroup, ...]:
        """Windows and states."""
        return tuple(group for group in self.groups if not group.is_full)

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest block of any group; a state is one."""
        return max(group.copies.block_bytes for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a block of a sequence takes on a tier at most, with its share of states."""
        total = 0
        for group in self.groups:
            each = group.copies.block_bytes
            is_state = group.name == STATE
            total += each * self.block_size // TOKENS_PER_CHECKPOINT if is_state else each
        return max(1, total)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each token of a prefix takes in full attention and states."""
        return sum(x.copies.block_bytes / x.unit for x in self.groups if not x.window)

    def window_bytes(self, num_tokens: float) -> float:
        """Bytes of the windows before two ends: of a prompt and of its answer."""
        return sum(
            min(num_tokens, 2 * x.window) * x.copies.block_bytes / x.unit
            for x in self.groups
            if x.window
        )

    def longest_prefix(self, num_bytes: int, num_stored: int = 0) -> float:
        """Return how many tokens of one prefix fit a number of bytes, in whole blocks.

        Args:
            num_bytes: That are free.
            num_stored: Its first tokens that take none, since another prefix has them.

        Returns:
            Infinity if all layers have windows that fit.
        """
        short = num_bytes // self.bytes_per_block * self.block_size
        left, per_token = num_bytes - self.window_bytes(inf), self.bytes_per_token
        if left <= 0:
            return short
        if not per_token:
            return inf
        whole = int(left / per_token) // self.block_size * self.block_size
        return max(short, num_stored + whole)

    def kept(
        self, group: TierGroup, manager: CacheManager, key: PrefixKey, match: PrefixMatch
    ) -> list[tuple[int, int]]:
        """List place and block of what the pool has of a matched prefix, for hits of it."""
        if group.is_full:
            return list(enumerate(match.blocks))
        assert isinstance(manager, HybridCacheManager)
        return manager.layer_groups[group.number - 1].kept(key, len(match.blocks))


def tier_groups(runner: ModelRunner) -> TierGroups:
    """Return the groups of a model that have bytes."""
    groups = list[TierGroup]()
    for number, store in enumerate(runner.kv_stores):
        window = runner.groups.windows[number - 1] if number else 0
        name = f"window-{window}" if window else FULL
        if store.block_bytes:
            copies = block_copies(store)
            groups.append(TierGroup(name, number, store.block_size, store.layout, copies, window))
    if runner.loaded.state_spec.layers:
        unit, number = StateConfig(num_slots=2).unit, len(runner.kv_stores)
        groups.append(TierGroup(STATE, number, unit, "slots-1", runner.states))
    return TierGroups(tuple(groups), runner.kv_stores[0].block_size)

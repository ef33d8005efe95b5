"""The port of layer groups: layers that keep something else of a sequence than full attention.

A sliding window keeps the last tokens, a recurrent layer one state. Each such group has a pool of
its own, and knows its content; the index of full attention, group 0, says which prefixes exist::

    group 0    b0  b1  b2  b3     full attention, in the manager's pool
    windows    .   .   b7  b2     a row of blocks each
    states     s4                 a slot, in no row

The manager calls every group, in this order: ``longest_hit``, ``room``, ``hold``, ``take``,
``publish``, ``settle`` or ``retract``, ``release``. What a sequence holds in a group is a record of
that group, in ``BlockTable.held``; its ``blocks`` are the group's row, or the slots of its states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Contents, PrefixMatch, Removal
from ostinato.core.identity import PrefixKey
from ostinato.core.plan import StateCopy
from ostinato.hybrid.prefill_cuts import StateCuts


@dataclass(slots=True)
class HybridMatch(PrefixMatch):
    """A prefix that every group of layers can continue.

    Attributes:
        group_tails: The entry to copy the tail from, for each group beside full attention.
        num_seen_tokens: With states, tokens in whole blocks that full attention has cached; a hit
            may end before, for lack of a state.
        load_end: Tokens up to which a tier will bring all that a hit there needs, and nothing is
            computed; 0 if the rest is computed.
    """

    group_tails: Sequence[Any] = ()
    num_seen_tokens: int = 0
    load_end: int = 0


def to_load(match: PrefixMatch, num_tokens: int) -> PrefixMatch:
    """Return a match whose sequence is loaded, not computed, up to ``num_tokens`` tokens."""
    if isinstance(match, HybridMatch):
        match = replace(match, group_tails=(), load_end=num_tokens)
    return match.without_tail()


@dataclass(slots=True)
class StateCopies:
    """The copies of states in the running step."""

    loads: list[StateCopy] = field(default_factory=list)  # before it
    saves: list[StateCopy] = field(default_factory=list)  # after it


class LayerGroup(Contents, Protocol):
    """A group of layers with a pool of its own; its version is raised when content is removed.

    Attributes:
        pool: Its blocks, or the slots of its states.
        has_rows: Whether the plan names its blocks, a row per sequence; of all groups, those
            that have rows come first.
        cuts: Where prefills are cut for it; None if anywhere.
    """

    pool: BlockPool
    has_rows: bool
    cuts: StateCuts | None

    def longest_hit(self, key: PrefixKey, num_blocks: int) -> int:
        """Return the longest prefix, up to ``num_blocks``, that it can continue; no effects."""

    def find_tail(self, key: PrefixKey, num_blocks: int, name: bytes) -> CacheEntry | None:
        """Return the cached block of that name after a sequence's first ones, to copy from.

        By default there is none: nothing is kept within a block.
        """
        return None

    def kept(self, key: PrefixKey, num_blocks: int) -> list[tuple[int, int]]:
        """List what is cached for hits of a prefix that hits with ``num_blocks`` blocks.

        Returns:
            Place and block or slot of each, in order. A place counts blocks in the sequence; that
            of a state counts units, and is the one that ends with it.
        """

    def room(
        self, key: PrefixKey, num_blocks: int, tail: CacheEntry | None, load_end: int = 0
    ) -> int:
        """Return how many tokens could have slots if a hit of ``num_blocks`` blocks were held."""

    def room_to_grow(self, held: Any, num_tokens: int) -> int:
        """Return how many of a sequence's first ``num_tokens`` could have slots: here all."""
        return num_tokens

    def num_to_fork(self, held: Any, num_blocks: int) -> int:
        """Return how many blocks a fork of a sequence would allocate."""

    def hold(self, key: PrefixKey, match: HybridMatch, tail: CacheEntry | None) -> Any:
        """Hold what a match needs, and the source of a copy until ``release_tail``."""

    def fork(self, held: Any) -> Any:
        """Hold for a fork what it shares with its parent."""

    def take(self, table: BlockTable, held: Any, num_tokens: int) -> None:
        """Give a table what its first ``num_tokens`` need; the caller knows that there is room."""

    def publish(self, table: BlockTable, held: Any, num_tokens: int) -> Sequence[tuple[int, bool]]:
        """Publish what this step computes, or note it for ``settle``.

        Returns:
            The places in the row that were published, each with whether its content is new.
        """

    def publish_partial(self, table: BlockTable, held: Any, num_blocks: int, text: bytes) -> None:
        """Make a partial last block findable, if the group keeps any."""
        return None

    def settle(self, table: BlockTable, held: Any) -> None:
        """Note that the step has run; release what the next one does not need."""

    def retract(self, held: Any) -> Removal | None:
        """Take back what this step published; None if the group publishes after the step."""

    def release_tail(self, held: Any) -> None:
        """Release the source of a copy, if there is one."""

    def release(self, table: BlockTable, held: Any) -> None:
        """Release all that a sequence holds."""

    def blocks_removed(self) -> None:
        """Evict what cannot hit any more, now that blocks of full attention were removed."""
        return None

    def check(self, every: list[Any]) -> None:
        """Assert the group's invariants, given all that is held in it."""

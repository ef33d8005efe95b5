"""The current content of the cache, and the prefixes that save most.

Two reports, taken between two steps and equal for both indexes: a map of all blocks with their
states and owners, and the prefixes that save most.

A *cached prefix* ends where prefixes branch or where a request's hit ended::

    You are a helpful assistant.      3 hits end here, 5 below it: 8 requests found it
    ├── Ann asks: …                   5
    └── Bob asks: …                   0

What it saves is counted once: the tokens after its parent's end, times the requests that found
them. So the sum over all prefixes is what all hits in whole blocks saved, except for what was
evicted since.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import nlargest
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.manager import CacheManager
from ostinato.cache.prefix_index import CachedRun, PrefixIndex
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.observe.counters import HitCounts

HEAD_TOKENS = 64
"""Tokens that are shown of a prefix, enough to recognise it."""


class BlockState(IntEnum):
    """The state of a block; see ``cache.block``."""

    UNUSED = 0
    PRIVATE = 1
    HELD = 2
    EVICTABLE = 3


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Every block's state and owner.

    Attributes:
        states: A ``BlockState`` per block, shape (num_blocks,).
        owners: Index of the owner in ``tenants``, -1 for unused blocks, shape (num_blocks,).
        tenants: Salts of all who own a block, in the order of their first block in the walk.
    """

    states: bytearray
    owners: "array[int]"
    tenants: list[bytes]

    def count(self, state: BlockState) -> int:
        """Number of blocks in a state."""
        return self.states.count(state)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A cached prefix, and what it saves.

    Attributes:
        identity: Its identity.
        head: Its first tokens, at most ``HEAD_TOKENS``.
        branch: The first tokens after its parent's end, at most ``HEAD_TOKENS``.
        num_tokens: Tokens from position 0 to its end.
        own_tokens: Those of them after its parent's end.
        own_blocks: Blocks that hold these.
        num_blocks_below: Blocks of its descendants.
        num_hits: Requests that found it, whether or not they found more.
        num_holders: Live requests and leases that hold its end.
        age_s: Seconds since it was published.
    """

    identity: Identity
    head: "array[int]"
    branch: "array[int]"
    num_tokens: int
    own_tokens: int
    own_blocks: int
    num_blocks_below: int
    num_hits: int
    num_holders: int
    age_s: float

    @property
    def saved_tokens(self) -> int:
        """Tokens that it saved, without those of its parents."""
        return self.num_hits * self.own_tokens


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One published block.

    Attributes:
        block: Its id.
        tokens: Its packed tokens; shorter than a block for a partial one.
        ref_count: Live requests that hold it.
        parent: Digest-free name of its prefix: the packed blocks before it, extras included.
        extra: What the images that touch it add to its tokens; empty without any.
    """

    block: BlockId
    tokens: bytes
    ref_count: int
    parent: bytes
    extra: bytes = b""


def cached_blocks(index: PrefixIndex[Any]) -> Iterator[CachedBlock]:
    """Walk every published block of an index, those that others continue first."""
    ends = list[bytes]()
    for run in index.runs():
        first = run.entries[0]
        start = first.identity.root.encoded if run.parent is None else ends[run.parent]
        for entry in run.entries:
            before = start
            for place, block in enumerate(entry.blocks):
                own = entry.block_key(place, index.block_size)
                yield CachedBlock(BlockId(block), own.tokens, entry.ref_count, before, own.extra)
                before += own.name
        ends.append(before)


def count_states(manager: CacheManager) -> dict[BlockState, int]:
    """Count the full-attention group's blocks by state, in O(live sequences)."""
    pool = manager.pool
    private = sum(len(table.private_blocks) for table in manager.tables.live.values())
    idle, unused = pool.num_evictable, pool.num_unused
    return {
        BlockState.UNUSED: unused,
        BlockState.PRIVATE: private,
        BlockState.HELD: pool.num_blocks - unused - idle - private,
        BlockState.EVICTABLE: idle,
    }


def map_blocks(manager: CacheManager) -> BlockMap:
    """Return the state and owner of every block of the full-attention group.

    Cost: O(blocks), and O(runs) steps in Python.
    """
    num_blocks = manager.pool.num_blocks
    block_map = BlockMap(bytearray(num_blocks), array("i", [-1]) * num_blocks, [])
    places: dict[bytes, int] = {}

    def note(blocks: Sequence[int], state: BlockState, tenant: bytes) -> None:
        if not blocks:
            return
        owner = places.setdefault(tenant, len(places))
        for block in blocks:
            block_map.states[block], block_map.owners[block] = state, owner

    for run in manager.index.runs():
        for entry in run.entries:
            state = BlockState.HELD if entry.ref_count else BlockState.EVICTABLE
            note(entry.blocks, state, entry.identity.owner)
    for table in manager.tables.live.values():
        note(table.private_blocks, BlockState.PRIVATE, table.tenant)
    block_map.tenants.extend(places)
    return block_map


def top_prefixes(
    manager: CacheManager,
    hits: HitCounts,
    most: int,
    belongs: Callable[[Identity], bool] = lambda identity: True,
) -> list[CachedPrefix]:
    """List the prefixes that saved most, then those with most blocks below.

    Args:
        manager: Manager of the cache.
        hits: Its observer.
        most: How many at most.
        belongs: Which identities to list; all by default. A public prefix that they continue is
            not listed with them, but they begin with it.

    Cost: O(runs) steps in Python and O(cached tokens) copied bytes.
    """
    every = _branches(manager, hits.by_block)
    branches = [branch for branch in every if belongs(branch.identity)]
    now_s = manager.pool.now()
    return [branch.prefix(now_s) for branch in nlargest(most, branches, key=_Branch.rank)]


class _Branch:
    """Runs without a branch, a hit's end or another holder between them.

    Attributes:
        parent: The branch that it continues.
        parts: Packed tokens of its runs.
        holders: Holds on its end.
        num_blocks: Its own blocks.
        num_hits: Hits that ended with it or below it.
        num_blocks_below: Blocks below it.
    """

    __slots__ = (
        "born_s", "holders", "identity", "num_blocks", "num_blocks_below", "num_hits", "parent",
        "parts",
    )  # fmt: skip

    def __init__(self, parent: "_Branch | None", first: CacheEntry, holders: int) -> None:
        self.parent, self.holders = parent, holders
        self.identity, self.born_s = first.identity, first.born_s
        self.parts: list[bytes] = []
        self.num_blocks = self.num_hits = self.num_blocks_below = 0

    @property
    def own_tokens(self) -> int:
        return sum(map(len, self.parts)) // TOKEN_BYTES

    def line(self) -> "list[_Branch]":
        """List the branches from the root to this one."""
        line, branch = [self], self.parent
        while branch is not None:
            line.append(branch)
            branch = branch.parent
        return line[::-1]

    def rank(self) -> tuple[int, int, int, bytes]:
        """Saved tokens, then blocks with those below; its tokens break ties."""
        saved = self.num_hits * self.own_tokens
        return saved, self.num_blocks + self.num_blocks_below, self.own_tokens, self.parts[0]

    def prefix(self, now_s: float) -> CachedPrefix:
        """Describe it."""
        line = self.line()
        return CachedPrefix(
            self.identity,
            _first_tokens(part for branch in line for part in branch.parts),
            _first_tokens(self.parts),
            num_tokens=sum(branch.own_tokens for branch in line),
            own_tokens=self.own_tokens,
            own_blocks=self.num_blocks,
            num_blocks_below=self.num_blocks_below,
            num_hits=self.num_hits,
            num_holders=self.holders,
            age_s=now_s - self.born_s,
        )


def _branches(manager: CacheManager, hits: Counter[int]) -> list[_Branch]:
    """Cut runs where hits ended, join those that do not differ, and sum up what is below each."""
    runs, size = list(manager.index.runs()), manager.block_size * TOKEN_BYTES
    num_children = Counter(run.parent for run in runs)
    ends: list[tuple[_Branch, bool]] = []  # each run's last branch, and whether it may go on
    branches: list[_Branch] = []
    for number, run in enumerate(runs):
        branch, goes_on = (None, False) if run.parent is None else ends[run.parent]
        first, holders = run.entries[0], sum(entry.ref_count for entry in run.entries)
        for text, blocks in _pieces(run, hits, size):
            is_same = branch is not None and branch.holders == holders
            if branch is None or not (goes_on and is_same and branch.identity == first.identity):
                branch = _Branch(branch, first, holders)
                branches.append(branch)
            num_hits = sum(hits.get(block, 0) for block in blocks)
            branch.parts.append(text)
            branch.num_blocks += len(blocks)
            branch.num_hits += num_hits
            goes_on = not num_hits
        assert branch is not None, "a run has blocks"
        ends.append((branch, goes_on and num_children[number] == 1))
    for branch in reversed(branches):  # parents come before children
        if branch.parent is not None:
            branch.parent.num_hits += branch.num_hits
            branch.parent.num_blocks_below += branch.num_blocks + branch.num_blocks_below
    return branches


def _pieces(run: CachedRun, hits: Counter[int], size: int) -> Iterator[tuple[bytes, list[int]]]:
    """Cut a run after each block at which hits ended: packed tokens and blocks of each part."""
    blocks = [block for entry in run.entries for block in entry.blocks]
    tokens, start = run.entries[0].run_from(0)[1], 0
    if len(run.entries) > 1 or len(blocks) == 1:  # more blocks are copies of it
        yield tokens[:size], blocks
        return
    for end, block in enumerate(blocks, 1):
        if block in hits or end == len(blocks):
            yield tokens[start * size : end * size], blocks[start:end]
            start = end


def _first_tokens(parts: Iterable[bytes]) -> "array[int]":
    """Unpack the first ``HEAD_TOKENS`` tokens of packed parts."""
    head = bytearray()
    for part in parts:
        head += part[: HEAD_TOKENS * TOKEN_BYTES - len(head)]
        if len(head) == HEAD_TOKENS * TOKEN_BYTES:
            break
    return array("I", bytes(head))

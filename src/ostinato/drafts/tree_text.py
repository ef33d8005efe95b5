"""The text of all cached blocks as a source of drafts, by tenant.

It follows the cache as an observer: blocks that are published are indexed, and those that are
evicted are forgotten. A place of the pool is where the keys and values of its token are::

    tokens      one per slot                        4 bytes a token
    tables      the newest slot by digest, twice    10 bytes a token
    next        the block that followed it last     with owner and the block before:
    previous    the block that it continues         16 bytes a block
    owner       a keyed digest of its salt

A digest is salted by the owner, so what one tenant publishes neither finds nor displaces what
another one has, other than by chance, which no sender can bring about: the secret is the process's.
"""

import secrets
from array import array
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver, Eviction
from ostinato.cache.prefix_index import PublishResult, Removal
from ostinato.core.identity import Identity
from ostinato.drafts.ngrams import LONG, SHORT, NgramTable, digests, salted

NO_BLOCK = 2**32 - 1

MAX_TOKEN_BYTES = 16
"""Bytes of the index per token of a pool at most; 15 with blocks of 16 tokens."""


class TreeText(CacheObserver):
    """Tokens of cached blocks, and positions among them."""

    def __init__(self, num_blocks: int, block_size: int, num_places: int | None = None) -> None:
        """Make an empty index for a pool, with ``num_places`` places in each table."""
        self._block_size = block_size
        num_slots = num_blocks * block_size
        num_places = num_places or _num_places(num_slots)
        self._tables = {n: NgramTable(n, num_places) for n in (LONG, SHORT)}
        self._tokens = array("I", bytes(4 * num_slots))
        self._view = np.frombuffer(self._tokens, dtype=np.uint32).reshape(-1, block_size)
        self._next = array("I", [NO_BLOCK]) * num_blocks
        self._previous = array("I", [NO_BLOCK]) * num_blocks
        self._owners = array("Q", bytes(8 * num_blocks))
        self._secret = secrets.token_bytes(16)

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return index_bytes(len(self._owners), self._block_size)

    def owner(self, tenant: bytes) -> int:
        """Return what stands for a salt; never 0."""
        keyed = blake2b(tenant, digest_size=8, key=self._secret).digest()
        return int.from_bytes(keyed, "little") or 1

    def owners(self, identity: Identity) -> tuple[int, ...]:
        """Return what stands for the salts that a sequence may read, its own first."""
        tenants = dict.fromkeys(stage.tenant for stage in reversed(identity.stages))
        return tuple(map(self.owner, tenants))

    def continuation(
        self, tail: "array[int]", weight: int, owners: tuple[int, ...], num_tokens: int
    ) -> "array[int]":
        """Return how a text of one of these owners went on after some tokens.

        Args:
            tail: The last ``LONG`` or ``SHORT`` tokens.
            weight: What ``weigh`` returns for them.
            owners: Owners of the blocks that may be read.
            num_tokens: Tokens to return at most.
        """
        positions = self._tables[len(tail)]
        for owner in owners:
            slot = positions.get(salted(weight, owner))
            if self._ends_with(slot, tail, owner):
                return self._read_on(slot, num_tokens)
        return array("I")

    def on_publish(
        self, table: BlockTable, first: int, last: int, result: PublishResult, group: int = 0
    ) -> None:
        """Index blocks that became findable; those whose content was there are already."""
        if group:
            return
        fresh = first + len(result.duplicates)
        before = self._block_before(table, fresh, result)
        for start, stop, owner in self._runs_of_owners(table.key.identity, fresh, last):
            for block in table.blocks[start:stop]:
                self._previous[block], self._next[block] = before, NO_BLOCK
                # Behind a public prefix all tenants go on: a link there would tell one of another.
                if before != NO_BLOCK and self._owners[before] == owner:
                    self._next[before] = block
                self._owners[block], before = owner, block
            self._index(table, start, stop, owner)

    def on_retract(self, table: BlockTable, removal: Removal, group: int = 0) -> None:
        """Forget what a failed step had published."""
        self._forget(removal.blocks, group)

    def on_evict(self, eviction: Eviction) -> None:
        """Forget evicted blocks."""
        self._forget(eviction.removal.blocks, eviction.group)

    def on_clear(self, everything: bool) -> None:
        """Forget all."""
        self._owners[:] = array("Q", bytes(8 * len(self._owners)))
        self._view[:] = 0
        for table in self._tables.values():
            table.clear()

    def _block_before(self, table: BlockTable, index: int, result: PublishResult) -> int:
        """Return the cached block before a table's ``index``-th; it may be another's copy."""
        if not index:
            return NO_BLOCK
        if result.duplicates and result.duplicates[-1][0] == index - 1:
            return result.duplicates[-1][1]
        return table.blocks[index - 1]

    def _runs_of_owners(
        self, identity: Identity, first: int, last: int
    ) -> Iterator[tuple[int, int, int]]:
        """Divide blocks into runs of one owner: mostly one, more where a public prefix ends."""
        while first < last:
            stage, end = identity.of_block(first, self._block_size)
            end = min(max(end, first + 1), last)
            yield first, end, self.owner(stage.tenant)
            first = end

    def _index(self, table: BlockTable, first: int, last: int, owner: int) -> None:
        """Copy the tokens of new blocks, and note the slot after which each run of them ends."""
        size = self._block_size
        start, end = first * size, last * size
        lead = min(start, LONG - 1)
        tokens = np.frombuffer(table.key.tokens[start - lead : end], dtype=np.uint32)
        blocks = np.frombuffer(table.blocks[first:last], dtype=np.int32)
        self._view[blocks] = tokens[lead:].reshape(-1, size)
        slots = (blocks[:, None].astype(np.int64) * size + np.arange(size)).reshape(-1)
        for length, positions in self._tables.items():
            skipped = max(0, lead - (length - 1))
            runs = tokens[skipped:]
            if len(runs) >= length:
                ends = slots[len(slots) - (len(runs) - length + 1) :]
                positions.put_all(digests(runs, length, owner), ends)

    def _forget(self, blocks: "array[int]", group: int) -> None:
        """Remove the tokens of blocks; slots that are noted lead to none of theirs any more."""
        if group:
            return
        for block in blocks:
            self._owners[block] = 0
            self._view[block] = 0

    def _ends_with(self, slot: int, tail: "array[int]", owner: int) -> bool:
        """Whether the text up to a slot ends with some tokens, and belongs to an owner."""
        block, offset = divmod(slot, self._block_size)
        left = len(tail)
        while self._owners[block] == owner:
            count = min(left, offset + 1)
            start = block * self._block_size + offset + 1 - count
            if self._tokens[start : start + count] != tail[left - count : left]:
                return False
            left -= count
            if not left:
                return True
            block, offset = self._previous[block], self._block_size - 1
            if block == NO_BLOCK:
                return False
        return False

    def _read_on(self, slot: int, num_tokens: int) -> "array[int]":
        """Return the tokens after a slot, in its block and in those that followed it last."""
        block, offset = divmod(slot + 1, self._block_size)
        size, tokens = self._block_size, array("I")
        if not offset:
            block = self._following(block - 1)
        while block != NO_BLOCK and len(tokens) < num_tokens:
            count = min(size - offset, num_tokens - len(tokens))
            tokens += self._tokens[block * size + offset : block * size + offset + count]
            block, offset = self._following(block), 0
        return tokens

    def _following(self, block: int) -> int:
        """Return the block of the same owner that continued another last, if it is cached."""
        following = self._next[block]
        if following == NO_BLOCK or self._previous[following] != block:
            return NO_BLOCK
        return following if self._owners[following] == self._owners[block] else NO_BLOCK


def index_bytes(num_blocks: int, block_size: int) -> int:
    """Return the memory of the index of a pool."""
    num_slots = num_blocks * block_size
    return 4 * num_slots + 2 * 4 * _num_places(num_slots) + 16 * num_blocks


def _num_places(num_slots: int) -> int:
    """Return the places of each table: a quarter more than slots, so that most are kept."""
    return num_slots + num_slots // 4

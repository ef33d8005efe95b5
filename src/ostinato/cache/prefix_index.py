"""The port of prefix indexes, which map prefixes to the blocks that hold their KV.

Two are built in: the radix index walks a tree and compares tokens, the hash index
(``ostinato.indexes``) looks up chained digests. On the same content they give the same answers.

A *path* is an index's own record of what one request holds, from the root on: holding a block
means holding all before it (law 8). Values that are made for every request are not frozen, which
would take three times as long; they are never changed.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId

PathT = TypeVar("PathT")


@dataclass(slots=True)
class TailMatch:
    """A cached block whose first tokens a prompt shares."""

    block: BlockId
    num_tokens: int  # how many, at least 1 and less than a block
    entry: Any  # the index's entry that the block belongs to
    place: int = 0  # which of the entry's blocks it is


@dataclass(slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt; valid until the cache changes."""

    num_shared_tokens: int  # in whole blocks
    num_tokens: int  # that need not be computed: with those to copy out of the tail's block
    blocks: "array[int]"  # whole blocks that hit, in token order, shape (num_blocks,)
    tail: TailMatch | None  # what can be copied out of the next block
    entries: Sequence[Any]  # the index's entries of the whole blocks, root first
    num_unmatched: int  # blocks at the end of the last entry that are no part of the match
    key: PrefixKey  # the sequence that was looked up
    index: Any  # where
    version: int  # of the cache, at the look-up

    @property
    def num_copied_tokens(self) -> int:
        """Tokens to copy out of the tail's block."""
        return 0 if self.tail is None else self.tail.num_tokens

    def without_tail(self) -> Self:
        """Return its whole blocks alone."""
        return replace(self, tail=None, num_tokens=self.num_shared_tokens)

    @property
    def num_idle_blocks(self) -> int:
        """Matched blocks, a tail's too, that no request holds: free until they are acquired."""
        idle: int = sum(entry.num_blocks for entry in self.entries if not entry.ref_count)
        if self.num_unmatched and not self.entries[-1].ref_count:
            idle -= self.num_unmatched
        return idle + (self.tail is not None and not self.tail.entry.ref_count)


@dataclass(slots=True)
class PublishResult:
    """The result of a publication."""

    num_known: int = 0  # blocks whose content was published before; they come before all new ones
    duplicates: tuple[tuple[int, BlockId], ...] = ()
    """Positions of known blocks that stay private, and the blocks that hold their content; none
    in an index that keeps every copy."""


@dataclass(slots=True)
class Removal:
    """Blocks that were taken out of an index."""

    blocks: "array[int]"  # ids, now private to the caller, tail first
    before: BlockId | None = None  # the block that they continued, or a copy; None at position 0


@dataclass(slots=True)
class CachedRun:
    """Published blocks that follow each other, for inspection."""

    parent: int | None  # number, in the walk, of the run that it continues; None at position 0
    entries: Sequence[CacheEntry]  # a node with its blocks, or all copies of one block


class Contents(Protocol):
    """The content of a pool's blocks: a prefix index, or a group of layers."""

    version: int  # raised when older matches become stale

    def evict(self, entry: CacheEntry, max_blocks: int) -> Removal:
        """Remove up to ``max_blocks`` blocks of an evictable leaf, at least one, tail first."""

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published, parents before children; for inspection."""


class PrefixIndex(Contents, Protocol[PathT]):
    """The port of indexes, which map a prefix to the blocks that hold its KV."""

    block_size: int

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens.

        Effects: none; references and times of use change at admission only.
        """

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[PathT, CacheEntry | None]:
        """Hold a match for one more request.

        Returns:
            The path of the whole blocks, and the entry of a tail's source block, to be released
            in the pool when the copy has run and before the path; None without a tail.
        """

    def fork(self, path: PathT) -> PathT:
        """Hold the blocks of a path once more."""

    def publish(
        self,
        path: PathT,
        key: PrefixKey,
        blocks: "array[int]",
        num_tokens: int,
        summary: RequestSummary | None = None,
    ) -> tuple[PathT, PublishResult]:
        """Make private blocks findable that continue a path.

        Args:
            path: Of the sequence.
            key: The sequence.
            blocks: Full blocks; or one that is partial, at the end of the sequence, to be found
                token by token. A partial block is not taken, and counts as known, if a sibling
                begins with the same tokens.
            num_tokens: Tokens of the sequence, from position 0 to the end of the blocks.
            summary: Learns how much of it was new.

        Returns:
            The longer path, and which content was there before.
        """

    def retract(self, path: PathT, num_blocks: int) -> tuple[PathT, Removal]:
        """Take back what a path published last, down to ``num_blocks``; no other request holds it.

        Effects: what nothing would lead to any more is evicted.
        """

    def release(self, path: PathT, summary: RequestSummary | None = None) -> None:
        """Release a path, tail first."""

    def check(self, paths: "list[PathT]", sources: Sequence[CacheEntry] = ()) -> None:
        """Assert the index's invariants; references are recounted from live paths and sources."""

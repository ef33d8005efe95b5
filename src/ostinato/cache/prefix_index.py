"""The port of prefix indexes: which blocks hold the KV of which prefix?

Two are built in: the radix index walks a tree and compares tokens, the hash index
(``ostinato.indexes``) looks up chained digests. On the same content they give the same answers.

A *path* is an index's own record of what one request holds, from the root on: holding a block
means holding all before it (law 8). Values that are made for every request are not frozen, which
would take three times as long; they are never changed.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId

PathT = TypeVar("PathT")


@dataclass(slots=True)
class TailMatch:
    """A cached block that a prompt shares the first tokens of.

    Attributes:
        block: The block whose first slots are shared.
        num_tokens: How many, at least 1 and less than a block.
        entry: The index's entry for it.
        place: Which of the entry's blocks it is.
    """

    block: BlockId
    num_tokens: int
    entry: Any
    place: int = 0


@dataclass(slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt; valid until its index changes.

    Attributes:
        block_size: Tokens per block.
        blocks: Whole blocks that hit, in token order, shape (num_blocks,).
        tail: What can be copied out of the next block; None if nothing.
        entries: The index's entries of the whole blocks, root first.
        num_unmatched: Blocks of the last entry, at its end, that are no part of the match.
        key: The sequence that was looked up; None if nothing was.
        index: Which index was asked.
        version: Of the index, at the look-up.
    """

    block_size: int
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    tail: TailMatch | None = None
    entries: Sequence[Any] = ()
    num_unmatched: int = 0
    key: PrefixKey | None = None
    index: Any = None
    version: int = 0

    @property
    def num_shared_tokens(self) -> int:
        """Tokens in whole blocks."""
        return len(self.blocks) * self.block_size

    @property
    def num_copied_tokens(self) -> int:
        """Tokens to be copied out of the tail's block."""
        return 0 if self.tail is None else self.tail.num_tokens

    @property
    def num_tokens(self) -> int:
        """All tokens that need not be computed."""
        shared, tail = len(self.blocks) * self.block_size, self.tail
        return shared if tail is None else shared + tail.num_tokens

    @property
    def num_idle_blocks(self) -> int:
        """Matched blocks, a tail's too, that no request holds: free until they are acquired."""
        idle: int = sum(entry.num_blocks for entry in self.entries if not entry.ref_count)
        if self.num_unmatched and not self.entries[-1].ref_count:
            idle -= self.num_unmatched
        return idle + (self.tail is not None and not self.tail.entry.ref_count)


@dataclass(slots=True)
class PublishResult:
    """What a publication found.

    Attributes:
        num_known: Blocks whose content was there already; they come before all new ones.
        duplicates: Pairs of position in the block table and the block that already held the
            same content; the publisher's own block stays private. Empty for an index that
            keeps every copy.
    """

    num_known: int = 0
    duplicates: tuple[tuple[int, BlockId], ...] = ()


@dataclass(slots=True)
class Removal:
    """Blocks that were taken out of an index.

    Attributes:
        blocks: Ids, now private to the caller, tail first.
        before: The block that they continued, or another copy of the same content; None if they
            began at position 0.
    """

    blocks: "array[int]"
    before: BlockId | None = None


@dataclass(slots=True)
class CachedRun:
    """Published blocks that follow each other, for inspection.

    Attributes:
        parent: Number, in the walk, of the run that it continues; None at the beginning of a
            prompt.
        entries: A node with its blocks, or all copies of one block.
    """

    parent: int | None
    entries: Sequence[CacheEntry]


class PrefixIndex(Protocol[PathT]):
    """Which blocks hold the KV of which prefix?

    Attributes:
        block_size: Tokens per block.
        version: Raised whenever content is added, split or removed: older matches are stale.
    """

    block_size: int
    version: int

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

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove up to ``most`` blocks of an evictable leaf, at least one, tail first."""

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published, parents before children; for inspection."""

    def check(self, paths: "list[PathT]", sources: Sequence[CacheEntry] = ()) -> None:
        """Assert the index's invariants; references are recounted from live paths and sources."""

"""The port of prefix indexes: which blocks hold the KV of which prefix?

Two are built in: ``radix_index`` walks a tree and compares tokens, the hash index looks up
chained digests. One manager drives either, one suite of tests holds both to this page, and on the
same content they give the same answers.

A *path* is an index's own record of what one request holds, from the root on. Holding a block
means holding all before it (law 8). Values that are made for every request are not frozen, which
would take three times as long; they are never changed.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import Identity, PrefixKey
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
        cursor: Where the index's walk ended; read by that index alone.
        key: The sequence that was looked up; None if nothing was.
        index: Which index was asked.
        version: Of the index, at the look-up.
    """

    block_size: int
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    tail: TailMatch | None = None
    cursor: Any = None
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
        return self.num_shared_tokens + self.num_copied_tokens


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


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One published block, for pictures and checks.

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


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Published blocks that follow each other, for surveys: cheaper than block by block.

    Attributes:
        number: Its number in the walk, from 0 on; a run comes after the one it continues.
        parent: Number of the run that it continues; None at the beginning of a prompt.
        identity: Whose it is, and under which weights.
        tokens: Packed tokens; the last block of a partial one is not full.
        held: Blocks that live requests or leases hold.
        idle: Blocks that no request holds: evictable.
        num_holders: Holds on its last block.
        born_s: When it was published, by the cache's clock.
    """

    number: int
    parent: int | None
    identity: Identity
    tokens: bytes
    held: "array[int]"
    idle: "array[int]"
    num_holders: int
    born_s: float


class PrefixIndex(Protocol[PathT]):
    """Which blocks hold the KV of which prefix?

    Attributes:
        version: Raised whenever content is added, split or removed: older matches are stale.
    """

    version: int

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first ``num_tokens`` tokens.

        Effects: none; references and times of use change at admission only.
        """

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Count the matched whole blocks that no request holds; they are free until acquired."""

    def acquire(
        self, key: PrefixKey, match: PrefixMatch, summary: RequestSummary | None = None
    ) -> tuple[PathT, PathT | None]:
        """Hold a match for one more request, whose summary learns when it was used last.

        Returns:
            The path, which holds the whole blocks, and what holds a tail's source block until the
            copy has run; None without a tail.
        """

    def release_tail(self, tail: PathT) -> None:
        """Release a tail's source block, before the path that it came with."""

    def fork(self, path: PathT) -> PathT:
        """Hold the blocks of a path once more."""

    def publish(
        self,
        path: PathT,
        key: PrefixKey,
        blocks: "array[int]",
        summary: RequestSummary | None = None,
    ) -> tuple[PathT, PublishResult]:
        """Make private full blocks findable that continue a path.

        Returns:
            The longer path, and which content was there before.
        """

    def publish_partial(
        self, path: PathT, key: PrefixKey, block: BlockId, num_tokens: int
    ) -> CacheEntry | None:
        """Make the partial last block of an ended sequence findable token by token.

        Args:
            path: The sequence's path; the block is its continuation.
            key: The sequence.
            block: A private block.
            num_tokens: Leading tokens of the sequence that are computed; the last of them
                are in ``block``.

        Returns:
            The entry, to be released with the path; None, with no effect, if a sibling begins
            with the same tokens.
        """

    def orphans(self, path: PathT, num_blocks: int) -> Sequence[CacheEntry]:
        """List what nothing would lead to if a path were retracted, descendants first.

        Where a block that a step publishes is another copy of known content, the first copy may
        be evicted in the same step; what builds on it is to be evicted before a ``retract``.
        """

    def retract(self, path: PathT, num_blocks: int) -> tuple[PathT, Removal]:
        """Take back what a path published last, down to ``num_blocks``; no other request holds it.

        The orphans have been evicted.

        Returns:
            The shorter path, and what was taken back.
        """

    def release(
        self, path: PathT, summary: RequestSummary | None = None, partial: CacheEntry | None = None
    ) -> None:
        """Release a path and the partial block after it, tail first."""

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove up to ``most`` blocks of an evictable leaf, at least one, tail first."""

    def contents(self) -> Iterator[CachedBlock]:
        """Walk every published block; for pictures and checks."""

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published in runs, parents before children; for surveys."""

    def check(self, paths: "list[PathT]", tails: "Sequence[PathT]" = ()) -> None:
        """Assert the index's invariants; reference counts are recounted from live paths."""

"""The contract every index keeps.

An index knows which blocks hold the KV of which prefix. Two are built in: ``radix_index``
walks a tree and compares tokens, ``hash_index`` looks up chained digests. One manager drives
either, one suite of tests holds both to this page, and on the same content they give the
same answers.

What is made for every request is not frozen, since making a frozen value takes three times as
long; nobody changes one that was handed out.

A *path* is an index's own note of what one request holds, from the root on. Holding a block
means holding all before it (law 8).
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ostinato.cache.block import CacheEntry
from ostinato.cache.policies.contract import Turn
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest, BlockId

PathT = TypeVar("PathT")


@dataclass(slots=True)
class TailMatch:
    """A cached block that a prompt leaves in its middle.

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
    """The longest cached prefix of a prompt.

    Attributes:
        blocks: Whole blocks that hit, in token order, shape (num_blocks,).
        block_size: Tokens per block.
        tail: What can be copied out of the next block; None if nothing.
        window_tails: Per window group, the copy of the tail's block; empty without a tail.
        cursor: Where the index's walk ended; only the index that made it reads it. It is
            valid until the index changes.
    """

    block_size: int
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    tail: TailMatch | None = None
    window_tails: tuple[Any, ...] = ()
    cursor: Any = None

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
class Publication:
    """What became of blocks that were published.

    Attributes:
        num_known: Blocks whose content was there already; they come before all new ones.
        duplicates: Pairs of position in the block table and the block that already held the
            same content; the publisher's own block stays private. Empty for an index that
            keeps every copy.
    """

    num_known: int = 0
    duplicates: tuple[tuple[int, BlockId], ...] = ()


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was forgotten.

    Attributes:
        blocks: Ids, now private to the caller, tail first.
        digests: Of the contents whose last copy is gone, tail first; not of sealed tails, and
            none from an index that keeps no digests.
    """

    blocks: "array[int]"
    digests: tuple[BlockDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One published block, for pictures and checks.

    Attributes:
        block: Its id.
        tokens: Its packed tokens; shorter than a block for a sealed tail.
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

    A run ends where prefixes part, where the hit of a request ended, or where its index likes.

    Attributes:
        number: Its place in the walk, from 0 on; a run comes after the one it continues.
        parent: Number of the run that it continues; None at the beginning of a prompt.
        identity: Whose it is, and under which weights.
        tokens: Packed tokens; the last block of a sealed tail is not full.
        held: Blocks that live requests or leases hold.
        idle: Blocks that nobody holds: evictable.
        num_holders: Holds on its last block.
        num_hits: Requests whose hit ended with it, or behind it in what is forgotten by now.
        born_s: When it was published, by the cache's clock.
    """

    number: int
    parent: int | None
    identity: Identity
    tokens: bytes
    held: "array[int]"
    idle: "array[int]"
    num_holders: int
    num_hits: int
    born_s: float


class PrefixIndex(Protocol[PathT]):
    """Which blocks hold the KV of which prefix?"""

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens.

        Args:
            key: The sequence.
            num_tokens: How many of its tokens may hit.

        Effects: none; references and times of use change at admission only.
        """

    def tail_name(self, tail: TailMatch) -> bytes:
        """Return the packed tokens and extras of a tail's block."""

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Count the matched whole blocks that nobody holds: acquiring takes them off the free.

        Effects: none.
        """

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[PathT, PathT | None]:
        """Hold a match for one more request.

        Returns:
            The request's path, which holds the whole blocks; of length zero if there are none. And
            what holds a tail's source block alone, until the copy has run; None without a tail.
        """

    def release_tail(self, tail: PathT) -> None:
        """Let go of a tail's source block, before the path that it came with."""

    def count_hit(self, path: PathT) -> None:
        """Note that a request's hit ended where this path ends, in O(1)."""

    def fork(self, path: PathT) -> PathT:
        """Hold what a path holds once more."""

    def last_entry(self, path: PathT) -> CacheEntry | None:
        """Return the deepest entry that a path holds; None if it holds none."""

    def publish(
        self, path: PathT, key: PrefixKey, blocks: "array[int]", turn: Turn | None = None
    ) -> tuple[PathT, Publication]:
        """Make blocks findable that continue a path.

        Args:
            path: The publisher's path.
            key: Its sequence, at least as long as path and blocks together.
            blocks: Private full blocks of the tokens behind the path, shape (num_blocks,).
            turn: Learns what of them is new.

        Returns:
            The longer path, and which content was there before.
        """

    def retract(self, path: PathT, num_blocks: int) -> tuple[PathT, Forgotten]:
        """Take back what a path published last; nobody else holds it.

        Args:
            path: The publisher's path.
            num_blocks: Blocks that stay.

        Returns:
            The shorter path, and what was taken back, tail first.
        """

    def seal(
        self,
        path: PathT,
        key: PrefixKey,
        block: BlockId,
        num_tokens: int,
    ) -> CacheEntry | None:
        """Make the partial last block of an ended sequence findable token by token.

        Args:
            path: The sequence's path; the block is its continuation.
            key: The sequence.
            block: A private block.
            num_tokens: Leading tokens of the sequence that are computed; the last of them
                are in ``block``.

        Returns:
            The tail, to be let go of with the path; None, with no effect, if a sibling begins
            with the same tokens already.
        """

    def release(
        self, path: PathT, turn: Turn | None = None, tail: CacheEntry | None = None
    ) -> None:
        """Let go of a path, tail first.

        Args:
            path: Which.
            turn: What is known of its request, for the eviction policy.
            tail: What was sealed behind it.
        """

    def quote(self, path: PathT) -> "list[tuple[bytearray, int]] | None":
        """Return a path's packed tokens, to be kept whatever becomes of its blocks.

        Returns:
            Buffers in token order, each with how many of its bytes are meant: more may be written
            behind them, nothing else is changed. None if only a copy would do.
        """

    def evict(self, entry: CacheEntry, most: int) -> Forgotten:
        """Forget up to ``most`` blocks of an evictable leaf, at least one, tail first."""

    def contents(self) -> Iterator[CachedBlock]:
        """Walk every published block; for pictures and checks."""

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published in runs, parents before children; for surveys."""

    def check(self, paths: "list[PathT]", tails: "Sequence[PathT]" = ()) -> None:
        """Assert the index's invariants.

        Args:
            paths: Every live path; reference counts are recounted from them.
            tails: Every tail that is held.
        """

"""What LRU would have cached, and how far a policy may diverge from it.

Lives that have not ended, newest first, are the blocks in LRU's order, those that were evicted
included. So the blocks that LRU would hold are the newest of them, as many as are evictable here:
a sum, kept up to date with one pointer, and no second cache. It is exact where requests are served
one by one::

    oldest ───────────────► edge ──► newest       batches, one for each turn
    ...... | evicted by LRU | k of n | held by LRU

The *divergence* is what LRU would hold and the policy has evicted: hits that may be lost, each of
them once, for then the block is cached again. The *credit* is the hits that LRU would not have had
less those that it alone would have had, in blocks. Of ``credit + share * blocks looked up -
divergence`` three things are true:

* a hit that is lost takes one from the credit, and one from the divergence: it stays the same;
* it rises when the policy has a hit of its own, when LRU evicts what the policy has evicted, and
  with what is looked up;
* it falls by one when the policy evicts what LRU holds, and by nothing else.

So a policy that evicts what LRU holds only while this is positive is never behind LRU by more
than that share of what was looked up, on any traffic. There is always something else to evict:
both caches have the same size, so for each block that only LRU holds, the policy holds one that LRU
does not. LRU holds no descendant of it, so at least one such block is a leaf. The bound is tight: a
policy that diverges further can lose all of it on the next requests.

The share is 0.2 % at first. The part of the divergence that was lost so far estimates the risk of
diverging further: where it is small, the budget is a multiple. Then 0.2 % is the expected loss, and
the worst case for any traffic is 2 %. A deficit against LRU is subtracted twice from such a budget.
"""

from collections.abc import Callable

from ostinato.eviction.lifetimes import LifetimeStats, ReleaseBatch

SHARE = 0.002
"""What may be lost at most while nothing is proven, as a share of the blocks looked up."""

UTMOST_SHARE = 0.02
"""What may be lost at most, whatever was proven."""

_MAX_TIMES = 6.0
"""How many times credit and share the budget is at most."""

_CAUTION = 3.0
"""By how much the risk that was seen is multiplied."""

DOUBT_BLOCKS = 30.0
"""Lost blocks that are assumed before any were seen."""


class LruShadow:
    """LRU's contents by batch, and the account against it."""

    def __init__(self, lives: LifetimeStats, aged: Callable[[ReleaseBatch], None]) -> None:
        """Start level, as LRU.

        Args:
            lives: Whose batches to read.
            aged: Called with each batch of which LRU holds nothing any more.
        """
        self.credit = 0  # blocks that hit here and would have missed under LRU, less the opposite
        self.num_looked_up = 0  # blocks that were asked for
        self._lives = lives
        self._aged = aged
        self._edge: ReleaseBatch | None = None  # the oldest batch of which LRU would hold something
        self._num_at_edge = 0  # how much of it
        self._num_recent = 0  # what LRU would hold besides
        self._divergence = 0  # what of the latter is not cached
        self.is_trimmed = True  # to as many blocks as are evictable here: once between two requests
        self._num_lost = self._num_diverged = 0

    @property
    def divergence(self) -> int:
        """Blocks that LRU would hold and that are not cached."""
        if self._edge is None:
            return 0
        return self._divergence + max(0, self._num_at_edge - self._edge.num_cached)

    @property
    def num_held_by_lru(self) -> int:
        """Blocks that LRU would hold."""
        return self._num_recent + self._num_at_edge

    def budget(self) -> int:
        """Return how many more blocks may be evicted that LRU holds; negative if too many are."""
        credit, looked_up = self.credit, self.num_looked_up
        sure = credit + SHARE * looked_up
        risk = (self._num_lost + DOUBT_BLOCKS) / (self._num_diverged + DOUBT_BLOCKS)
        times = min(_MAX_TIMES, 1.0 / (_CAUTION * risk))
        if times > 1.0:
            proven = times * (SHARE * looked_up + (credit if credit > 0 else 2 * credit))
            sure = max(sure, min(proven, credit + UTMOST_SHARE * looked_up))
        return int(sure) - self.divergence

    def num_free(self, batch: ReleaseBatch) -> int:
        """Return how many cached blocks of a batch LRU does not hold."""
        if not batch.is_recent:
            return batch.num_cached
        if batch is self._edge:
            return max(0, batch.num_cached - self._num_at_edge)
        return 0

    def open(self, batch: ReleaseBatch, num_blocks: int) -> None:
        """Note that lives of cached blocks began."""
        batch.num_open += num_blocks
        batch.num_cached += num_blocks
        self.is_trimmed = False
        if self._edge is None:
            self._edge = batch
        if batch is self._edge:
            self._num_at_edge += num_blocks
        else:
            self._num_recent += num_blocks

    def evicted(self, batch: ReleaseBatch, num_blocks: int) -> None:
        """Note that blocks are no longer cached; their lives continue."""
        batch.num_cached -= num_blocks
        if batch.is_recent and batch is not self._edge:
            self._divergence += num_blocks
            self._num_diverged += num_blocks

    def close(self, batch: ReleaseBatch, num_blocks: int, *, cached: bool, requested: bool) -> None:
        """Note that lives ended, or are no longer remembered.

        Blocks that a request asked for count for or against LRU; those of one request come root
        first.
        """
        at_edge = batch is self._edge
        if requested:
            lru_hits = num_blocks if batch.is_recent else 0
            if at_edge:  # LRU evicts tails first
                lru_hits = min(num_blocks, self._num_at_edge)
                self._num_at_edge -= lru_hits
            self._num_lost += 0 if cached else lru_hits
            self.credit += (num_blocks if cached else 0) - lru_hits
        batch.num_open -= num_blocks
        batch.num_cached -= num_blocks if cached else 0
        if at_edge:
            self._num_at_edge = min(self._num_at_edge, batch.num_open)
        elif batch.is_recent:
            self._num_recent -= num_blocks
            self._divergence -= 0 if cached else num_blocks
        if not batch.num_open and batch.newer is not None:
            if at_edge:
                self._pass(batch)
            batch.unlink()

    def trim(self, num_blocks: int) -> None:
        """Let LRU evict what is beyond so many blocks, in O(1) amortised."""
        self.is_trimmed = True
        edge = self._edge
        excess = self._num_recent + self._num_at_edge - num_blocks
        while edge is not None and (excess > 0 or not self._num_at_edge):
            num_trimmed = min(max(0, excess), self._num_at_edge)
            self._num_at_edge -= num_trimmed
            excess -= num_trimmed
            if self._num_at_edge or edge.newer is None:
                return
            edge = self._pass(edge)

    def _pass(self, edge: ReleaseBatch) -> ReleaseBatch:
        """Advance to the next batch: LRU holds nothing of this one any more."""
        newer = edge.newer
        assert newer is not None, "the caller looked"
        edge.is_recent = False
        self._aged(edge)
        self._edge = newer
        self._num_recent -= newer.num_open
        self._divergence -= newer.num_open - newer.num_cached
        self._num_at_edge = newer.num_open
        return newer

    def check(self) -> None:
        """Recount from the batches."""
        batch, num_recent, divergence = self._lives.newest, 0, 0
        while batch is not None:
            assert 0 <= batch.num_cached <= batch.num_open, "more lives ended than began"
            if batch.is_recent and batch is not self._edge:
                num_recent += batch.num_open
                divergence += batch.num_open - batch.num_cached
            batch = batch.older
        assert num_recent == self._num_recent, "LRU's blocks are miscounted"
        assert divergence == self._divergence, "what LRU would hold besides is miscounted"
        assert self._edge is None or self._num_at_edge <= self._edge.num_open

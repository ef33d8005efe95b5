"""What would LRU have cached, and is it time to do as LRU does?

Lives that have not ended, newest first, are exactly the blocks in LRU's order, those that were
evicted included. So the blocks that LRU would hold are the newest ``num_blocks`` of them: a
sum, kept up to date with one pointer, and no second cache. Each reuse says which of the two
would have hit.
"""

from ostinato.cache.policies.lives import Lives, Moment

_PATIENCE = 0.02
"""Blocks behind LRU, as a share of the pool, until LRU is followed."""

_PATIENCE_TURNS = 1.0
"""The same in requests of mean size, for the score moves by whole requests; the larger counts."""

_PATIENCE_EARLY = 0.002
"""The most of it, as a share of all blocks looked up."""


class Shadow:
    """LRU's contents by moment, and the score against it.

    Attributes:
        score: Blocks that hit here and would have missed under LRU, less the opposite.
        follows_lru: Whether LRU's victims are the better choice for now.
    """

    def __init__(self, num_blocks: int, lives: Lives) -> None:
        """Start level.

        Args:
            num_blocks: Size of the pool.
            lives: Whose moments to read.
        """
        self.score = 0.0
        self.follows_lru = False
        self._num_blocks = num_blocks
        self._lives = lives
        self._oldest: Moment | None = None  # the oldest moment that LRU would hold all of
        self._num_recent = 0
        self._is_settled = True
        self._num_looked_up = 0
        self._mark = 0.0
        self._penance = self._until = num_blocks

    def open(self, moment: Moment, num_blocks: int) -> None:
        """Note that lives began."""
        moment.num_open += num_blocks
        self._num_recent += num_blocks
        self._num_looked_up += num_blocks
        self._is_settled = False
        if self._oldest is None:
            self._oldest = moment

    def close(self, moment: Moment, num_blocks: int) -> None:
        """Note that lives ended, or are not remembered any more."""
        moment.num_open -= num_blocks
        if moment.is_recent:
            self._num_recent -= num_blocks
        if not moment.num_open and moment.newer is not None:
            if moment is self._oldest:
                self._oldest = moment.newer
            moment.unlink()

    def reused(self, moment: Moment, num_blocks: int, cached: bool) -> None:
        """Note who had blocks that are used again."""
        if not self._is_settled:
            self._settle()
        share = self._share(moment)
        self.score += num_blocks * ((1.0 - share) if cached else -share)

    def _settle(self) -> None:
        """Move the edge of what LRU holds, in O(1) amortised; it rests while one request looks."""
        self._is_settled = True
        oldest = self._oldest
        if oldest is None:
            return
        while self._num_recent > self._num_blocks and oldest.newer is not None:
            oldest.is_recent = False
            self._num_recent -= oldest.num_open
            oldest = oldest.newer
        while (older := oldest.older) is not None:
            if not older.num_open:
                older.unlink()
            elif self._num_recent + older.num_open > self._num_blocks:
                break
            else:
                oldest = older
                oldest.is_recent = True
                self._num_recent += oldest.num_open
        self._oldest = oldest

    def _share(self, moment: Moment) -> float:
        """Return which share of a moment's blocks LRU would hold; it evicts tails first."""
        if moment.is_recent:
            return 1.0
        if self._oldest is None or moment is not self._oldest.older or not moment.num_open:
            return 0.0
        return min(1.0, max(0.0, (self._num_blocks - self._num_recent) / moment.num_open))

    def judge(self, blocks_per_turn: float) -> None:
        """Follow LRU for a while when behind it; each time in a row four times as long.

        The while begins at one pool's worth of blocks. So a policy that is wrong for a workload
        is tried a few times only, each at the price of ``patience``. Called once per request.
        """
        patience = max(_PATIENCE * self._num_blocks, _PATIENCE_TURNS * blocks_per_turn)
        patience = min(patience, _PATIENCE_EARLY * self._num_looked_up)
        if self.follows_lru:
            if self._num_looked_up > self._until:
                self.follows_lru, self._mark = False, self.score
        elif self.score < self._mark - patience:
            self.follows_lru = True
            self._until = self._num_looked_up + self._penance
            self._penance *= 4
        elif self.score > self._mark + 2 * patience:
            self._penance = self._num_blocks

    def check(self) -> None:
        """Recount from the moments."""
        moment, num_recent = self._lives.newest, 0
        while moment is not None:
            assert moment.num_open >= 0, "more lives ended than began"
            num_recent += moment.num_open if moment.is_recent else 0
            moment = moment.older
        assert num_recent == self._num_recent, "LRU's blocks are miscounted"

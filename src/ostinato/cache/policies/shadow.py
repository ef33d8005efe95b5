"""What would LRU have cached, and how far may the policy part from it?

Lives that have not ended, newest first, are exactly the blocks in LRU's order, those that were
evicted included. So the blocks that LRU would hold are the newest ``num_blocks`` of them: a
sum, kept up to date with one pointer, and no second cache. Each reuse says which of the two
would have hit::

    oldest ───────────────► edge ──► newest       moments, one for each turn
    ...... | evicted by LRU | k of n | held by LRU

What LRU would hold and the policy has evicted is *lacking*: a hit that may be lost. Lacking
blocks are bought on credit: what they are expected to lose, at the rate at which such blocks
were lost so far, must not exceed what the policy has won, and a little patience.
"""

from ostinato.cache.policies.lives import Lives, Moment

_WARM_UP = 3.0
"""Blocks let go of before the policy is tried, in pools. Until then nobody has seen how blocks
fare that are older than those which LRU holds, and it is those that the policy would keep."""

_PATIENCE = 0.01
"""Blocks behind LRU, as a share of the pool, until LRU is followed for a while."""

_PATIENCE_TURNS = 1.0
"""The same in requests of mean size, for the score moves by whole requests; the larger counts."""

_PATIENCE_EARLY = 0.002
"""The most of it, as a share of all blocks looked up."""

_DOUBT = 0.125
"""Evicted blocks, as a share of the pool, until what became of them tells more about the risk
than the share of all blocks that LRU finds again."""


class Shadow:
    """LRU's contents by moment, and the score against it.

    Attributes:
        score: Blocks that hit here and would have missed under LRU, less the opposite.
        follows_lru: Whether LRU's victims are the better choice for now.
        num_lru_hits: Blocks that LRU would have found.
    """

    def __init__(self, num_blocks: int, lives: Lives) -> None:
        """Start level, as LRU.

        Args:
            num_blocks: Size of the pool.
            lives: Whose moments to read.
        """
        self.score = self.num_lru_hits = 0
        self.follows_lru = True
        self._num_blocks = num_blocks
        self._lives = lives
        self._oldest: Moment | None = None  # the oldest moment that LRU would hold all of
        self._edge: Moment | None = None  # the one before it, of which LRU would hold a part
        self._num_recent = self._num_at_edge = 0
        self._is_settled = True
        self._num_looked_up = 0
        self._num_lacking = self._num_lost = self._num_parted = 0
        self._mark = self._until = 0
        self._is_penitent = False
        self._penance = num_blocks

    def open(self, moment: Moment, num_blocks: int) -> None:
        """Note that lives of cached blocks began."""
        moment.num_open += num_blocks
        moment.num_cached += num_blocks
        self._num_recent += num_blocks
        self._num_looked_up += num_blocks
        self._is_settled = False
        if self._oldest is None:
            self._oldest = moment

    def evicted(self, moment: Moment, num_blocks: int) -> None:
        """Note that blocks are cached no more; their lives go on."""
        moment.num_cached -= num_blocks
        if moment.is_recent:
            self._num_lacking += num_blocks
            self._num_parted += num_blocks

    def close(self, moment: Moment, num_blocks: int, *, cached: bool) -> None:
        """Note that lives ended, or are not remembered any more."""
        moment.num_open -= num_blocks
        moment.num_cached -= num_blocks if cached else 0
        if moment.is_recent:
            self._num_recent -= num_blocks
            self._num_lacking -= 0 if cached else num_blocks
        if not moment.num_open and moment.newer is not None:
            if moment is self._oldest:
                self._oldest = moment.newer
            moment.unlink()

    def reused(self, moment: Moment, num_blocks: int, *, cached: bool) -> None:
        """Note who had blocks that are used again; those of one request come root first."""
        self._settle()
        theirs = num_blocks if moment.is_recent else 0
        if moment is self._edge:  # LRU evicts tails first
            theirs = min(num_blocks, self._num_at_edge)
            self._num_at_edge -= theirs
        self.num_lru_hits += theirs
        self._num_lost += 0 if cached else theirs
        self.score += (num_blocks if cached else 0) - theirs

    def _settle(self) -> None:
        """Move the edge of what LRU holds, in O(1) amortised; it rests while one request looks."""
        oldest = self._oldest
        if self._is_settled or oldest is None:
            return
        self._is_settled = True
        while self._num_recent > self._num_blocks and oldest.newer is not None:
            oldest.is_recent = False
            self._num_recent -= oldest.num_open
            self._num_lacking -= oldest.num_open - oldest.num_cached
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
                self._num_lacking += oldest.num_open - oldest.num_cached
        self._oldest, self._edge = oldest, oldest.older
        self._num_at_edge = max(0, self._num_blocks - self._num_recent)

    def judge(self, blocks_per_turn: float) -> None:
        """Say whether the policy may part from LRU any further. Called once per request.

        Who has lost more than ``patience`` does penance as LRU, for one pool's worth of blocks,
        and each time in a row four times as long; then credit is as at the beginning. So a
        policy that is wrong for a workload is tried a few times only.
        """
        self._settle()
        if self._num_looked_up < _WARM_UP * self._num_blocks:
            return
        if self._is_penitent:
            self._is_penitent = self._num_looked_up <= self._until
            self._mark = self.score
        patience = max(_PATIENCE * self._num_blocks, _PATIENCE_TURNS * blocks_per_turn)
        patience = min(patience, _PATIENCE_EARLY * self._num_looked_up)
        credit = self.score - self._mark + patience
        if credit < 0:
            self._is_penitent = True
            self._until = self._num_looked_up + self._penance
            self._penance *= 4
        elif credit > 3 * patience:
            self._penance = self._num_blocks
        self.follows_lru = self._is_penitent or self._num_lacking * self._risk() > credit

    def _risk(self) -> float:
        """Return which share of lacking blocks are expected to be hits that are lost."""
        doubt = _DOUBT * self._num_blocks
        usual = self.num_lru_hits / self._num_looked_up
        return (self._num_lost + doubt * usual) / (self._num_parted + doubt)

    def check(self) -> None:
        """Recount from the moments."""
        moment, num_recent, num_lacking = self._lives.newest, 0, 0
        while moment is not None:
            assert 0 <= moment.num_cached <= moment.num_open, "more lives ended than began"
            if moment.is_recent:
                num_recent += moment.num_open
                num_lacking += moment.num_open - moment.num_cached
            moment = moment.older
        assert num_recent == self._num_recent, "LRU's blocks are miscounted"
        assert num_lacking == self._num_lacking, "what LRU would hold besides is miscounted"

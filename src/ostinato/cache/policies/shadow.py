"""What would LRU have cached, and how many blocks may be staked against it?

Lives that have not ended, newest first, are the blocks in LRU's order, those that were evicted
included. So the blocks that LRU would hold are the newest of them, as many as are evictable here:
a sum, kept up to date with one pointer, and no second cache. It is exact where requests are served
one by one::

    oldest ───────────────► edge ──► newest       moments, one for each turn
    ...... | evicted by LRU | k of n | held by LRU

What LRU would hold and the policy has evicted is *lacking*: a hit that may be lost, and can be
lost once only, for then it is cached again. The account is ``lead``, the hits that LRU would not
have had less those that it alone would have had, in blocks. Of ``lead + share * blocks looked up
- lacking`` three things are true:

* a hit that is lost takes one from the lead, and one from what is lacking: it stays the same;
* it rises when the policy has a hit of its own, when LRU evicts what is lacking, and with
  what is looked up;
* it falls by one when the policy evicts what LRU holds, and by nothing else.

So a policy that evicts what LRU holds only while this is positive is never behind LRU by more
than that share of what was looked up, on any traffic. There is always something else to evict:
two caches of one size, so for each lacking block there is one that LRU does not hold, and what
builds on such a block LRU does not hold either, so one of them is a leaf. No policy can promise
more with less: whoever lacks more than its lead and the share loses them all when they are asked
for next.

That is what holds while nothing is proven, with a share of 0.2 %. What lacking blocks were lost
so far tells what the next ones risk: where that is little, a multiple may be staked, and then it
is that risk which 0.2 % rests on; the promise for any traffic whatsoever, by the same reasoning,
is 2 %. While the policy is behind, what it is behind counts twice against such a stake.
"""

from collections.abc import Callable

from ostinato.cache.policies.lives import Lives, Moment

SHARE = 0.002
"""What may be lost at most while nothing is proven, as a share of the blocks looked up."""

UTMOST_SHARE = 0.02
"""What may be lost at most, whatever was proven."""

_MOST_TIMES = 6.0
"""How many times lead and share are staked at most."""

_CAUTION = 3.0
"""How many times the risk that was seen is reckoned with."""

_DOUBT_BLOCKS = 30.0
"""Lost blocks that are assumed before any were seen."""


class Shadow:
    """LRU's contents by moment, and the account against it.

    Attributes:
        lead: Blocks that hit here and would have missed under LRU, less the opposite.
        num_looked_up: Blocks that were asked for.
        num_lru_hits: Those of them that LRU would have found.
    """

    def __init__(self, lives: Lives, aged: Callable[[Moment], None]) -> None:
        """Start level, as LRU.

        Args:
            lives: Whose moments to read.
            aged: Is told of each moment of which LRU holds nothing any more.
        """
        self.lead = self.num_looked_up = self.num_lru_hits = 0
        self._lives = lives
        self._aged = aged
        self._edge: Moment | None = None  # the oldest moment of which LRU would hold something
        self._num_at_edge = 0  # how much of it
        self._num_recent = 0  # what LRU would hold besides
        self._num_lacking = 0  # what of the latter is not cached
        self._is_settled = True
        self._num_lost = self._num_parted = 0

    @property
    def num_lacking(self) -> int:
        """Blocks that LRU would hold and that are not cached."""
        if self._edge is None:
            return 0
        return self._num_lacking + max(0, self._num_at_edge - self._edge.num_cached)

    @property
    def num_held_by_lru(self) -> int:
        """Blocks that LRU would hold."""
        return self._num_recent + self._num_at_edge

    def stake(self) -> int:
        """Return how many more blocks may be evicted that LRU holds; negative if too many are."""
        lead, looked_up = self.lead, self.num_looked_up
        sure = lead + SHARE * looked_up
        risk = (self._num_lost + _DOUBT_BLOCKS) / (self._num_parted + _DOUBT_BLOCKS)
        times = min(_MOST_TIMES, 1.0 / (_CAUTION * risk))
        if times > 1.0:
            proven = times * (SHARE * looked_up + (lead if lead > 0 else 2 * lead))
            sure = max(sure, min(proven, lead + UTMOST_SHARE * looked_up))
        return int(sure) - self.num_lacking

    def num_free(self, moment: Moment) -> int:
        """Return how many cached blocks of a moment LRU does not hold."""
        if not moment.is_recent:
            return moment.num_cached
        if moment is self._edge:
            return max(0, moment.num_cached - self._num_at_edge)
        return 0

    def open(self, moment: Moment, num_blocks: int) -> None:
        """Note that lives of cached blocks began."""
        moment.num_open += num_blocks
        moment.num_cached += num_blocks
        self._is_settled = False
        if self._edge is None:
            self._edge = moment
        if moment is self._edge:
            self._num_at_edge += num_blocks
        else:
            self._num_recent += num_blocks

    def evicted(self, moment: Moment, num_blocks: int) -> None:
        """Note that blocks are cached no more; their lives go on."""
        moment.num_cached -= num_blocks
        if moment.is_recent and moment is not self._edge:
            self._num_lacking += num_blocks
            self._num_parted += num_blocks

    def reused(self, moment: Moment, num_blocks: int, *, cached: bool) -> None:
        """Note who had blocks that are used again; those of one request come root first."""
        theirs = num_blocks if moment.is_recent else 0
        if moment is self._edge:  # LRU evicts tails first
            theirs = min(num_blocks, self._num_at_edge)
            self._num_at_edge -= theirs
        self.num_lru_hits += theirs
        self._num_lost += 0 if cached else theirs
        self.lead += (num_blocks if cached else 0) - theirs

    def close(self, moment: Moment, num_blocks: int, *, cached: bool) -> None:
        """Note that lives ended, or are not remembered any more."""
        moment.num_open -= num_blocks
        moment.num_cached -= num_blocks if cached else 0
        if moment is self._edge:
            self._num_at_edge = min(self._num_at_edge, moment.num_open)
        elif moment.is_recent:
            self._num_recent -= num_blocks
            self._num_lacking -= 0 if cached else num_blocks
        if not moment.num_open and moment.newer is not None:
            if moment is self._edge:
                self._pass(moment)
            moment.unlink()

    def settle(self, num_blocks: int) -> None:
        """Bring LRU to as many blocks as are evictable here, once between two requests."""
        if not self._is_settled:
            self.trim(num_blocks)

    def trim(self, num_blocks: int) -> None:
        """Let LRU evict what is beyond so many blocks, in O(1) amortised."""
        self._is_settled = True
        edge = self._edge
        excess = self._num_recent + self._num_at_edge - num_blocks
        while edge is not None and (excess > 0 or not self._num_at_edge):
            most = min(max(0, excess), self._num_at_edge)
            self._num_at_edge -= most
            excess -= most
            if self._num_at_edge or edge.newer is None:
                return
            edge = self._pass(edge)

    def _pass(self, edge: Moment) -> Moment:
        """Go on to the next moment: LRU holds nothing of this one any more."""
        newer = edge.newer
        assert newer is not None, "the caller looked"
        edge.is_recent = False
        self._aged(edge)
        self._edge = newer
        self._num_recent -= newer.num_open
        self._num_lacking -= newer.num_open - newer.num_cached
        self._num_at_edge = newer.num_open
        return newer

    def check(self) -> None:
        """Recount from the moments."""
        moment, num_recent, num_lacking = self._lives.newest, 0, 0
        while moment is not None:
            assert 0 <= moment.num_cached <= moment.num_open, "more lives ended than began"
            if moment.is_recent and moment is not self._edge:
                num_recent += moment.num_open
                num_lacking += moment.num_open - moment.num_cached
            moment = moment.older
        assert num_recent == self._num_recent, "LRU's blocks are miscounted"
        assert num_lacking == self._num_lacking, "what LRU would hold besides is miscounted"
        assert self._edge is None or self._num_at_edge <= self._edge.num_open

"""Reuse hazard: evicts the leaf that will bring the fewest hits for the memory that it takes.

Every released entry gets a class, made of what is known at that time:

* how often it was in use;
* how long ago its conversation had its previous turn;
* how long the finished output was;
* how much of the prompt was new, compared to other requests.

``LifetimeStats`` counts for each class at which ages blocks are used again, also of blocks that
were evicted too early, and ``HazardTable`` makes an index of it. ``LruShadow`` knows what LRU would
hold, and says how far the policy may diverge from it. Within that budget the leaf with the least
index is evicted; otherwise the one with the least index among those that LRU has evicted.

::

    recent, old         held by LRU, and not
    └── cell            class x age bin, in a heap by index
        └── cohorts     of one release batch, oldest first
            └── leaves  newest first: a conversation is evicted from its tail on

There is nothing to tune: times are those of people and tools, all else is relative to what the
cache sees. Cost: O(log cells) per eviction, and a fit every 50 requests while there are any.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import cast

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import BlockShares, LeastRecentlyUsed, RequestSummary, Victim
from ostinato.cache.observer import CacheObserver
from ostinato.core.identity import PrefixKey
from ostinato.core.request import RequestContext
from ostinato.eviction.ghost_list import EvictedRun, GhostList
from ostinato.eviction.hazard_table import EDGES_S, NUM_BINS, HazardTable
from ostinato.eviction.lifetimes import (
    NO_LEAVES,
    Cohort,
    LifetimeStats,
    LruShadow,
    ReleaseBatch,
    VictimHeap,
)

_USES = (1, 2, 4, 16)
_GAPS_S = (0.0, 20.0, 60.0, 180.0)
_OUTPUT_TOKENS = (50, 200, 500)
_NEW_SHARES = (0.08, 0.3, 1.1)
"""Bounds of the features; new blocks as a share of what requests have on average."""

_SHAPE = (len(_USES) + 1, len(_GAPS_S) + 1, len(_OUTPUT_TOKENS) + 1, len(_NEW_SHARES) + 1)
_CLASSES_PER_USES = _SHAPE[1] * _SHAPE[2] * _SHAPE[3]

_MANY_USES = _USES[-1] + 1
_FIRST_CLASS = [bisect_left(_USES, uses) * _CLASSES_PER_USES for uses in range(_MANY_USES + 1)]
"""The first class by number of uses, up to ``_MANY_USES``; more count as that."""

_MANY_SHARERS = 20  # what was used more often says nothing of one conversation's pace
_AGES_S = EDGES_S[1:-1]
_BATCH_OF = attrgetter("policy_state.batch")

_MEMORY = 8
_MEMORY_WITH_TIER = 64
"""Evicted blocks that are remembered, in pools; with a tier, at most."""


class ReuseHazard(LeastRecentlyUsed):
    """Evict the leaf with the fewest expected hits per block-second."""

    def __init__(
        self, num_blocks: int, clock: Callable[[], float], requests_per_fit: int = 50
    ) -> None:
        """Start without experience: as LRU, until it has seen what comes back.

        Args:
            num_blocks: Size of the pool.
            clock: Seconds that never fall.
            requests_per_fit: Requests between two fits of the index.
        """
        super().__init__()
        self._clock = clock
        self._requests_per_fit = requests_per_fit
        self._table = HazardTable(_SHAPE)
        self._lives = LifetimeStats(self._table)
        self.shadow = LruShadow(self._lives, self._aged)
        self._memory = GhostList(_MEMORY * num_blocks, self._dropped)
        self._heaps = VictimHeap(self._table.index), VictimHeap(self._table.index)
        """What LRU does not hold, and what it holds: ``ReleaseBatch.is_recent`` is the place."""
        self._turn: RequestSummary | None = None
        self._request_class = 0  # of the running turn, uses left out
        self._num_turns = 0
        self._is_fit_due = False
        self._sum_new = self._sum_weights = 0.0  # new blocks per turn, the last hundred most

    @property
    def num_remembered_blocks(self) -> int:
        """Evicted blocks whose return would be noticed."""
        return self._memory.num_blocks

    def remember(self, num_blocks: int) -> None:
        """Remember at least ``num_blocks`` evicted blocks: a tier behind the pool has them."""
        memory = self._memory
        limit = memory.max_blocks // _MEMORY * _MEMORY_WITH_TIER
        memory.max_blocks = max(memory.max_blocks, min(num_blocks, limit))

    @property
    def lru_lead(self) -> int:
        """Blocks that hit and would have missed under LRU, less the opposite."""
        return self.shadow.credit

    def row_of(self, request_class: int, uses: int) -> int:
        """Return where the index of a block's class begins."""
        return (_FIRST_CLASS[min(uses, _MANY_USES)] + request_class) * NUM_BINS

    def worth(self, row: int, age_s: float) -> float:
        """Return the hits per block-second of a class at an age, as fitted last."""
        self._fit()
        return self._table.index[row + bisect_right(_AGES_S, age_s)]

    def request_class(self, summary: RequestSummary) -> int:
        """Return the class of what a request releases, uses left out."""
        mean_new = self._sum_new / max(1.0, self._sum_weights)
        share = summary.num_new_blocks / max(1e-9, mean_new)
        place = 0 if summary.gap_s is None else bisect_right(_GAPS_S, summary.gap_s)
        place = place * _SHAPE[2] + bisect_right(_OUTPUT_TOKENS, summary.num_output_tokens)
        return place * _SHAPE[3] + bisect_right(_NEW_SHARES, share)

    # --- entries ---

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Begin lives of one batch; without a request, each of the class that its entry had."""
        now_s, running, total = entries[0].idle_since_s, -1, 0
        if summary is not None and summary is not self._turn:
            self._next_turn(summary, now_s)
        super().add(entries, summary)
        for entry in entries:
            if summary is not None:
                feature_class = self._request_class + _FIRST_CLASS[min(entry.uses, _MANY_USES)]
            else:
                before: Cohort | None = entry.policy_state
                feature_class = 0 if before is None else before.feature_class
            if feature_class != running:
                cohort = self._lives.begin(feature_class, now_s, self._num_turns)
                running = feature_class
            num_blocks = entry.num_blocks
            cohort.num_begun += num_blocks
            cohort.num_open += num_blocks
            total += num_blocks
            entry.policy_state = cohort
            if entry.is_leaf:
                self.became_leaf(entry)
        self.shadow.open(cohort.batch, total)

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """End lives: entries are used again; those of one batch are counted at once."""
        self._advance(self._clock())
        shadow = self.shadow
        if not shadow.is_trimmed:
            shadow.trim(self.num_blocks)
        for batch, some in groupby(entries, _BATCH_OF):
            count = 0
            for entry in some:
                cohort: Cohort = entry.policy_state
                num_blocks = entry.num_blocks
                cohort.num_open -= num_blocks
                cohort.num_reused += num_blocks
                count += num_blocks
                if entry in cohort.leaves:
                    self._withdraw(entry)
            shadow.close(batch, count, cached=True, requested=True)
        super().remove(entries)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Continue lives in memory."""
        if num_blocks == entry.num_blocks:
            self._withdraw(entry)
        super().evict(entry, num_blocks)
        self.shadow.evicted(entry.policy_state.batch, num_blocks)
        self._memory.put(entry, num_blocks, entry.policy_state)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Add the head; it has the same past and is no leaf."""
        head.policy_state = tail.policy_state
        super().split(tail, head)

    def became_leaf(self, entry: CacheEntry) -> None:
        """Add an entry to the leaves."""
        cohort: Cohort = entry.policy_state
        if not cohort.leaves:
            self._heaps[cohort.batch.is_recent].add(cohort)
            if cohort.leaves is NO_LEAVES:
                cohort.leaves = OrderedDict()
        cohort.leaves[entry] = None

    def look_up(
        self, key: PrefixKey, first: int, last: int, block_size: int, summary: RequestSummary
    ) -> None:
        """End lives of evicted blocks that a request asks for."""
        shadow, memory = self.shadow, self._memory
        if not shadow.is_trimmed:
            shadow.trim(self.num_blocks)
        shadow.num_looked_up += last
        if not memory.num_blocks:
            return
        self._advance(self._clock())
        while memory.num_blocks and first < last:
            run = memory.take(key, first, last - first, block_size)
            if run is None:
                return
            self._end(run, requested=True)
            summary.recalled.append(run)
            first += run.num_blocks

    def recall(
        self,
        key: PrefixKey,
        first: int,
        max_blocks: int,
        block_size: int,
        summary: RequestSummary | None,
    ) -> tuple[int, int]:
        """Return what is remembered of blocks that are published again."""
        run = _looked_up(summary, first, max_blocks) if summary is not None else None
        if run is None:
            if self._memory.num_blocks:
                run = self._memory.take(key, first, max_blocks, block_size)
            if run is None:
                if summary is not None:
                    summary.num_new_blocks += max_blocks
                return 0, max_blocks
            self._advance(self._clock())
            self._end(run, requested=False)
        if summary is not None:
            gap_s = self._clock() - run.idle_since_s
            summary.gap_s = gap_s if run.uses < _MANY_SHARERS else None
        return run.uses, run.num_blocks

    def erase(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Erase what is remembered of entries that match."""
        self._memory.erase(belongs)
        if self._turn is not None:
            recalled = self._turn.recalled
            recalled[:] = [run for run in recalled if not belongs(run.entry)]

    # --- victims ---

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Return the leaf with the least index of those that may be evicted; LRU's if none may.

        Of what LRU holds, no more blocks than there is budget for.
        """
        oldest = super().victim()
        if oldest is None:
            return None
        self._advance(self._clock())
        self._fit()
        shadow = self.shadow
        shadow.trim(self.num_blocks - num_needed)
        old, recent = self._heaps
        free, worst = self._first_victim(old), None
        budget = shadow.budget()
        if budget > 0 or free is None:
            worst = self._first_victim(recent)
        if worst is not None and (free is None or worst[0] < free[0]):
            max_blocks = max(0, budget) + shadow.num_free(worst[1].policy_state.batch)
            if max_blocks > 0:
                return worst[1], min(worst[1].num_blocks, max_blocks)
        if free is not None:
            return free[1], free[1].num_blocks
        entry, num_blocks = oldest
        return entry, min(num_blocks, max(1, shadow.num_free(entry.policy_state.batch)))

    def check(self) -> None:
        """Assert that every evictable leaf is offered, and recount lives."""
        self._memory.check()
        self.shadow.check()
        for is_recent, heap in enumerate(self._heaps):
            heap.check()
            assert all(cohort.batch.is_recent == is_recent for cohort in heap), "LRU's or not"
        offered = 0
        for entry in self:
            cohort: Cohort = entry.policy_state
            offered += entry in cohort.leaves
            assert not entry.is_leaf or entry in cohort.leaves, "a leaf is not offered"
        listed = sum(len(cohort.leaves) for heap in self._heaps for cohort in heap)
        assert offered == listed, "a leaf belongs to no cohort"
        open_lives = Counter[Cohort]()
        lives = [(entry.policy_state, entry.num_blocks) for entry in self]
        lives += [(run.cohort, run.num_blocks) for run in self._memory.runs()]
        for cohort, num_blocks in lives:
            open_lives[cohort] += num_blocks
        assert all(cohort.num_open == count for cohort, count in open_lives.items())

    # --- bookkeeping ---

    def _next_turn(self, summary: RequestSummary, now_s: float) -> None:
        """Begin with the entries that another request releases."""
        self._advance(now_s)
        self._num_turns += 1
        if self._num_turns % self._requests_per_fit == 0:
            self._table.fade()
            self._is_fit_due = True
        self._turn = summary
        self._sum_new = 0.99 * self._sum_new + summary.num_new_blocks
        self._sum_weights = 0.99 * self._sum_weights + 1.0
        self._request_class = self.request_class(summary)

    def _fit(self) -> None:
        """Fit the index if that is due; never called while everything fits."""
        if self._is_fit_due:
            self._is_fit_due = False
            self._table.fit()
            for heap in self._heaps:
                heap.reorder()

    def _end(self, run: EvictedRun, *, requested: bool) -> None:
        """End lives of evicted blocks: they are published again, or requested."""
        run.cohort.num_reused += run.num_blocks
        self._dropped(run, requested=requested)

    def _dropped(self, run: EvictedRun, *, requested: bool = False) -> None:
        """End lives that are no longer remembered; they count for as long as they were."""
        run.cohort.num_open -= run.num_blocks
        self.shadow.close(run.cohort.batch, run.num_blocks, cached=False, requested=requested)

    def _advance(self, now_s: float) -> None:
        """Age cohorts, and move them into other cells."""
        lives = self._lives
        if now_s < lives.due_s:
            return
        lives.advance(now_s)
        for cohort, left in lives.moved:
            heap = self._heaps[cohort.batch.is_recent]
            heap.discard(cohort, left)
            heap.add(cohort)
        lives.moved.clear()

    def _aged(self, batch: ReleaseBatch) -> None:
        """Move leaves to those that LRU does not hold."""
        for cohort in batch.cohorts.values():
            if cohort.leaves:
                old, recent = self._heaps
                recent.discard(cohort, cohort.cell)
                old.add(cohort)

    def _first_victim(self, heap: VictimHeap) -> tuple[float, CacheEntry] | None:
        """Return the least index, and the leaf that has it."""
        while (first := heap.first()) is not None:
            index, cohort = first
            entry = next(reversed(cohort.leaves))
            if entry.is_leaf:
                return index, entry
            self._withdraw(entry)  # it was one while another copy of it was cached
        return None

    def _withdraw(self, entry: CacheEntry) -> None:
        cohort: Cohort = entry.policy_state
        if entry in cohort.leaves:
            del cohort.leaves[entry]
            if not cohort.leaves:
                self._heaps[cohort.batch.is_recent].discard(cohort, cohort.cell)


def _looked_up(summary: RequestSummary, first: int, max_blocks: int) -> EvictedRun | None:
    """Remove and return what a request's look-up has found of a block and those after it."""
    recalled: list[EvictedRun] = summary.recalled
    while recalled and recalled[0].start <= first:
        run = recalled.pop(0)
        if run.start == first:  # else another request has published it meanwhile
            if run.num_blocks > max_blocks:
                recalled.insert(0, run.part(max_blocks, run.num_blocks))
            return run.part(0, min(max_blocks, run.num_blocks))
    return None


class MissObserver(CacheObserver):
    """Tells policies that learn which blocks a request asks for and does not find."""

    def __init__(self, shares: BlockShares, block_size: int, clock: Callable[[], float]) -> None:
        """Observe for the policies of a pool, all of which learn."""
        self._shares, self._block_size, self._clock = shares, block_size, clock

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Tell the policy of the request's tenant, once per request that publishes."""
        entry = table.hit_entry
        if entry is not None and entry.idle_tick:
            gap_s = self._clock() - entry.idle_since_s
            table.summary.gap_s = gap_s if entry.uses < _MANY_SHARERS else None
        num_requested = (len(table.key.tokens) - 1) // self._block_size
        if num_requested and table.writes and not context.is_readmission:
            policy = cast(ReuseHazard, self._shares.policy_of(table.tenant))
            policy.look_up(
                table.key, table.num_published, num_requested, self._block_size, table.summary
            )

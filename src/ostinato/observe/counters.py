"""Counters of the cache.

Counts are in tokens unless the name says otherwise. Queries and hits are counted once per request,
at its first admission; look-ups after a preemption are counted apart, since they would make the
hit ratio of a busy engine look better than it is.

Buckets of a histogram grow by a factor of two, so that a thousandth and a million need 40 counters
between them, and a quantile is right to within a factor of two.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import frexp

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver, Eviction
from ostinato.cache.prefix_index import PublishResult, Removal
from ostinato.core.request import IDLE_WORK, RequestContext
from ostinato.settings import PolicyName

_NUM_BUCKETS = 64
_LOWEST_EXPONENT = -20
"""The first bucket ends at 2**-20: about a microsecond, if values are seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts by power of two.

    Attributes:
        counts: Bucket ``i`` counts values in ``[2**(i-21), 2**(i-20))``; the first takes all
            that is smaller, the last all that is larger. Shape (64,).
        total: Sum of all values, each as often as it was counted.
    """

    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)
    total: float = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value that is not negative, in O(1)."""
        bucket = frexp(value)[1] - _LOWEST_EXPONENT if value > 0 else 0
        if not 0 <= bucket < _NUM_BUCKETS:
            bucket = 0 if bucket < 0 else _NUM_BUCKETS - 1
        self.counts[bucket] += count
        self.total += value * count

    def add_whole(self, value: int, count: int) -> None:
        """Count a whole number that is not negative, in half the time."""
        bucket = value.bit_length() - _LOWEST_EXPONENT if value else 0
        self.counts[bucket if bucket < _NUM_BUCKETS else _NUM_BUCKETS - 1] += count
        self.total += value * count

    def copy(self) -> "Histogram":
        """Return an independent histogram of the same counts."""
        return Histogram(self.counts[:], self.total)

    @property
    def num_values(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def bound(self, bucket: int) -> float:
        """Return the value at which a bucket ends."""
        return float(2.0 ** (bucket + _LOWEST_EXPONENT))

    def cumulative(self, bounds: Iterable[float]) -> list[tuple[str, float]]:
        """List how many values are below each bound, a power of two, and below infinity."""
        below = {self.bound(i): number for i, number in enumerate(accumulate(self.counts))}
        return [*((repr(bound), below[bound]) for bound in bounds), ("+Inf", self.num_values)]

    def quantile(self, share: float) -> float:
        """Return the bound below which at least that share of the values is; 0 if empty."""
        rank, seen = share * self.num_values, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen and seen >= rank:
                return self.bound(bucket)
        return 0.0


MAX_TENANTS = 1024
"""Tenants counted separately; bounded, since clients choose salts."""


@dataclass(slots=True)
class LookupCounts:
    """Look-ups of admitted requests.

    Attributes:
        num_requests: Admissions.
        query_tokens: Tokens that were looked up.
        shared_tokens: Tokens that hit in whole blocks.
        copied_tokens: Tokens copied out of a block whose first tokens match.
    """

    num_requests: int = 0
    query_tokens: int = 0
    shared_tokens: int = 0
    copied_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that were not computed."""
        return self.shared_tokens + self.copied_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of looked-up tokens that hit, from 0 to 1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    def add(self, query: int, shared: int, copied: int) -> None:
        """Count one admission."""
        self.num_requests += 1
        self.query_tokens += query
        self.shared_tokens += shared
        self.copied_tokens += copied

    def merge(self, other: "LookupCounts") -> None:
        """Add another's counts."""
        self.num_requests += other.num_requests
        self.query_tokens += other.query_tokens
        self.shared_tokens += other.shared_tokens
        self.copied_tokens += other.copied_tokens


@dataclass(frozen=True, slots=True)
class GhostEstimate:
    """The estimated hits of another cache on the same traffic.

    Attributes:
        num_blocks: Its size.
        policy: Its eviction policy.
        hit_ratio: Estimated share of looked-up tokens that hit, from 0 to 1.
        num_sampled: Sampled blocks behind the estimate, counted once per look-up.
        memory: Its size as a multiple of the cache's.
        error: Half of the 95 % confidence interval of ``hit_ratio``.
        num_requests: Requests of the traffic that were sampled.
        num_later_requests: Requests since the last of them.
    """

    num_blocks: int
    policy: PolicyName
    hit_ratio: float
    num_sampled: int
    memory: float = 1.0
    error: float = 0.0
    num_requests: int = 0
    num_later_requests: int = 0

    @property
    def low(self) -> float:
        """Lower bound of the hit ratio."""
        return max(0.0, self.hit_ratio - self.error)

    @property
    def high(self) -> float:
        """Upper bound of the hit ratio."""
        return min(1.0, self.hit_ratio + self.error)


@dataclass(frozen=True, slots=True)
class StateCounts:
    """The state pool of a model with Mamba or linear attention: slots, and counters.

    Attributes:
        num_slots: States that fit.
        num_running: Slots of sequences that run.
        num_checkpoints: States kept for prefixes.
        num_kept: Checkpoints published.
        num_evicted: Checkpoints evicted, for room or with their blocks.
        num_hits: Requests that started from one.
        num_again_tokens: Tokens whose blocks hit, recomputed for their states.
    """

    num_slots: int = 0
    num_running: int = 0
    num_checkpoints: int = 0
    num_kept: int = 0
    num_evicted: int = 0
    num_hits: int = 0
    num_again_tokens: int = 0


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. Block counts are those of the full-attention group.

    Attributes:
        first: Look-ups of requests at their first admission.
        preempted: Look-ups of requests after a preemption.
        tenants: ``first`` by tenant, for the ``MAX_TENANTS`` that were seen last.
        other_tenants: ``first`` of the tenants that are no longer counted one by one.
        published_blocks: Blocks that became findable.
        duplicate_blocks: Published blocks whose content was cached already.
        sealed_tails: Partial blocks of ended sequences that became findable.
        evicted_blocks: Cached blocks that were evicted.
        eviction_ages_s: Evicted blocks by seconds since their last use.
        residencies_s: Evicted blocks by seconds since they were published; a run of blocks
            that grew together counts from its first.
        reuse_distances: Reused evictable blocks, by blocks allocated since they became evictable.
        ghosts: What other sizes and policies would have found; empty without a ghost,
            and those that would be known worse than to ten points are left out.
        states: State pool, for models with states; else None.
    """

    first: LookupCounts = field(default_factory=LookupCounts)
    preempted: LookupCounts = field(default_factory=LookupCounts)
    tenants: dict[bytes, LookupCounts] = field(default_factory=dict)
    other_tenants: LookupCounts = field(default_factory=LookupCounts)
    published_blocks: int = 0
    duplicate_blocks: int = 0
    sealed_tails: int = 0
    evicted_blocks: int = 0
    eviction_ages_s: Histogram = field(default_factory=Histogram)
    residencies_s: Histogram = field(default_factory=Histogram)
    reuse_distances: Histogram = field(default_factory=Histogram)
    ghosts: tuple[GhostEstimate, ...] = ()
    states: StateCounts | None = None

    def copy(self) -> "CacheStats":
        """Return the counters as they are now, in O(tenants)."""
        return replace(
            self,
            first=replace(self.first),
            preempted=replace(self.preempted),
            tenants={tenant: replace(counts) for tenant, counts in self.tenants.items()},
            other_tenants=replace(self.other_tenants),
            eviction_ages_s=self.eviction_ages_s.copy(),
            residencies_s=self.residencies_s.copy(),
            reuse_distances=self.reuse_distances.copy(),
        )

    def count_lookup(
        self, tenant: bytes, query: int, shared: int, copied: int, preempted: bool
    ) -> None:
        """Count one admission."""
        if preempted:
            self.preempted.add(query, shared, copied)
            return
        self.first.add(query, shared, copied)
        tenants = self.tenants
        counts = tenants.pop(tenant, None) or LookupCounts()
        counts.add(query, shared, copied)
        tenants[tenant] = counts  # newest last
        if len(tenants) > MAX_TENANTS:
            oldest = next(iter(tenants))
            self.other_tenants.merge(tenants.pop(oldest))


class CacheCounters(CacheObserver):
    """Counts events of the cache.

    Attributes:
        stats: The counters.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start at zero."""
        self.stats = CacheStats()
        self._clock = clock

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Count a look-up; a prompt with ``n`` continuations was looked up once."""
        if context.is_sibling or context.name.startswith(IDLE_WORK):
            return
        shared, copied = table.num_shared_tokens, table.num_copied_tokens
        again = context.is_readmission
        self.stats.count_lookup(table.tenant, len(table.key.tokens), shared, copied, again)

    def on_publish(
        self, table: BlockTable, first: int, last: int, result: PublishResult, group: int = 0
    ) -> None:
        """Count blocks that became findable."""
        if group == 0:
            self.stats.published_blocks += last - first - result.num_known
            self.stats.duplicate_blocks += result.num_known

    def on_evict(self, eviction: Eviction) -> None:
        """Count evicted blocks."""
        if eviction.group == 0 and eviction.cause != "removed":
            stats, entry, now_s = self.stats, eviction.entry, self._clock()
            count = len(eviction.removal.blocks)
            stats.evicted_blocks += count
            stats.eviction_ages_s.add(now_s - entry.idle_since_s, count)
            stats.residencies_s.add(now_s - entry.born_s, count)

    def on_reuse(self, entries: Sequence[CacheEntry], num_allocated: int) -> None:
        """Count the reuse distances of reused blocks."""
        distances, moment, num_blocks = self.stats.reuse_distances, -1, 0
        for entry in entries:
            if entry.idle_allocated != moment:  # most of a path was released at once
                if num_blocks:
                    distances.add_whole(num_allocated - moment, num_blocks)
                moment, num_blocks = entry.idle_allocated, 0
            num_blocks += entry.num_blocks
        distances.add_whole(num_allocated - moment, num_blocks)

    def on_release(
        self, table: BlockTable, num_tokens: int, num_findable: int, sealed: bool
    ) -> None:
        """Count partial blocks that became findable."""
        self.stats.sealed_tails += sealed

    def erase(self, tenant: bytes) -> int:
        """Erase a tenant's counts."""
        self.stats.tenants.pop(tenant, None)
        return 0


class HitCounts(CacheObserver):
    """Requests by the block at which their hit ended.

    Hits of evicted blocks count for the block before them.

    Attributes:
        by_block: Counts of blocks that are cached.
    """

    def __init__(self) -> None:
        """Start without a hit."""
        self.by_block: Counter[int] = Counter()

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Count a hit."""
        is_counted = not (context.is_readmission or context.name.startswith(IDLE_WORK))
        if table.num_shared_tokens and is_counted:
            self.by_block[table.blocks[-1]] += 1

    def on_evict(self, eviction: Eviction) -> None:
        """Count the hits of evicted blocks for the block before them."""
        if not eviction.group:
            self._move(eviction.removal)

    def on_retract(self, table: BlockTable, removal: Removal, group: int = 0) -> None:
        """Count the hits of retracted blocks for the block before them."""
        if not group:
            self._move(removal)

    def _move(self, removal: Removal) -> None:
        count = sum(self.by_block.pop(block, 0) for block in removal.blocks)
        if count and removal.before is not None:
            self.by_block[removal.before] += count

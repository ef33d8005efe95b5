"""Puts caches and schedulers together from settings: the one place that knows all their rooms."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ostinato.cache.eviction import BlockShares, EvictionPolicy, PolicyFactory
from ostinato.cache.manager import CacheManager, MakeIndex
from ostinato.cache.observer import CacheObserver, Observers
from ostinato.cache.pool import BlockPool
from ostinato.cache.radix_index import RadixIndex
from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.eviction import make_policy
from ostinato.eviction.classic_order import ClassicPool
from ostinato.eviction.reuse_hazard import MissObserver, ReuseHazard
from ostinato.ghost.ghost import Ghost
from ostinato.hybrid.checkpoint import LeastSavedWork
from ostinato.hybrid.layer_group import LayerGroup, StateCopies
from ostinato.hybrid.manager import HybridCacheManager
from ostinato.hybrid.placement import Placement
from ostinato.hybrid.prefill_cuts import StateCuts
from ostinato.hybrid.state_group import OrphanObserver, StateGroup
from ostinato.hybrid.window_group import WindowGroup
from ostinato.indexes.block_hash import BlockHasher, DigestFunction, make_digest, sha256
from ostinato.indexes.hash_index import HashIndex
from ostinato.observe.counters import CacheCounters, CacheStats, HitCounts, StateCounts
from ostinato.observe.event_recorder import EventRecorder
from ostinato.observe.events import EventBatch, EventLog
from ostinato.observe.history import RequestHistory
from ostinato.sched.scheduler import Scheduler
from ostinato.sched.step_planner import Drafts
from ostinato.sched.waiting_queue import FirstComeFirstServed, NumCachedTokens, WaitingOrder
from ostinato.scheduling.fair_share import FairShare
from ostinato.scheduling.held_requests import HeldRequests, SkipHeld
from ostinato.scheduling.learned_prices import LearnedPrices, StepTimer
from ostinato.scheduling.ranked_orders import LongestPrefixFirst, ShortestFirst
from ostinato.settings import FreeOrder, PrefixCacheConfig, TenantShare, window_blocks
from ostinato.tenants.cache_admin import CacheAdmin, PublicLeases
from ostinato.tenants.lease_book import LeaseBook
from ostinato.tenants.lease_limits import MIN_STATE_SLOTS
from ostinato.tenants.shares import TenantShares

Clock = Callable[[], float]

_POOLS: dict[FreeOrder, type[BlockPool]] = {"unused_first": BlockPool, "classic": ClassicPool}


@dataclass(slots=True)
class PrefixCache:
    """A cache manager and what observes and administers it.

    Attributes:
        config: The settings.
        manager: What the scheduler asks.
        admin: Leases, erasure, epochs, reset.
        history: What explanations are made of.
        hits: Where the hits of requests ended.
        events: What outsiders are told; None if ``keep_event_batches`` is 0.
    """

    config: PrefixCacheConfig
    manager: CacheManager
    admin: CacheAdmin
    history: RequestHistory
    hits: HitCounts
    events: EventLog | None
    ghost: Ghost | None
    _counters: CacheCounters
    _recorder: EventRecorder | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    @property
    def states(self) -> StateGroup | None:
        """The pool of states; None for a model without."""
        manager = self.manager
        groups = manager.layer_groups if isinstance(manager, HybridCacheManager) else ()
        return next((group for group in groups if isinstance(group, StateGroup)), None)

    @property
    def stats(self) -> CacheStats:
        """Counters since the start, and the ghost's estimates as of now."""
        stats = self._counters.stats
        if self.ghost is not None:
            stats.ghosts = self.ghost.estimates()
        if (group := self.states) is not None:
            num_used = group.pool.num_blocks - group.pool.num_free
            kept, counts = group.num_checkpoints, group.stats
            stats.states = StateCounts(
                group.pool.num_blocks, num_used, kept, counts.num_kept, counts.num_evicted,
                counts.num_hits, counts.num_again_tokens,
            )  # fmt: skip
        return stats

    def snapshot(self) -> EventBatch | None:
        """Return what is cached as one batch of events, numbered as the next batch.

        Returns:
            None where no events are kept. Window groups are left out.
        """
        if self.events is None or self._recorder is None:
            return None
        stored = self._recorder.snapshot(self.manager.index.runs())
        return EventBatch(self.events.next_sequence, self.manager.pool.now(), tuple(stored))

    def check(self) -> None:
        """Assert every invariant; slow, for tests."""
        self.manager.check()
        self.history.check()


def build_cache(
    config: PrefixCacheConfig,
    clock: Clock = time.monotonic,
    digest: DigestFunction | None = None,
    epoch: int = 0,
    policy: PolicyFactory | None = None,
    more_observers: Iterable[CacheObserver] = (),
    make_index: MakeIndex | None = None,
) -> PrefixCache:
    """Make an empty cache.

    Args:
        config: Its settings.
        clock: Seconds that never fall; for ages and leases.
        digest: Replaces the configured digest function of the hash index.
        epoch: Of the weights, to begin with.
        policy: Makes another eviction policy than the configured one.
        more_observers: Are told of what happens, after those that are made here.
        make_index: Makes another prefix index than the configured one.
    """
    policy = policy or partial(make_policy, config.eviction_policy)
    counters, history, hits = CacheCounters(clock), RequestHistory(config, clock), HitCounts()
    observers: list[CacheObserver] = [counters, hits]
    if config.keep_explanations:
        observers.append(history)
    events = recorder = None
    if config.keep_event_batches:
        events = EventLog(clock, config.keep_event_batches)
        recorder = EventRecorder(events, BlockHasher(config.block_size, sha256))
        observers.append(recorder)
    shares = make_shares(config.tenant_shares, policy, config.num_blocks, clock)
    ghost = None
    if config.num_ghost_blocks and config.enable_prefix_caching:
        ghost = Ghost(config, clock, counters.stats.first, shares.policies)
        observers.append(ghost)
    if all(isinstance(policy, ReuseHazard) for policy in shares.policies):
        observers.append(MissObserver(shares, config.block_size, clock))
    observers += more_observers
    public = PublicLeases()
    manager = make_manager(config, clock, digest, shares, observers, public, epoch, make_index)
    erasables = [known for known in (counters, history, recorder, ghost) if known is not None]
    admin = CacheAdmin(config, manager, LeaseBook(clock), public, erasables)
    return PrefixCache(config, manager, admin, history, hits, events, ghost, counters, recorder)


def make_manager(
    config: PrefixCacheConfig,
    clock: Clock,
    digest: DigestFunction | None,
    shares: BlockShares,
    observers: list[CacheObserver],
    public: PublicLeases,
    epoch: int,
    make_index: MakeIndex | None = None,
) -> CacheManager:
    """Make the manager, with a group of layers per sliding window and one for states."""
    function = make_digest(config.digest) if digest is None else digest
    orphans, has_states = OrphanObserver(), config.states is not None
    if has_states:  # a state is never kept within a block, so a partial block cannot hit
        observers, config = [orphans, *observers], replace(config, seal_tails=False)

    def make_hash_index(pool: BlockPool, block_size: int) -> HashIndex:
        return HashIndex(pool, BlockHasher(block_size, function), keeps_copies=not has_states)

    def make_groups(observers: Observers, copies: StateCopies) -> list[LayerGroup]:
        hasher, groups = BlockHasher(config.block_size, sha256), list[LayerGroup]()
        for group, window in enumerate(config.windows, 1):
            min_blocks = window_blocks(window.window, config.block_size)
            pool = make_group_pool(config, window.num_blocks, min_blocks, clock, observers, group)
            groups.append(WindowGroup(window.window, pool, hasher))
        if (states := config.states) is not None:
            place = len(config.windows)
            pool = make_group_pool(
                config, states.num_slots, MIN_STATE_SLOTS, clock, observers, place + 1
            )
            placement = Placement(states.sparse_checkpoints)
            cuts = StateCuts(states, placement, place)
            groups.append(StateGroup(pool, hasher, copies, cuts, placement, orphans))
        return groups

    if make_index is None:
        make_index = RadixIndex if config.index == "radix" else make_hash_index
    make_pool = _POOLS[config.free_order]
    arguments = (
        config, clock, shares, make_index, observers, public.may_continue, epoch, make_pool,
    )  # fmt: skip
    if config.windows or has_states:
        return HybridCacheManager(make_groups, *arguments)
    return CacheManager(*arguments)


def make_shares(
    tenant_shares: Mapping[bytes, TenantShare], policy: PolicyFactory, num_blocks: int, clock: Clock
) -> BlockShares:
    """Make the shares of a pool: with accounts if any tenant has a share."""
    if tenant_shares:
        return TenantShares(tenant_shares, lambda: policy(num_blocks, clock))
    return BlockShares(policy(num_blocks, clock))


def make_group_pool(
    config: PrefixCacheConfig,
    num_blocks: int,
    min_blocks: int,
    clock: Clock,
    observers: Observers,
    group: int,
) -> BlockPool:
    """Make the pool of a window or of states; tenants have the same share of it as of group 0's.

    Its policy is its own whatever group 0's is: LRU for windows, since a block that left a window
    is of use to a hit that ends there and to no other, so there is nothing to learn. Guarantees
    leave the ``min_blocks`` that one sequence needs to go on, as they do in group 0.
    """
    ratio = num_blocks / config.num_blocks
    guaranteed_ratio = min(ratio, (num_blocks - min_blocks) / config.num_blocks)
    tenant_shares = {
        tenant: TenantShare(
            int(share.guaranteed * guaranteed_ratio),
            None if share.quota is None else max(1, int(share.quota * ratio)),
        )
        for tenant, share in config.tenant_shares.items()
    }
    make: PolicyFactory = partial(make_policy, "lru")
    states = config.states if group > len(config.windows) else None
    if states is not None and states.placement == "where_prompts_part":
        make = _saved_work_policy
    shares = make_shares(tenant_shares, make, num_blocks, clock)
    return _POOLS[config.free_order](num_blocks, shares, clock, observers, group)


def _saved_work_policy(num_blocks: int, clock: Clock) -> EvictionPolicy:
    return LeastSavedWork()


def build_scheduler(
    config: SchedulerConfig,
    cache: PrefixCache,
    clock: Clock = time.monotonic,
    held: Sequence[HeldRequests] = (),
    prices: LearnedPrices | None = None,
    order: Callable[[NumCachedTokens], WaitingOrder] | None = None,
    wrap_order: Callable[[WaitingOrder], WaitingOrder] | None = None,
    drafts: Drafts | None = None,
) -> Scheduler:
    """Make a scheduler without requests over a cache.

    Args:
        config: Its settings.
        cache: Whose blocks it gives to sequences.
        clock: Seconds that never fall; with ``max_step_ms``, steps are measured by it.
        held: Requests that it passes over.
        prices: The price list of steps; by default it is learned.
        order: Makes a waiting order in place of ``config.order``, given a look-up without effects.
        wrap_order: Returns an order around it, such as one that takes notes.
        drafts: Guesses of what decodes sample next; by default there are none.

    Raises:
        ConfigError: A step has no room for a chunk of a model with states.
    """
    if cache.config.states is not None:
        _check_chunks(config, cache.config.states.unit)

    timer = None
    if config.max_step_ms is not None:
        timer = StepTimer(config.max_step_ms, config.max_num_batched_tokens, prices)
    unit = 1 if cache.config.states is None else cache.config.states.unit

    def make_order(num_cached_tokens: NumCachedTokens) -> WaitingOrder:
        match config.order:
            case "shortest_first":
                return ShortestFirst(
                    config.max_overtakes, num_cached_tokens, timer, config.max_chunk_tokens, unit
                )
            case "longest_prefix":
                return LongestPrefixFirst(config.max_overtakes, num_cached_tokens)
            case "fair_share":
                return FairShare(config.max_overtakes)
            case "fcfs":
                return FirstComeFirstServed()

    def make_skipping(num_cached_tokens: NumCachedTokens) -> WaitingOrder:
        chosen = (order or make_order)(num_cached_tokens)
        chosen = chosen if wrap_order is None else wrap_order(chosen)
        return SkipHeld(chosen, held) if held else chosen

    return Scheduler(config, cache.manager, clock, make_skipping, timer, drafts)


def _check_chunks(config: SchedulerConfig, unit: int) -> None:
    """Refuse steps in which a prefill could get less than a chunk.

    Raises:
        ConfigError: Naming the setting.
    """
    room = config.max_num_batched_tokens - config.max_num_seqs + 1
    if room < unit:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} leaves {room} tokens for a "
            f"prefill beside max_num_seqs={config.max_num_seqs}, but the model keeps states, which "
            f"are computed {unit} tokens at a time: raise the one or lower the other"
        )
    if config.max_chunk_tokens is not None and config.max_chunk_tokens < unit:
        raise ConfigError(
            f"max_chunk_tokens={config.max_chunk_tokens}: the model keeps states, which are "
            f"computed {unit} tokens at a time: give at least {unit}"
        )

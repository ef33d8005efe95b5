"""A consistent copy of an engine's counters, taken between two steps.

Metrics and pages format it without stopping the engine.
"""

from dataclasses import dataclass, replace

from ostinato.engine.audit import AuditCounts
from ostinato.engine.engine import Engine
from ostinato.engine.tiered_cache import TierCounts
from ostinato.observe.counters import CacheStats
from ostinato.observe.introspection import BlockState, count_states
from ostinato.runner.compute_path import ComputePath
from ostinato.sched.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment.

    Attributes:
        cache: Counters of the cache since the start.
        scheduler: Counters of the scheduler since the start.
        states: Blocks of the full-attention group by state.
        num_running: Sequences that hold blocks.
        num_waiting: Sequences that hold none.
        num_leased_blocks: Blocks that leases hold, each counted once.
        compute_path: How steps are computed, and why not faster.
        audit: What audits of hits have found.
        tiers: What tiers did; None without any.
    """

    cache: CacheStats
    scheduler: SchedulerStats
    states: dict[BlockState, int]
    num_running: int
    num_waiting: int
    num_leased_blocks: int
    compute_path: ComputePath
    audit: AuditCounts
    tiers: TierCounts | None = None


def take_snapshot(engine: Engine) -> Snapshot:
    """Copy an engine's counters, between steps; in O(tenants + live sequences)."""
    return Snapshot(
        engine.cache_stats.copy(),
        replace(engine.scheduler_stats),
        count_states(engine.cache.manager),
        engine.scheduler.num_running,
        engine.scheduler.num_waiting,
        engine.cache.admin.num_leased_blocks,
        engine.compute_path,
        engine.audit.counts,
        None if engine.tiers is None else engine.tiers.counts,
    )

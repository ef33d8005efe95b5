"""A consistent copy of an engine's counters, taken between two steps.

Metrics and pages format it without stopping the engine.
"""

from dataclasses import dataclass, replace

from ostinato.drafts.drafter import DraftCounts
from ostinato.engine.ledger.turns import LedgerCounts
from ostinato.engine.loop.audit import AuditCounts
from ostinato.engine.loop.engine import Engine
from ostinato.engine.loop.idle_rebase import RebaseCounts
from ostinato.engine.tiers.tiered_cache import TierCounts
from ostinato.observe.counters import CacheStats
from ostinato.observe.introspection import BlockState, count_states
from ostinato.runner.compute_path import ComputePath
from ostinato.sched.waiting_queue import SchedulerStats
from ostinato.scheduling.learned_prices import StepTimes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment."""

    cache: CacheStats  # counters of the cache since the start
    scheduler: SchedulerStats  # counters of the scheduler since the start
    states: dict[BlockState, int]  # blocks of the full-attention group by state
    num_running: int  # sequences that hold blocks
    num_waiting: int  # sequences that hold none
    num_leased_blocks: int  # blocks that leases hold, each counted once
    compute_path: ComputePath  # how steps are computed, and why not faster
    audit: AuditCounts  # what audits of hits have found
    steps: StepTimes  # predicted and measured times of steps
    rebase: RebaseCounts  # rows computed for prompts to come
    drafts: DraftCounts  # rows computed for drafts, by source
    tiers: TierCounts | None = None  # what tiers did; None without any
    ledger: LedgerCounts | None = None  # turns that were written; None without a tokenizer


def take_snapshot(engine: Engine) -> Snapshot:
    """Copy an engine's counters, between steps; in O(tenants + live sequences)."""
    turns = engine.prompts.turns
    return Snapshot(
        engine.cache_stats.copy(),
        replace(engine.scheduler_stats),
        count_states(engine.cache.manager),
        engine.scheduler.num_running,
        engine.scheduler.num_waiting,
        engine.cache.admin.num_leased_blocks,
        engine.compute_path,
        engine.audit.counts,
        engine.prices.times,
        engine.rebase.counts,
        engine.drafting.counts,
        None if engine.tiers is None else engine.tiers.counts,
        None if turns is None else replace(turns.ledger.counts),
    )

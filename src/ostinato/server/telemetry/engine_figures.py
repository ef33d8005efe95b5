"""The figures of the engine: cache, states, audits, drafts, tiers, ledger and scheduler."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from ostinato.engine.ledger.turns import LedgerCounts
from ostinato.engine.loop.snapshot import Snapshot
from ostinato.engine.tiers.tiered_cache import TierCounts
from ostinato.observe.counters import GhostEstimate, LookupCounts, StateCounts
from ostinato.server.telemetry.figures import Figure, Part, Value

counter, gauge, histogram, info = (
    partial(Figure, kind) for kind in ("counter", "gauge", "histogram", "info")
)
Read = Callable[[Snapshot], Value]

AGES_S = [2.0**exponent for exponent in range(-10, 21)]
"""Bounds of the histograms of times."""

DISTANCES = [2.0**exponent for exponent in range(25)]
"""Bounds of the histogram of reuse distances."""


def _origins(seen: Snapshot) -> dict[str, float]:
    cache, scheduler = seen.cache, seen.scheduler
    return {
        "computed": scheduler.computed_prompt_tokens - seen.rebase.computed,
        "cached": cache.first.shared_tokens - scheduler.waited_prompt_tokens,
        "copied": cache.first.copied_tokens,
        "waited": scheduler.waited_prompt_tokens,
    }


def _lookups(seen: Snapshot) -> dict[tuple[str, ...], float]:
    lookups = {"new": seen.cache.first, "preempted": seen.cache.preempted}
    return {
        (name, result): number
        for name, counts in lookups.items()
        for result, number in (
            ("hit", counts.hit_tokens),
            ("miss", counts.query_tokens - counts.hit_tokens),
        )
    }


def _prices(seen: Snapshot) -> dict[str, float]:
    prices = seen.steps.prices
    if prices is None:
        return {}
    return {
        "step": prices.fixed_s,
        "token": prices.token_s,
        "key": prices.key_s,
        "pair": prices.pair_s,
    }


def _states(read: Callable[[StateCounts], Value]) -> Read:
    """Read the state pool; a model without states has an empty one."""
    return lambda seen: read(seen.cache.states or StateCounts())


def _ghosts(read: Callable[[GhostEstimate], float]) -> Read:
    return lambda seen: {(f"{g.memory:g}", g.policy): read(g) for g in seen.cache.ghosts}


def _interval(seen: Snapshot) -> dict[tuple[str, ...], float]:
    return {
        (f"{ghost.memory:g}", ghost.policy, end): bound
        for ghost in seen.cache.ghosts
        for end, bound in (("low", ghost.low), ("high", ghost.high))
    }


def _tiers(read: Callable[[TierCounts], Value]) -> Read:
    return lambda seen: None if seen.tiers is None else read(seen.tiers)


def _tier_bytes(counts: TierCounts) -> dict[tuple[str, ...], float]:
    return {
        (tier.tier, kind): number
        for tier in counts.tiers
        for kind, number in (
            ("used", tier.num_bytes),
            ("limit", tier.limit_bytes),
            ("leased", tier.leased_bytes),
        )
    }


def _ledger(read: Callable[[LedgerCounts], float]) -> Read:
    return lambda seen: None if seen.ledger is None else read(seen.ledger)


# fmt: off
FIGURES = (
    info("compute_path",
        "How steps are computed, and [why not faster](forward.md#instruction-sets); always 1.",
        lambda seen: seen.compute_path.fields(),
        ("device", "dtype", "weights", "kv_dtype", "instruction_set", "attention", "forward",
         "why_not_faster"),
        admin="compute_path"),
    counter("prompt_tokens",
        "Prompt tokens by the origin of their KV: `computed` by the model, again after a "
        "preemption as well; `cached` in whole blocks; `copied` out of a block; `waited` for, "
        "computed by another request after this one arrived.", _origins, ("origin",)),
    counter("looked_up_tokens",
        "Tokens looked up at admission, of `new` requests and of `preempted` ones that return, "
        "and whether they hit.", _lookups, ("request", "result")),
    gauge("blocks",
        "Blocks by state: `unused` (free, without content), `private` (of one request), `held` "
        "(cached and read by live requests), `evictable` (cached, without a reader).",
        lambda seen: {state.name.lower(): number for state, number in seen.states.items()},
        ("state",), admin="blocks"),
    gauge("leased_blocks", "Blocks that leases hold.", lambda seen: seen.num_leased_blocks,
        admin="num_leased_blocks", page="leased_blocks"),
    counter("published_blocks", "Blocks that became findable.",
        lambda seen: seen.cache.published_blocks, admin="published_blocks"),
    counter("duplicate_blocks", "Published blocks that were cached already.",
        lambda seen: seen.cache.duplicate_blocks, admin="duplicate_blocks"),
    counter("sealed_tails", "Partial blocks that became findable.",
        lambda seen: seen.cache.sealed_tails, admin="sealed_tails"),
    counter("evicted_blocks", "Cached blocks that were evicted.",
        lambda seen: seen.cache.evicted_blocks, admin="evicted_blocks", page="evicted_blocks"),
    histogram("eviction_age_seconds", "Evicted blocks by time since they were last held.",
        lambda seen: seen.cache.eviction_ages_s, bounds=AGES_S),
    histogram("block_residency_seconds", "Evicted blocks by time since they were published.",
        lambda seen: seen.cache.residencies_s, bounds=AGES_S),
    histogram("reuse_distance_blocks",
        "Blocks that were reused, by blocks allocated since they were released: a pool smaller "
        "by so many would have evicted them.", lambda seen: seen.cache.reuse_distances,
        bounds=DISTANCES),
    gauge("state_slots",
        "State slots of a [model with states](hybrids.md) by use: `running` (of one sequence, or "
        "of a checkpoint that it reads), `checkpoint` (kept for a prefix), `all`.",
        _states(lambda states: {
            "running": states.num_running, "checkpoint": states.num_checkpoints,
            "all": states.num_slots}),
        ("use",)),
    counter("checkpoints_kept", "Checkpoints kept for prefixes.",
        _states(lambda states: states.num_kept)),
    counter("checkpoints_evicted", "Checkpoints evicted, for room or with their blocks.",
        _states(lambda states: states.num_evicted)),
    counter("checkpoints_hit", "Requests that started from a checkpoint.",
        _states(lambda states: states.num_hits)),
    counter("state_tokens_computed_again",
        "Tokens whose blocks hit, recomputed because their state was not kept.",
        _states(lambda states: states.num_again_tokens)),
    gauge("ghost_hit_ratio",
        "[Estimated](eviction.md#the-ghost) hit rate, in looked-up tokens, of a cache of `0.5`, "
        "`2` or `4` times the memory, or under `lru`, since the start.",
        _ghosts(lambda ghost: ghost.hit_ratio), ("memory", "policy")),
    gauge("ghost_interval_hit_ratio",
        "`low` and `high` end of the estimate's 95 % confidence interval; hidden while it is "
        "wider than twenty points.", _interval, ("memory", "policy", "end")),
    gauge("ghost_sampled_blocks", "Sampled blocks behind the estimate.",
        _ghosts(lambda ghost: ghost.num_sampled), ("memory", "policy")),
    gauge("ghost_requests", "Requests behind the estimate.",
        _ghosts(lambda ghost: ghost.num_requests), ("memory", "policy")),
    gauge("ghost_later_requests", "Requests since the last one behind the estimate.",
        _ghosts(lambda ghost: ghost.num_later_requests), ("memory", "policy")),
    counter("audited_hits",
        "Hits that were [recomputed and compared](determinism.md#audits) bit by bit: `same`, "
        "`different`, or `gone`, evicted before their turn.",
        lambda seen: {
            "same": seen.audit.num_same, "different": seen.audit.num_different,
            "gone": seen.audit.num_gone},
        ("result",)),
    counter("quarantined_blocks",
        "Blocks removed because an audit found them, or a block before them, wrong.",
        lambda seen: seen.audit.num_removed),
    counter("idle_rebase_tokens",
        "Tokens of prompts to come that were "
        "[computed in idle steps](agents.md#prompts-computed-while-idle): all that were "
        "`computed`, those that the next request `used`, and those that it `wasted`.",
        lambda seen: {
            "computed": seen.rebase.computed, "used": seen.rebase.used,
            "wasted": seen.rebase.wasted},
        ("outcome",)),
    counter("idle_rebase_late", "Prompts whose request came before anything of them was computed.",
        lambda seen: seen.rebase.late),
    gauge("idle_rebase_stopped_tenants",
        "Tenants for which nothing more is prepared: they used less than a third.",
        lambda seen: seen.rebase.stopped),
    counter("drafted_tokens",
        "Rows computed for [drafts](drafts.md), by where their text came from: `grammar`, "
        "`answer`, `prompt`, `cache`.", lambda seen: seen.drafts.drafted, ("source",)),
    counter("accepted_draft_tokens", "Drafts that were the model's own tokens.",
        lambda seen: seen.drafts.accepted, ("source",)),
    counter("tier_loaded_tokens", "Prompt tokens [loaded](tiers.md#what-is-loaded) from a tier.",
        _tiers(lambda counts: dict(sorted(counts.loaded_tokens.items()))), ("tier",)),
    counter("tier_load_faults",
        "Loads that ended early: `checksum`, `deadline`, `missing` and so on.",
        _tiers(lambda counts: dict(sorted(counts.load_faults.items()))), ("reason",)),
    counter("tier_stores", "Extents to write: `stored`, `present`, `budget`, `full` and so on.",
        _tiers(lambda counts: dict(sorted(counts.stores.items()))), ("result",)),
    counter("tier_load_seconds", "Total time of loads.",
        _tiers(lambda counts: counts.load_seconds)),
    counter("tier_cheaper_to_compute", "Loads skipped: computing was faster.",
        _tiers(lambda counts: counts.num_cheaper)),
    counter("tier_left_out", "Prefixes not written: too many waited.",
        _tiers(lambda counts: counts.num_left_out)),
    gauge("tier_loading_requests", "Requests waiting for a load.",
        _tiers(lambda counts: counts.num_loading)),
    gauge("tier_waiting_stores", "Prefixes waiting to be written.",
        _tiers(lambda counts: counts.num_waiting)),
    gauge("tier_on", "1 if a tier is on, 0 if it is read-only or off.",
        _tiers(lambda counts: {tier.tier: tier.state == "on" for tier in counts.tiers}), ("tier",)),
    gauge("tier_bytes", "Bytes a tier has `used`, its `limit`, and those `leased`.",
        _tiers(_tier_bytes), ("tier", "kind")),
    counter("tier_written_bytes", "Bytes written to a tier.",
        _tiers(lambda counts: {tier.tier: tier.written_bytes for tier in counts.tiers}), ("tier",)),
    counter("tier_damaged",
        "Places [found damaged](durability.md#what-is-durable-when) when a tier was opened, or "
        "unreadable.",
        _tiers(lambda counts: {tier.tier: tier.num_damaged for tier in counts.tiers}), ("tier",)),
    gauge("ledger_turns",
        "[Turns](agents.md#turns-continue-as-they-were-written) that the model wrote and later "
        "prompts may continue.", _ledger(lambda counts: counts.num_turns)),
    gauge("ledger_bytes", "Memory of these turns.", _ledger(lambda counts: counts.num_bytes)),
    counter("ledger_noted_turns", "Turns that were noted.", _ledger(lambda counts: counts.noted)),
    counter("ledger_evicted_turns", "Turns that were dropped for the bound.",
        _ledger(lambda counts: counts.evicted)),
    counter("ledger_restored_turns",
        "Turns that prompts continue as they were written, where the template writes something "
        "else.", _ledger(lambda counts: counts.restored)),
    counter("ledger_restored_tokens", "Tokens of these turns.",
        _ledger(lambda counts: counts.restored_tokens)),
    counter("ledger_restored_reasoning_turns",
        "Turns of these whose reasoning the client had dropped.",
        _ledger(lambda counts: counts.restored_reasoning)),
    counter("ledger_unequal_messages",
        "Messages that differ from all that was written at their place.",
        _ledger(lambda counts: counts.unequal)),
    counter("ledger_dropped_turns", "Turns of prompts whose reasoning the template dropped.",
        _ledger(lambda counts: counts.dropped)),
    counter("ledger_dropped_tokens", "Tokens of that reasoning.",
        _ledger(lambda counts: counts.dropped_tokens)),
    counter("ledger_seals", "Sealed names that chose a turn.",
        _ledger(lambda counts: counts.opened_seals)),
    counter("ledger_ignored_seals", "Sealed names without effect.",
        _ledger(lambda counts: counts.ignored_seals)),
    gauge("running_sequences", "Sequences that hold blocks.", lambda seen: seen.num_running,
        admin="num_running", page="running"),
    gauge("waiting_sequences", "Sequences in the queue.", lambda seen: seen.num_waiting,
        admin="num_waiting", page="waiting"),
    counter("preemptions", "Preemptions of running sequences.",
        lambda seen: seen.scheduler.num_preemptions, page="preemptions"),
    counter("steps", "Steps that ran, failed ones included.", lambda seen: seen.scheduler.num_steps,
        page="steps"),
    counter("failed_steps", "Steps whose forward pass raised.",
        lambda seen: seen.scheduler.num_failed_steps),
    counter("decoded_tokens", "Generated tokens fed to the model.",
        lambda seen: seen.scheduler.computed_output_tokens),
    counter("predicted_steps", "Steps whose time was predicted before they ran.",
        lambda seen: seen.steps.num_steps),
    counter("step_seconds", "Time of those steps, as `measured` and as `predicted`.",
        lambda seen: {"measured": seen.steps.measured_s, "predicted": seen.steps.predicted_s},
        ("time",)),
    gauge("step_price_seconds",
        "Learned [price](rooms/scheduling.md#the-price-list) of a `step`, and of each `token`, "
        "`key` and `pair` of a query and a key in it.", _prices, ("unit",)),
)
# fmt: on
"""The metrics, in the order of the docs."""


def lookup_counts(counts: LookupCounts) -> dict[str, Any]:
    """Return look-ups for JSON."""
    return {**asdict(counts), "hit_ratio": round(counts.hit_ratio, 6)}


def _ghost(ghost: GhostEstimate) -> dict[str, Any]:
    counts = asdict(ghost)
    del counts["error"]  # low and high tell it
    return {
        **counts,
        "num_sampled_blocks": counts.pop("num_sampled"),
        **{name: round(getattr(ghost, name), 6) for name in ("hit_ratio", "low", "high")},
    }


def _tier_rows(seen: Snapshot) -> dict[str, Any]:
    """Lay out what each tier holds, and how its loads ended."""
    counts = seen.tiers
    if counts is None:
        return {"rows": []}
    rows = [
        {
            "tier": tier.tier,
            "state": tier.state,
            "reason": tier.reason,
            "used": tier.num_bytes,
            "limit": tier.limit_bytes,
            "written": tier.written_bytes,
            "loaded": counts.loaded_tokens.get(tier.tier, 0),
        }
        for tier in counts.tiers
    ]
    return {"rows": rows, "faults": counts.load_faults, "cheaper": counts.num_cheaper}


GROUPS = (
    Part(lambda seen: lookup_counts(seen.cache.first), admin="lookups"),
    Part(lambda seen: lookup_counts(seen.cache.preempted), admin="lookups_after_preemption"),
    Part(
        lambda seen: None if seen.cache.states is None else asdict(seen.cache.states),
        admin="states",
        page="states",
    ),
    Part(
        lambda seen: {**asdict(seen.rebase), "pending": seen.rebase.pending},
        admin="idle_rebase",
        page="idle_rebase",
    ),
    Part(lambda seen: asdict(seen.drafts), admin="drafts", page="drafts"),
    Part(lambda seen: [_ghost(ghost) for ghost in seen.cache.ghosts], admin="ghosts"),
    Part(lambda seen: str(seen.compute_path), page="compute_path"),
    Part(lambda seen: asdict(seen.steps), page="step_times"),
    Part(lambda seen: seen.audit.num_same + seen.audit.num_different, page="audited_hits"),
    Part(lambda seen: seen.audit.num_different, page="different_hits"),
    Part(_tier_rows, page="tiers"),
)
"""What JSON shows as a whole."""


def engine_metrics(seen: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of a snapshot."""
    for figure in FIGURES:
        value = None if figure.read is None else figure.read(seen)
        if value is not None:
            yield figure.family(value)

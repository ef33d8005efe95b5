"""Prometheus metrics of the engine: cache, states, audits, scheduler, tiers and the ghost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ostinato.drafts.drafter import DraftCounts
from ostinato.engine.ledger.turns import LedgerCounts
from ostinato.engine.loop.snapshot import Snapshot
from ostinato.engine.tiers.tiered_cache import TierCounts
from ostinato.observe.counters import GhostEstimate, StateCounts
from ostinato.observe.histogram import Histogram
from ostinato.scheduling.learned_prices import StepTimes

Samples = Mapping[Any, float]
"""Numbers by the value of the label; of several labels, by the tuple of their values."""


def engine_metrics(seen: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of a snapshot."""
    text = "How steps are computed, and why not faster."
    yield InfoMetricFamily("ostinato_compute_path", text, seen.compute_path.fields())
    yield from _prompt_tokens(seen)
    yield from _blocks(seen)
    yield from _states(seen.cache.states or StateCounts())
    yield from _ghosts(seen.cache.ghosts)
    yield from _audits(seen)
    yield from _rebase(seen)
    yield from _drafts(seen.drafts)
    yield from tier_metrics(seen.tiers)
    yield from _ledger(seen.ledger)
    yield from _scheduling(seen)
    yield from _step_times(seen.steps)


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Samples,
) -> Metric:
    """Return a metric with labels."""
    family = kind(name, text, labels=labels)
    for values, number in samples.items():
        family.add_metric([values] if isinstance(values, str) else values, number)
    return family


def _prompt_tokens(seen: Snapshot) -> Iterator[Metric]:
    cache, scheduler = seen.cache, seen.scheduler
    yield _family(
        CounterMetricFamily,
        "ostinato_prompt_tokens",
        "Prompt tokens by the origin of their KV: computed by the model; cached in "
        "whole blocks; copied out of a block; waited for, computed by another request meanwhile.",
        ["origin"],
        {
            "computed": scheduler.computed_prompt_tokens - seen.rebase.computed,
            "cached": cache.first.shared_tokens - scheduler.waited_prompt_tokens,
            "copied": cache.first.copied_tokens,
            "waited": scheduler.waited_prompt_tokens,
        },
    )
    looked_up = dict[tuple[str, str], float]()
    for name, counts in (("new", cache.first), ("preempted", cache.preempted)):
        looked_up[name, "hit"] = counts.hit_tokens
        looked_up[name, "miss"] = counts.query_tokens - counts.hit_tokens
    yield _family(
        CounterMetricFamily,
        "ostinato_looked_up_tokens",
        "Tokens looked up at admission, of new requests and of preempted ones that "
        "return, and whether they hit.",
        ["request", "result"],
        looked_up,
    )


def _blocks(seen: Snapshot) -> Iterator[Metric]:
    cache = seen.cache
    yield _family(
        GaugeMetricFamily,
        "ostinato_blocks",
        "Blocks by state: unused (free, without content), private (of one request), held (cached "
        "and read by live requests), evictable (cached, without a reader).",
        ["state"],
        {state.name.lower(): number for state, number in seen.states.items()},
    )
    yield GaugeMetricFamily(
        "ostinato_leased_blocks", "Blocks that leases hold.", seen.num_leased_blocks
    )
    for name, text, value in (
        ("published_blocks", "Blocks that became findable.", cache.published_blocks),
        ("duplicate_blocks", "Published blocks that were cached already.", cache.duplicate_blocks),
        ("sealed_tails", "Partial blocks that became findable.", cache.sealed_tails),
        ("evicted_blocks", "Cached blocks that were evicted.", cache.evicted_blocks),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value)
    yield _histogram(
        "ostinato_eviction_age_seconds",
        "Evicted blocks by time since they were last held.",
        cache.eviction_ages_s,
        range(-10, 21),
    )
    yield _histogram(
        "ostinato_block_residency_seconds",
        "Evicted blocks by time since they were published.",
        cache.residencies_s,
        range(-10, 21),
    )
    yield _histogram(
        "ostinato_reuse_distance_blocks",
        "Blocks that were reused, by blocks evicted meanwhile: a pool smaller by so many "
        "would have lost them.",
        cache.reuse_distances,
        range(0, 25),
    )


def _histogram(name: str, text: str, seen: Histogram, exponents: range) -> Metric:
    """Return a histogram with powers of two as bounds."""
    buckets: list[tuple[str, float]] = []
    wanted = {2.0**exponent for exponent in exponents}
    below = 0
    for bucket, number in enumerate(seen.counts):
        below += number
        if seen.bound(bucket) in wanted:
            buckets.append((repr(seen.bound(bucket)), below))
    buckets.append(("+Inf", below))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=seen.total)


def _states(states: StateCounts) -> Iterator[Metric]:
    yield _family(
        GaugeMetricFamily,
        "ostinato_state_slots",
        "State slots by use: running (of one sequence, or of a checkpoint that it reads), "
        "checkpoint (kept for a prefix), all.",
        ["use"],
        {
            "running": states.num_running,
            "checkpoint": states.num_checkpoints,
            "all": states.num_slots,
        },
    )
    for name, text, value in (
        ("checkpoints_kept", "Checkpoints kept for prefixes.", states.num_kept),
        (
            "checkpoints_evicted",
            "Checkpoints evicted, for room or with their blocks.",
            states.num_evicted,
        ),
        ("checkpoints_hit", "Requests that started from a checkpoint.", states.num_hits),
        (
            "state_tokens_computed_again",
            "Tokens whose blocks hit, recomputed because their state was not kept.",
            states.num_again_tokens,
        ),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value)


def _ghosts(ghosts: Sequence[GhostEstimate]) -> Iterator[Metric]:
    """Yield gauges per multiple of the memory and per policy, once there are estimates."""
    labels = ["memory", "policy"]
    caches = {(f"{ghost.memory:g}", ghost.policy): ghost for ghost in ghosts}
    yield _family(
        GaugeMetricFamily,
        "ostinato_ghost_hit_ratio",
        "Estimated hit rate, in looked-up tokens, of a cache of so many times the memory, or of "
        "another policy, since the start.",
        labels,
        {cache: ghost.hit_ratio for cache, ghost in caches.items()},
    )
    yield _family(
        GaugeMetricFamily,
        "ostinato_ghost_interval_hit_ratio",
        "Bounds of the estimate's 95 % confidence interval.",
        [*labels, "end"],
        {(*key, end): getattr(caches[key], end) for key in caches for end in ("low", "high")},
    )
    for name, text, field in (
        ("sampled_blocks", "Sampled blocks behind the estimate.", "num_sampled"),
        ("requests", "Requests behind the estimate.", "num_requests"),
        (
            "later_requests",
            "Requests since the last one behind the estimate.",
            "num_later_requests",
        ),
    ):
        samples = {cache: getattr(ghost, field) for cache, ghost in caches.items()}
        yield _family(GaugeMetricFamily, f"ostinato_ghost_{name}", text, labels, samples)


def _rebase(seen: Snapshot) -> Iterator[Metric]:
    rows = seen.rebase
    yield _family(
        CounterMetricFamily,
        "ostinato_idle_rebase_tokens",
        "Tokens of prompts to come that were computed in idle steps: all of them, those that the "
        "next request used, and those that it did not.",
        ["outcome"],
        {"computed": rows.computed, "used": rows.used, "wasted": rows.wasted},
    )
    yield CounterMetricFamily(
        "ostinato_idle_rebase_late",
        "Prompts whose request came before anything of them was computed.",
        rows.late,
    )
    yield GaugeMetricFamily(
        "ostinato_idle_rebase_stopped_tenants",
        "Tenants for which nothing more is prepared: they used less than a third.",
        rows.stopped,
    )


def _drafts(counts: DraftCounts) -> Iterator[Metric]:
    for name, text, samples in (
        ("drafted_tokens", "Rows computed for drafts, by the text they came from.", counts.drafted),
        ("accepted_draft_tokens", "Drafts that were the model's own tokens.", counts.accepted),
    ):
        yield _family(CounterMetricFamily, f"ostinato_{name}", text, ["source"], samples)


def _audits(seen: Snapshot) -> Iterator[Metric]:
    audit = seen.audit
    yield _family(
        CounterMetricFamily,
        "ostinato_audited_hits",
        "Hits that were recomputed and compared bit by bit: same, different, or evicted before "
        "their turn.",
        ["result"],
        {"same": audit.num_same, "different": audit.num_different, "gone": audit.num_gone},
    )
    yield CounterMetricFamily(
        "ostinato_quarantined_blocks",
        "Blocks removed because an audit found them, or a block before them, wrong.",
        audit.num_removed,
    )


def _ledger(counts: LedgerCounts | None) -> Iterator[Metric]:
    """Yield the metrics of the ledger of turns; none without a tokenizer."""
    if counts is None:
        return
    for name, text, value in (
        ("turns", "Turns that the model wrote and later prompts may continue.", counts.num_turns),
        ("bytes", "Memory of these turns.", counts.num_bytes),
    ):
        yield GaugeMetricFamily(f"ostinato_ledger_{name}", text, value)
    for name, text, value in (
        ("noted_turns", "Turns that were noted.", counts.noted),
        ("evicted_turns", "Turns that were dropped for the bound.", counts.evicted),
        ("restored_turns", "Turns that prompts continue as they were written.", counts.restored),
        ("restored_tokens", "Tokens of these turns.", counts.restored_tokens),
        (
            "restored_reasoning_turns",
            "Turns of these whose reasoning the client had dropped.",
            counts.restored_reasoning,
        ),
        ("unequal_messages", "Messages that differ from what was written.", counts.unequal),
        ("dropped_turns", "Turns whose reasoning the template dropped.", counts.dropped),
        ("dropped_tokens", "Tokens of that reasoning.", counts.dropped_tokens),
        ("seals", "Sealed names of turns that named one.", counts.opened_seals),
        ("ignored_seals", "Sealed names of turns without effect.", counts.ignored_seals),
    ):
        yield CounterMetricFamily(f"ostinato_ledger_{name}", text, value)


def tier_metrics(seen: TierCounts | None) -> Iterator[Metric]:
    """Yield the tiers' metrics; none without tiers."""
    if seen is None:
        return
    for name, text, label, counts in (
        ("loaded_tokens", "Prompt tokens loaded from a tier.", "tier", seen.loaded_tokens),
        ("load_faults", "Loads that ended early, by reason.", "reason", seen.load_faults),
        ("stores", "Extents to write, by result.", "result", seen.stores),
    ):
        ordered = dict(sorted(counts.items()))
        yield _family(CounterMetricFamily, f"ostinato_tier_{name}", text, [label], ordered)
    for name, text, value in (
        ("load_seconds", "Total time of loads.", seen.load_seconds),
        ("cheaper_to_compute", "Loads skipped: computing was faster.", seen.num_cheaper),
        ("left_out", "Prefixes not written: too many waited.", seen.num_left_out),
    ):
        yield CounterMetricFamily(f"ostinato_tier_{name}", text, value)
    for name, text, value in (
        ("loading_requests", "Requests waiting for a load.", seen.num_loading),
        ("waiting_stores", "Prefixes waiting to be written.", seen.num_waiting),
    ):
        yield GaugeMetricFamily(f"ostinato_tier_{name}", text, value)
    yield _family(
        GaugeMetricFamily,
        "ostinato_tier_on",
        "1 if a tier is on, 0 if it is read-only or off.",
        ["tier"],
        {tier.tier: tier.state == "on" for tier in seen.tiers},
    )
    sizes = {"used": "num_bytes", "limit": "limit_bytes", "leased": "leased_bytes"}
    yield _family(
        GaugeMetricFamily,
        "ostinato_tier_bytes",
        "Bytes a tier uses, may use, and has under leases.",
        ["tier", "kind"],
        {(t.tier, kind): getattr(t, field) for t in seen.tiers for kind, field in sizes.items()},
    )
    for name, text, field in (
        ("written_bytes", "Bytes written to a tier.", "written_bytes"),
        ("damaged", "Places found damaged when a tier was opened, or unreadable.", "num_damaged"),
    ):
        samples = {tier.tier: getattr(tier, field) for tier in seen.tiers}
        yield _family(CounterMetricFamily, f"ostinato_tier_{name}", text, ["tier"], samples)


def _step_times(seen: StepTimes) -> Iterator[Metric]:
    text = "Steps whose time was predicted before they ran."
    yield CounterMetricFamily("ostinato_predicted_steps", text, seen.num_steps)
    yield _family(
        CounterMetricFamily,
        "ostinato_step_seconds",
        "Time of those steps, as measured and as predicted.",
        ["time"],
        {"measured": seen.measured_s, "predicted": seen.predicted_s},
    )
    prices = seen.prices
    yield _family(
        GaugeMetricFamily,
        "ostinato_step_price_seconds",
        "Learned price of a step, and of each token, key and pair of a query and a key in it.",
        ["unit"],
        {}
        if prices is None
        else {
            "step": prices.fixed_s,
            "token": prices.token_s,
            "key": prices.key_s,
            "pair": prices.pair_s,
        },
    )


def _scheduling(seen: Snapshot) -> Iterator[Metric]:
    stats = seen.scheduler
    for name, text, value in (
        ("running_sequences", "Sequences that hold blocks.", seen.num_running),
        ("waiting_sequences", "Sequences in the queue.", seen.num_waiting),
    ):
        yield GaugeMetricFamily(f"ostinato_{name}", text, value)
    for name, text, value in (
        ("preemptions", "Preemptions of running sequences.", stats.num_preemptions),
        ("steps", "Steps that ran, failed ones included.", stats.num_steps),
        ("failed_steps", "Steps whose forward pass raised.", stats.num_failed_steps),
        ("decoded_tokens", "Generated tokens fed to the model.", stats.computed_output_tokens),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value)

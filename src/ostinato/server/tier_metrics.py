"""Metrics of tiers, and of the ghost: estimates for other cache sizes and policies."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ostinato.engine.tiered_cache import TierCounts
from ostinato.observe.counters import GhostEstimate


def tier_metrics(seen: TierCounts | None) -> Iterable[Metric]:
    """Yield the tiers' metrics; none without tiers."""
    if seen is None:
        return
    yield _counter("tier_loaded_tokens", "Prompt tokens loaded from a tier.", "tier",
                   seen.loaded_tokens)  # fmt: skip
    yield _counter("tier_load_faults", "Loads that ended early, by reason.", "reason",
                   seen.load_faults)  # fmt: skip
    yield _counter("tier_stores", "Extents to write, by result.", "result",
                   seen.stores)  # fmt: skip
    for name, text, value in (
        ("tier_load_seconds", "Total time of loads.", seen.load_seconds),
        (
            "tier_cheaper_to_compute",
            "Loads skipped: computing was faster.",
            seen.num_cheaper,
        ),
        (
            "tier_left_out",
            "Prefixes not written: too many waited.",
            seen.num_left_out,
        ),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value=value)
    for name, text, value in (
        ("tier_loading_requests", "Requests waiting for a load.", seen.num_loading),
        ("tier_waiting_stores", "Prefixes waiting to be written.", seen.num_waiting),
    ):
        yield GaugeMetricFamily(f"ostinato_{name}", text, value=value)
    state = GaugeMetricFamily(
        "ostinato_tier_on", "1 if a tier is on, 0 if it is read-only or off.", labels=["tier"]
    )
    size = GaugeMetricFamily(
        "ostinato_tier_bytes", "Bytes a tier uses, may use, and has under leases.",
        labels=["tier", "kind"],
    )  # fmt: skip
    written = CounterMetricFamily(
        "ostinato_tier_written_bytes", "Bytes written to a tier.", labels=["tier"]
    )
    damaged = CounterMetricFamily(
        "ostinato_tier_damaged", "Places found damaged when a tier was opened.", labels=["tier"]
    )
    for tier in seen.tiers:
        state.add_metric([tier.tier], tier.state == "on")
        for kind, value in (
            ("used", tier.num_bytes), ("limit", tier.limit_bytes), ("leased", tier.leased_bytes)
        ):  # fmt: skip
            size.add_metric([tier.tier, kind], value)
        written.add_metric([tier.tier], tier.written_bytes)
        damaged.add_metric([tier.tier], tier.num_damaged)
    yield from (state, size, written, damaged)


def _counter(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"ostinato_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def ghost_metrics(ghosts: Sequence[GhostEstimate]) -> Iterable[Metric]:
    """Yield gauges per multiple of the memory and per policy, once there are estimates."""
    ratios = GaugeMetricFamily(
        "ostinato_ghost_hit_ratio",
        "Estimated hit rate, in looked-up tokens, of a cache of so many times the memory, or of "
        "another policy, since the start.",
        labels=["memory", "policy"],
    )
    ends = GaugeMetricFamily(
        "ostinato_ghost_interval_hit_ratio",
        "Bounds of the estimate's 95 % confidence interval.",
        labels=["memory", "policy", "end"],
    )
    sampled = GaugeMetricFamily(
        "ostinato_ghost_sampled_blocks",
        "Sampled blocks behind the estimate.",
        labels=["memory", "policy"],
    )
    requests = GaugeMetricFamily(
        "ostinato_ghost_requests",
        "Requests behind the estimate.",
        labels=["memory", "policy"],
    )
    later = GaugeMetricFamily(
        "ostinato_ghost_later_requests",
        "Requests since the last one behind the estimate.",
        labels=["memory", "policy"],
    )
    for ghost in ghosts:
        labels = [f"{ghost.memory:g}", ghost.policy]
        ratios.add_metric(labels, ghost.hit_ratio)
        ends.add_metric([*labels, "low"], ghost.low)
        ends.add_metric([*labels, "high"], ghost.high)
        sampled.add_metric(labels, ghost.num_sampled)
        requests.add_metric(labels, ghost.num_requests)
        later.add_metric(labels, ghost.num_later_requests)
    yield from (ratios, ends, sampled, requests, later)


def ghost_rows(ghosts: Sequence[GhostEstimate]) -> list[dict[str, Any]]:
    """Return estimates as JSON."""
    return [
        {
            "memory": ghost.memory,
            "num_blocks": ghost.num_blocks,
            "policy": ghost.policy,
            "hit_ratio": round(ghost.hit_ratio, 6),
            "low": round(ghost.low, 6),
            "high": round(ghost.high, 6),
            "num_requests": ghost.num_requests,
            "num_later_requests": ghost.num_later_requests,
            "num_sampled_blocks": ghost.num_sampled,
        }
        for ghost in ghosts
    ]

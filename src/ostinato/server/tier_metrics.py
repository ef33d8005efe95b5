"""Metrics of the tiers."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ostinato.engine.tiered_cache import TierCounts


def tier_metrics(seen: TierCounts | None) -> Iterable[Metric]:
    """Lay the counts out; nothing without tiers."""
    if seen is None:
        return
    yield _counter("tier_loaded_tokens", "Prompt tokens loaded from a tier.", "tier",
                   seen.loaded_tokens)  # fmt: skip
    yield _counter("tier_load_faults", "Loads that ended early, by reason.", "reason",
                   seen.load_faults)  # fmt: skip
    yield _counter("tier_stores", "Extents that were to be written, by result.", "result",
                   seen.stores)  # fmt: skip
    for name, text, value in (
        ("tier_load_seconds", "Time that loads took, all together.", seen.load_seconds),
        ("tier_cheaper_to_compute", "Loads not begun: computing was faster.", seen.num_cheaper),
        ("tier_left_out", "Prefixes not written: too many waited.", seen.num_left_out),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value=value)
    for name, text, value in (
        ("tier_loading_requests", "Requests that wait for a load.", seen.num_loading),
        ("tier_waiting_stores", "Prefixes that wait to be written.", seen.num_waiting),
    ):
        yield GaugeMetricFamily(f"ostinato_{name}", text, value=value)
    state = GaugeMetricFamily(
        "ostinato_tier_on", "1 if a tier is on, 0 if it is read-only or off.", labels=["tier"]
    )
    size = GaugeMetricFamily(
        "ostinato_tier_bytes", "What a tier occupies, may occupy, and has under leases.",
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

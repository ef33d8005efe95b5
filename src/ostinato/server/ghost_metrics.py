"""Metrics of the ghost: estimates for other cache sizes and policies."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from ostinato.observe.counters import GhostEstimate


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

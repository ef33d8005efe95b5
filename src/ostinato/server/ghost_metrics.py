"""Estimates for other sizes and policies, as metrics."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from ostinato.observe.counters import GhostEstimate


def ghost_metrics(ghosts: Sequence[GhostEstimate]) -> Iterable[Metric]:
    """Lay estimates out: gauges per multiple of the memory and policy; none before the first."""
    ratios = GaugeMetricFamily(
        "ostinato_ghost_hit_ratio",
        "Estimated share of looked-up tokens that a cache of so many times the memory, or of "
        "another policy, would have found since the start.",
        labels=["memory", "policy"],
    )
    ends = GaugeMetricFamily(
        "ostinato_ghost_interval_hit_ratio",
        "Ends of the interval that the estimate is within, in 95 % of all samples.",
        labels=["memory", "policy", "end"],
    )
    sampled = GaugeMetricFamily(
        "ostinato_ghost_sampled_blocks",
        "Sampled blocks that the estimate rests on.",
        labels=["memory", "policy"],
    )
    requests = GaugeMetricFamily(
        "ostinato_ghost_requests",
        "Requests of the traffic that the estimate rests on.",
        labels=["memory", "policy"],
    )
    later = GaugeMetricFamily(
        "ostinato_ghost_later_requests",
        "Requests that came since the last that the estimate rests on.",
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
    """Lay estimates out for an answer in JSON."""
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

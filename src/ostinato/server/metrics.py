"""Prometheus metrics.

Names follow Prometheus's conventions: the prefix ``ostinato_``, the unit as suffix, ``_total`` for
counters. Counters of cache and scheduler are read from a snapshot at each scrape; those of requests
are updated as they happen. Each application has its own registry.

No label holds text from clients, and none a tenant's name unless ``metrics_tenant_names`` is set:
otherwise tenants are ``tenant-1``, ``tenant-2``, in order of their first request.
"""

from collections.abc import Iterable
from itertools import count

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client import Histogram as TimeHistogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

import ostinato
from ostinato.engine.snapshot import Snapshot
from ostinato.observe.counters import StateCounts
from ostinato.observe.histogram import Histogram
from ostinato.server.accounts import PromptTokens
from ostinato.server.call import GenerateCall
from ostinato.server.callers import Caller
from ostinato.server.errors import ApiError
from ostinato.server.http_meter import Answer
from ostinato.server.observer import Observer, ServedRequest
from ostinato.server.tenant_usage import TenantUsage
from ostinato.server.tier_metrics import ghost_metrics, tier_metrics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Histogram bounds of latencies."""

GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Histogram bounds of the time between two tokens."""


def hit_share_label(share: float) -> str:
    """Return the label for a hit share; only four, since each costs a histogram."""
    if share <= 0:
        return "none"
    if share < 0.5:
        return "below_half"
    return "half_or_more" if share < 0.9 else "nearly_all"


class ServerMetrics(Observer):
    """An observer that counts requests, and the text of ``/metrics``.

    Attributes:
        registry: This application's registry.
    """

    def __init__(self, usage: TenantUsage, tenant_names: bool = False) -> None:
        """Start all counters at zero.

        Args:
            usage: Usage counters of the tenants.
            tenant_names: Whether labels may name tenants.
        """
        self.registry = CollectorRegistry()
        self._snapshot: Snapshot | None = None
        self._requests = Counter(
            "ostinato_requests",
            "Requests that ended, by the finish reason of their first continuation, or error, or "
            "gone if the client disconnected.",
            ["finish_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "ostinato_refused_requests",
            "Requests refused at admission, by status: 429 for a full queue or a limit.",
            ["status"],
            registry=self.registry,
        )
        self._generated = Counter(
            "ostinato_generated_tokens",
            "Tokens generated for requests that ended.",
            registry=self.registry,
        )
        self._first_token = TimeHistogram(
            "ostinato_time_to_first_token_seconds",
            "Time from a request's arrival to its first token, by the share of its prompt that "
            "hit.",
            ["hit_share"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._gaps = TimeHistogram(
            "ostinato_inter_token_latency_seconds",
            "Time between two outputs of a request.",
            buckets=GAPS,
            registry=self.registry,
        )
        self._queue = TimeHistogram(
            "ostinato_queue_time_seconds",
            "Time from a request's arrival at the engine to its first step.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._duration = TimeHistogram(
            "ostinato_request_duration_seconds",
            "Time from a request's arrival to its end.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._http = Counter(
            "ostinato_http_requests",
            "Answers over HTTP.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._http_time = TimeHistogram(
            "ostinato_http_request_duration_seconds",
            "Time from a request over HTTP to its last byte.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(self))
        self.registry.register(_TenantCollector(usage, tenant_names))
        ProcessCollector(registry=self.registry)

    @property
    def snapshot(self) -> Snapshot | None:
        """The last reading of the engine."""
        return self._snapshot

    def page(self, snapshot: Snapshot) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._snapshot = snapshot
        return generate_latest(self.registry)

    def answered(self, answer: Answer) -> None:
        """Count an HTTP response."""
        self._http.labels(answer.method, answer.route, str(answer.status)).inc()
        self._http_time.labels(answer.route).observe(answer.seconds)

    def first_token(self, record: ServedRequest) -> None:
        """Observe the time to first token."""
        took_s = record.time_to_first_token_s
        if record.output is None or took_s is None:
            return
        share = PromptTokens.of(record.output).hit_share
        self._first_token.labels(hit_share_label(share)).observe(took_s)
        queue_s = record.output.timings.queue_time
        if queue_s is not None:
            self._queue.observe(queue_s)

    def finished(self, record: ServedRequest) -> None:
        """Count its finish reason and generated tokens."""
        self._requests.labels(_finish_reason(record)).inc()
        for gap_s in record.gaps_s:
            self._gaps.observe(gap_s)
        if record.output is not None:
            self._generated.inc(sum(len(part.token_ids) for part in record.output.outputs))
            total_s = record.output.timings.total_time
            if total_s is not None:
                self._duration.observe(total_s)

    def refused(self, caller: Caller, call: GenerateCall, error: ApiError) -> None:
        """Count a refusal."""
        self._refused.labels(str(error.status)).inc()


def _finish_reason(record: ServedRequest) -> str:
    if record.error is not None:
        return "error"
    if record.is_gone or record.output is None:
        return "gone"
    return record.output.outputs[0].finish_reason or "gone"


class _EngineCollector(Collector):
    """Collects the metrics of a snapshot."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        info = InfoMetricFamily("ostinato_build", "Version of Ostinato.")
        info.add_metric([], {"version": ostinato.__version__})
        yield info
        seen = self._metrics.snapshot
        if seen is not None:
            path = InfoMetricFamily(
                "ostinato_compute_path", "How steps are computed, and why not faster."
            )
            path.add_metric([], seen.compute_path.fields())
            yield path
            yield from _prompt_tokens(seen)
            yield from _blocks(seen)
            yield from _states(seen)
            yield from ghost_metrics(seen.cache.ghosts)
            yield from _audits(seen)
            yield from tier_metrics(seen.tiers)
            yield from _scheduling(seen)


class _TenantCollector(Collector):
    """Collects the usage counters, tenant by tenant."""

    def __init__(self, usage: TenantUsage, names: bool) -> None:
        self._usage = usage
        self._names = names
        self._numbers: dict[str, int] = {}
        self._next = count(1)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "ostinato_tenant_prompt_tokens",
            "Prompt tokens of a tenant's requests that hit the cache, or missed it.",
            labels=["tenant", "result"],
        )
        accounts = self._usage.accounts.copy()
        self._numbers = {  # except erased tenants
            name: self._numbers.get(name) or next(self._next) for name in accounts
        }
        for name, account in accounts.items():
            family.add_metric([self._label(name), "hit"], account.prompt.hit)
            family.add_metric([self._label(name), "miss"], account.prompt.computed)
        yield family

    def _label(self, name: str) -> str:
        if self._names:
            return name
        return f"tenant-{self._numbers[name]}"


def _audits(seen: Snapshot) -> Iterable[Metric]:
    audit = seen.audit
    hits = CounterMetricFamily(
        "ostinato_audited_hits",
        "Hits that were recomputed and compared bit by bit: same, different, or evicted before "
        "their turn.",
        labels=["result"],
    )
    for result in ("same", "different", "gone"):
        hits.add_metric([result], getattr(audit, f"num_{result}"))
    yield hits
    yield CounterMetricFamily(
        "ostinato_quarantined_blocks",
        "Blocks removed because an audit found them, or a block before them, wrong.",
        value=audit.num_removed,
    )


def _prompt_tokens(seen: Snapshot) -> Iterable[Metric]:
    cache, scheduler = seen.cache, seen.scheduler
    origin = CounterMetricFamily(
        "ostinato_prompt_tokens",
        "Prompt tokens by the origin of their KV: computed by the model; cached in "
        "whole blocks; copied out of a block; waited for, computed by another request meanwhile.",
        labels=["origin"],
    )
    origin.add_metric(["computed"], scheduler.computed_prompt_tokens)
    origin.add_metric(["cached"], cache.first.shared_tokens - scheduler.waited_prompt_tokens)
    origin.add_metric(["copied"], cache.first.copied_tokens)
    origin.add_metric(["waited"], scheduler.waited_prompt_tokens)
    yield origin
    looked_up = CounterMetricFamily(
        "ostinato_looked_up_tokens",
        "Tokens looked up at admission, of new requests and of preempted ones that "
        "return, and whether they hit.",
        labels=["request", "result"],
    )
    for name, counts in (("new", cache.first), ("preempted", cache.preempted)):
        looked_up.add_metric([name, "hit"], counts.hit_tokens)
        looked_up.add_metric([name, "miss"], counts.query_tokens - counts.hit_tokens)
    yield looked_up


def _blocks(seen: Snapshot) -> Iterable[Metric]:
    cache = seen.cache
    blocks = GaugeMetricFamily(
        "ostinato_blocks",
        "Blocks by state: unused (free, without content), private (of one request), held (cached "
        "and read by live requests), evictable (cached, without a reader).",
        labels=["state"],
    )
    for state, number in seen.states.items():
        blocks.add_metric([state.name.lower()], number)
    yield blocks
    yield GaugeMetricFamily(
        "ostinato_leased_blocks", "Blocks that leases hold.", value=seen.num_leased_blocks
    )
    for name, text, value in (
        ("published_blocks", "Blocks that became findable.", cache.published_blocks),
        ("duplicate_blocks", "Published blocks that were cached already.", cache.duplicate_blocks),
        ("sealed_tails", "Partial blocks that became findable.", cache.sealed_tails),
        ("evicted_blocks", "Cached blocks that were evicted.", cache.evicted_blocks),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value=value)
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


def _states(seen: Snapshot) -> Iterable[Metric]:
    states = seen.cache.states or StateCounts()
    slots = GaugeMetricFamily(
        "ostinato_state_slots",
        "State slots by use: running (of one sequence, or of a checkpoint that it reads), "
        "checkpoint (kept for a prefix), all.",
        labels=["use"],
    )
    slots.add_metric(["running"], states.num_running)
    slots.add_metric(["checkpoint"], states.num_checkpoints)
    slots.add_metric(["all"], states.num_slots)
    yield slots
    for name, text, value in (
        ("kept", "Checkpoints kept for prefixes.", states.num_kept),
        ("evicted", "Checkpoints evicted, for room or with their blocks.", states.num_evicted),
        ("hit", "Requests that started from a checkpoint.", states.num_hits),
    ):
        yield CounterMetricFamily(f"ostinato_checkpoints_{name}", text, value=value)
    yield CounterMetricFamily(
        "ostinato_state_tokens_computed_again",
        "Tokens whose blocks hit, recomputed because their state was not kept.",
        value=states.num_again_tokens,
    )


def _scheduling(seen: Snapshot) -> Iterable[Metric]:
    stats = seen.scheduler
    yield GaugeMetricFamily(
        "ostinato_running_sequences", "Sequences that hold blocks.", value=seen.num_running
    )
    yield GaugeMetricFamily(
        "ostinato_waiting_sequences", "Sequences in the queue.", value=seen.num_waiting
    )
    for name, text, value in (
        ("preemptions", "Preemptions of running sequences.", stats.num_preemptions),
        ("steps", "Steps that ran, failed ones included.", stats.num_steps),
        ("failed_steps", "Steps whose forward pass raised.", stats.num_failed_steps),
        (
            "decoded_tokens",
            "Generated tokens fed to the model.",
            stats.computed_output_tokens,
        ),
    ):
        yield CounterMetricFamily(f"ostinato_{name}", text, value=value)


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

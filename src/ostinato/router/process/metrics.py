"""Prometheus metrics of a fleet."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from ostinato.router.policy import WorkerState
from ostinato.router.process.decisions import DecisionRecord
from ostinato.router.process.worker_pool import WorkerPool

_OVERHEAD_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class FleetMetrics:
    """Counters of one router process, in a registry of their own.

    Attributes:
        retries: Attempts without an answer.
        broken_off: Responses that broke off.
    """

    def __init__(self, fleet: WorkerPool) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry()
        count, gauge = self._counter, self._gauge
        self._requests = count("requests", "Requests by end.", "worker", "status")
        self._decisions = count("decisions", "Decisions by the worker's state.", "worker", "state")
        self._prompt = count("prompt_tokens", "Tokens of computed prompts.", "worker")
        self._expected = count(
            "expected_cached_tokens", "Expected hits of computed prompts.", "worker"
        )
        self._reported = count("reported_cached_tokens", "Hits that workers report.", "worker")
        self._checked = count(
            "checked_cached_tokens", "Expected hits where hits are reported.", "worker"
        )
        self.retries = count("retries", "Attempts without an answer.", "worker")
        self.broken_off = count("broken_off", "Responses that broke off.", "worker")
        self._tokenizer = count("tokenized_prompts", "Prompts by source of their tokens.", "how")
        self._overhead = Histogram(
            "ostinato_router_overhead_seconds",
            "From a request's head to its decision, its body and tokens included.",
            buckets=_OVERHEAD_S,
            registry=self._registry,
        )
        self._well = gauge("worker_up", "Whether the worker receives requests.", "worker")
        self._live = gauge("worker_requests", "Unfinished requests.", "worker")
        self._load = gauge("worker_load_tokens", "Assigned, unfinished work.", "worker")
        self._cached = gauge("worker_cached_tokens", "Tokens known to be cached.", "worker")
        self._lost = gauge("worker_lost_batches", "Event batches lost permanently.", "worker")
        self._state = gauge("worker_state", "1 for how the cache is known.", "worker", "state")

    def tokenized(self, source: str) -> None:
        """Count a prompt by the source of its tokens."""
        self._tokenizer.labels(source).inc()

    def chosen(self, worker: str, record: DecisionRecord | None, overhead_s: float) -> None:
        """Count a decision."""
        self._overhead.observe(overhead_s)
        if record is not None:
            self._decisions.labels(worker, record.decision.state.value).inc()

    def ended(self, record: DecisionRecord, was_computed: bool) -> None:
        """Count a request that ended, and its prompt if that was computed."""
        decision = record.decision
        self._requests.labels(decision.worker, record.status).inc()
        if was_computed:
            self._prompt.labels(decision.worker).inc(decision.num_tokens)
            self._expected.labels(decision.worker).inc(decision.expected_cached_tokens)
        if record.cached_tokens is not None:
            self._reported.labels(decision.worker).inc(record.cached_tokens)
            self._checked.labels(decision.worker).inc(decision.expected_cached_tokens)

    def page(self) -> bytes:
        """Return everything in Prometheus's text format."""
        for each in (self._well, self._live, self._load, self._cached, self._lost, self._state):
            each.clear()
        for status in self._fleet.router.workers():
            worker = self._fleet.workers[status.name]
            self._well.labels(status.name).set(worker.is_well and not worker.is_draining)
            self._live.labels(status.name).set(worker.num_live)
            self._load.labels(status.name).set(status.load_tokens)
            self._cached.labels(status.name).set(status.cached_tokens)
            self._lost.labels(status.name).set(status.lost_batches)
            for state in WorkerState:
                self._state.labels(status.name, state.value).set(state is status.state)
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ostinato_router_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"ostinato_router_{name}", text, labels, registry=self._registry)

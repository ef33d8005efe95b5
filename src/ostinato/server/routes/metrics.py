"""Prometheus metrics of requests, and ``/metrics``.

Names follow Prometheus's conventions: the prefix ``ostinato_``, the unit as suffix, ``_total`` for
counters. Counters of cache and scheduler are read from a snapshot at each scrape; those of requests
are updated as they happen. Each application has its own registry.

No label holds text from clients, and none a tenant's name unless ``metrics_tenant_names`` is set:
otherwise tenants are ``tenant-1``, ``tenant-2``, in order of their first request.
"""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ostinato
from ostinato.engine.loop.snapshot import Snapshot
from ostinato.server.access.accounts import PromptTokens
from ostinato.server.access.callers import ADMIN_ONLY, Caller
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState, StateDep
from ostinato.server.telemetry.engine_metrics import engine_metrics
from ostinato.server.telemetry.observer import Observer, ServedRequest
from ostinato.server.telemetry.tenant_usage import TenantUsage

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Histogram bounds of latencies."""

GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Histogram bounds of the time between two tokens."""

_UNROUTED = "(none)"
"""The route of responses without one."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

router = APIRouter(tags=["metrics"], dependencies=ADMIN_ONLY)


def install(app: FastAPI, state: ServerState) -> None:
    """Add metrics to an application, and count all of its responses."""
    app.state.metrics = metrics = ServerMetrics(state.usage, state.config.metrics_tenant_names)
    state.observers.append(metrics)
    app.add_middleware(HttpMetrics, metrics=metrics)


@router.get("/metrics", response_class=Response)
async def metrics_page(request: Request, state: StateDep) -> Response:
    """Return all metrics in Prometheus's text format, even while a long prompt is computed."""
    metrics: ServerMetrics = request.app.state.metrics
    return Response(metrics.page(await state.snapshots.look()), media_type=CONTENT_TYPE_LATEST)


def hit_share_label(share: float) -> str:
    """Return the label for a hit share; only four, since each costs a histogram."""
    if share <= 0:
        return "none"
    if share < 0.5:
        return "below_half"
    return "half_or_more" if share < 0.9 else "nearly_all"


class ServerMetrics(Observer, Collector):
    """An observer that counts requests, and the text of ``/metrics``.

    Attributes:
        registry: This application's registry.
    """

    def __init__(self, usage: TenantUsage, tenant_names: bool = False) -> None:
        """Start all counters at zero; labels name tenants only with ``tenant_names``."""
        self.registry = CollectorRegistry()
        self._usage = usage
        self._names_tenants = tenant_names
        self._tenant_numbers: dict[str, int] = {}
        self._next_number = count(1)
        self._snapshot: Snapshot | None = None
        counter = partial(Counter, registry=self.registry)
        seconds = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self._requests = counter(
            "ostinato_requests",
            "Requests that ended, by the finish reason of their first continuation, or error, or "
            "gone if the client disconnected.",
            ["finish_reason"],
        )
        self._refused = counter(
            "ostinato_refused_requests",
            "Requests refused at admission, by status: 429 for a full queue or a limit.",
            ["status"],
        )
        self._generated = counter(
            "ostinato_generated_tokens", "Tokens generated for requests that ended."
        )
        self._ignored_fields = counter(
            "ostinato_ignored_fields",
            "Fields of requests that this server does not know, and tools left out of prompts.",
            ["path"],
        )
        self._set_aside = counter(
            "ostinato_set_aside",
            "Texts of prompts that a constant took the place of, by the rule that names them.",
            ["rule"],
        )
        self._late_rules = counter(
            "ostinato_set_aside_timeouts",
            "Prompts in which a rule was not tried to the end, since it took too long.",
            ["rule"],
        )
        self._first_token = seconds(
            "ostinato_time_to_first_token_seconds",
            "Time from a request's arrival to its first token, by the share of its prompt that "
            "hit.",
            ["hit_share"],
        )
        self._gaps = seconds(
            "ostinato_inter_token_latency_seconds",
            "Time between two outputs of a request.",
            buckets=GAPS,
        )
        self._queue = seconds(
            "ostinato_queue_time_seconds",
            "Time from a request's arrival at the engine to its first step.",
        )
        self._duration = seconds(
            "ostinato_request_duration_seconds", "Time from a request's arrival to its end."
        )
        self._http = counter(
            "ostinato_http_requests", "Answers over HTTP.", ["method", "route", "status"]
        )
        self._http_time = seconds(
            "ostinato_http_request_duration_seconds",
            "Time from a request over HTTP to its last byte.",
            ["route"],
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def page(self, snapshot: Snapshot) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._snapshot = snapshot
        return generate_latest(self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP response."""
        self._http.labels(method, route, str(status)).inc()
        self._http_time.labels(route).observe(seconds)

    def ignored_fields(self, path: str, number: int) -> None:
        """Count fields of a request that were ignored."""
        self._ignored_fields.labels(path).inc(number)

    def set_aside(self, counts: Mapping[str, int], late: Iterable[str]) -> None:
        """Count what rules replaced in a prompt, and the rules that took too long."""
        for rule, number in counts.items():
            self._set_aside.labels(rule).inc(number)
        for rule in late:
            self._late_rules.labels(rule).inc()

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
        self._requests.labels(record.outcome).inc()
        for gap_s in record.gaps_s:
            self._gaps.observe(gap_s)
        self._generated.inc(record.num_generated)
        if record.output is not None:
            total_s = record.output.timings.total_time
            if total_s is not None:
                self._duration.observe(total_s)

    def refused(self, caller: Caller, call: GenerateCall, error: ApiError) -> None:
        """Count a refusal."""
        self._refused.labels(str(error.status)).inc()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that are read at each scrape."""
        yield InfoMetricFamily(
            "ostinato_build", "Version of Ostinato.", {"version": ostinato.__version__}
        )
        if self._snapshot is not None:
            yield from engine_metrics(self._snapshot)
        yield self._tenants()

    def _tenants(self) -> Metric:
        """Return the hits and misses of each tenant, by its name or number."""
        family = CounterMetricFamily(
            "ostinato_tenant_prompt_tokens",
            "Prompt tokens of a tenant's requests that hit the cache, or missed it.",
            labels=["tenant", "result"],
        )
        accounts = self._usage.accounts.copy()
        self._tenant_numbers = {  # except erased tenants
            name: self._tenant_numbers.get(name) or next(self._next_number) for name in accounts
        }
        for name, account in accounts.items():
            label = name if self._names_tenants else f"tenant-{self._tenant_numbers[name]}"
            family.add_metric([label, "hit"], account.prompt.hit)
            family.add_metric([label, "miss"], account.prompt.computed)
        return family


class HttpMetrics:
    """Middleware that counts HTTP responses.

    The outermost one, so that requests refused before any route are counted as well. Routes are
    counted by their template, never by the client's path; a client that disconnects before the
    response has the status 499, as in nginx.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        """Wrap an application."""
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin_s = 499, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            route = getattr(scope.get("route"), "path", _UNROUTED)
            self._metrics.answered(method, route, status, time.perf_counter() - begin_s)

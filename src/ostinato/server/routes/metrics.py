"""Prometheus metrics of requests, and ``/metrics``.

Names follow Prometheus's conventions: the prefix ``ostinato_``, the unit as suffix, ``_total`` for
counters. Counters of cache and scheduler are read from a snapshot at each scrape; those of requests
are updated as they happen. Each application has its own registry.

No label holds text from clients, and none a tenant's name unless ``metrics_tenant_names`` is set:
otherwise tenants are ``tenant-1``, ``tenant-2``, in order of their first request.
"""

import time
from collections.abc import Iterable, Mapping
from itertools import count

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ostinato
from ostinato.engine.loop.snapshot import Snapshot
from ostinato.server.access.callers import ADMIN_ONLY, Caller
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState, StateDep
from ostinato.server.telemetry import request_figures as figures
from ostinato.server.telemetry.engine_figures import engine_metrics
from ostinato.server.telemetry.observer import Observer, ServedRequest
from ostinato.server.telemetry.tenant_usage import TenantUsage

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
        self._of = {each: each.registered(self.registry) for each in figures.COUNTED}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def page(self, snapshot: Snapshot) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._snapshot = snapshot
        return generate_latest(self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP response."""
        self._of[figures.HTTP].labels(method, route, str(status)).inc()
        self._of[figures.HTTP_TIME].labels(route).observe(seconds)

    def ignored_fields(self, path: str, number: int) -> None:
        """Count fields of a request that were ignored."""
        self._of[figures.IGNORED_FIELDS].labels(path).inc(number)

    def set_aside(self, counts: Mapping[str, int], late: Iterable[str]) -> None:
        """Count what rules replaced in a prompt, and the rules that took too long."""
        for rule, number in counts.items():
            self._of[figures.SET_ASIDE].labels(rule).inc(number)
        for rule in late:
            self._of[figures.LATE_RULES].labels(rule).inc()

    def first_token(self, record: ServedRequest) -> None:
        """Observe the time to first token."""
        took_s = record.time_to_first_token_s
        if record.output is None or record.prompt is None or took_s is None:
            return
        share = hit_share_label(record.prompt.hit_share)
        self._of[figures.FIRST_TOKEN].labels(share).observe(took_s)
        queue_s = record.output.timings.queue_time
        if queue_s is not None:
            self._of[figures.QUEUE].observe(queue_s)

    def finished(self, record: ServedRequest) -> None:
        """Count its finish reason and generated tokens."""
        self._of[figures.REQUESTS].labels(record.outcome).inc()
        for gap_s in record.gaps_s:
            self._of[figures.OUTPUT_GAPS].observe(gap_s)
        self._of[figures.GENERATED].inc(record.num_generated)
        if record.output is not None and record.prompt is not None:
            self._of[figures.BEAMS].inc(record.output.num_beam_tokens)
            endpoint, prompt = record.call.endpoint, record.prompt
            self._of[figures.ROUTES].labels(endpoint, "hit").inc(prompt.hit)
            self._of[figures.ROUTES].labels(endpoint, "miss").inc(prompt.computed)
            total_s = record.output.timings.total_time
            if total_s is not None:
                self._of[figures.DURATION].observe(total_s)

    def refused(self, caller: Caller, call: GenerateCall, error: ApiError) -> None:
        """Count a refusal."""
        self._of[figures.REFUSED].labels(str(error.status)).inc()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that are read at each scrape."""
        yield figures.BUILD.family({"version": ostinato.__version__})
        if self._snapshot is not None:
            yield from engine_metrics(self._snapshot)
        yield self._tenants()

    def _tenants(self) -> Metric:
        """Return the hits and misses of each tenant, by its name or number."""
        accounts = self._usage.accounts.copy()
        self._tenant_numbers = {  # except erased tenants
            name: self._tenant_numbers.get(name) or next(self._next_number) for name in accounts
        }
        hits = dict[tuple[str, ...], float]()
        for name, account in accounts.items():
            label = name if self._names_tenants else f"tenant-{self._tenant_numbers[name]}"
            hits[label, "hit"] = account.prompt.hit
            hits[label, "miss"] = account.prompt.computed
        return figures.TENANTS.family(hits)


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

"""``/metrics``.

With keys, only the administrator may read it, since it shows the load of all tenants.
"""

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ostinato.engine.snapshot import Snapshot, take_snapshot
from ostinato.server.callers import Caller, CallerOfRequest
from ostinato.server.engine_watch import EngineWatch
from ostinato.server.errors import ApiError
from ostinato.server.http_meter import HttpMeter
from ostinato.server.metrics import ServerMetrics
from ostinato.server.state import ServerState

router = APIRouter(tags=["metrics"])


def install(app: FastAPI, state: ServerState) -> None:
    """Add metrics to an application, and count all of its responses."""
    metrics = ServerMetrics(state.usage, state.config.metrics_tenant_names)
    state.observers.append(metrics)
    app.state.metrics = metrics
    app.state.snapshots = EngineWatch(state.llm, take_snapshot)
    app.add_middleware(HttpMeter, count=metrics.answered)


@router.get("/metrics", response_class=Response)
async def metrics_page(request: Request, caller: CallerOfRequest) -> Response:
    """Return all metrics in Prometheus's text format, even while a long prompt is computed."""
    check_administrator(caller)
    metrics: ServerMetrics = request.app.state.metrics
    snapshots: EngineWatch[Snapshot] = request.app.state.snapshots
    return Response(metrics.page(await snapshots.look()), media_type=CONTENT_TYPE_LATEST)


def check_administrator(caller: Caller) -> None:
    """Refuse callers that may not administer.

    Raises:
        ApiError: The caller may not administer (403).
    """
    if not caller.may_administer:
        raise ApiError(
            403,
            "metrics cover all tenants: send the administrator's key",
            kind="permission_error",
            code="not_an_administrator",
        )

"""``/health`` and ``/ready``."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import ostinato
from ostinato.server.callers import Administrator
from ostinato.server.state import ServerState

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the event loop goes round; whatever the engine computes meanwhile."""
    return {"status": "ok"}


@router.post("/ping", include_in_schema=False)
@router.get("/ping")
async def ping() -> dict[str, str]:
    """Say the same under the name that SageMaker and vLLM's clients ask for."""
    return await health()


@router.get("/load")
async def load(request: Request, administrator: Administrator) -> dict[str, int]:
    """Say how many sequences are running or waiting, as vLLM does."""
    state: ServerState = request.app.state.server
    return {"server_load": state.num_live}


@router.get("/server_info")
async def server_info(request: Request, administrator: Administrator) -> dict[str, Any]:
    """Return the engine's settings, as vLLM does."""
    state: ServerState = request.app.state.server
    config = state.llm.engine.config
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    del settings["tenant_shares"]  # its names are the tenants' salts
    return {"engine_config": {name: _plain(value) for name, value in settings.items()}}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, administrator: Administrator) -> dict[str, bool]:
    """Forget every cached prefix; refused while requests are running (409)."""
    state: ServerState = request.app.state.server
    await state.llm.reset_prefix_cache()
    return {"reset": True}


@router.get("/ready", responses={503: {"description": "The server drains, or its engine ended."}})
async def ready(request: Request) -> JSONResponse:
    """Say whether requests are taken."""
    state: ServerState = request.app.state.server
    if state.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    if not state.llm.is_running:
        return JSONResponse({"status": "stopped"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """Say which Ostinato this is."""
    return {"version": ostinato.__version__}


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

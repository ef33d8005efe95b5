"""``/health`` and ``/ready``."""

from types import NoneType
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

import ostinato
from ostinato.server.access.callers import ADMIN_ONLY
from ostinato.server.state import StateDep

router = APIRouter(tags=["health"])


@router.post("/ping", include_in_schema=False)
@router.get("/ping")
@router.get("/health")
async def health() -> dict[str, str]:
    """Return 200 while the event loop runs, also as ``/ping``, which SageMaker calls."""
    return {"status": "ok"}


@router.get("/load", dependencies=ADMIN_ONLY)
async def load(state: StateDep) -> dict[str, int]:
    """Return the number of sequences running or waiting, as in vLLM."""
    return {"server_load": state.num_live}


@router.get("/server_info", dependencies=ADMIN_ONLY)
async def server_info(state: StateDep) -> dict[str, Any]:
    """Return the engine's settings, as in vLLM."""
    config = state.llm.engine.config
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    del settings["tenant_shares"]  # its names are the tenants' salts
    plain = (bool, int, float, str, NoneType)
    return {
        "engine_config": {
            name: value if isinstance(value, plain) else str(value)
            for name, value in settings.items()
        }
    }


@router.post("/reset_prefix_cache", dependencies=ADMIN_ONLY)
async def reset_prefix_cache(state: StateDep) -> dict[str, bool]:
    """Evict all cached prefixes; refused while requests are running (409)."""
    await state.llm.reset_prefix_cache()
    return {"reset": True}


@router.get("/ready", responses={503: {"description": "Draining, or the engine has stopped."}})
async def ready(state: StateDep) -> JSONResponse:
    """Return 200 if requests are accepted."""
    if state.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    if not state.llm.is_running:
        return JSONResponse({"status": "stopped"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of Ostinato."""
    return {"version": ostinato.__version__}

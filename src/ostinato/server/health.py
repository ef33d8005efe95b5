"""Is the server alive, and does it take requests?"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import ostinato
from ostinato.server.state import ServerState

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the event loop goes round; whatever the engine computes meanwhile."""
    return {"status": "ok"}


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

"""Which models are there?"""

from typing import Any

from fastapi import APIRouter, Request

from ostinato.server.callers import CallerOfRequest
from ostinato.server.errors import ApiError
from ostinato.server.protocol.answers import ModelCard, ModelList
from ostinato.server.state import ServerState

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", response_model=ModelList)
async def list_models(request: Request, caller: CallerOfRequest) -> dict[str, Any]:
    """List the model under each of its names."""
    state: ServerState = request.app.state.server
    data = [_card(state, name) for name in state.config.model_names]
    return {"object": "list", "data": data}


@router.get("/models/{name:path}", response_model=ModelCard)
async def get_model(name: str, request: Request, caller: CallerOfRequest) -> dict[str, Any]:
    """Describe the model of that name."""
    state: ServerState = request.app.state.server
    return _card(state, check_model(state, name))


def check_model(state: ServerState, name: str) -> str:
    """Return a model's name.

    Raises:
        ApiError: This server has no such model (404).
    """
    if name not in state.config.model_names:
        raise ApiError(
            404,
            f"model={name!r:.200}: this server has {', '.join(state.config.model_names)}",
            param="model",
            code="model_not_found",
        )
    return name


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started_s,
        "owned_by": "ostinato",
        "max_model_len": state.llm.max_model_len,
    }

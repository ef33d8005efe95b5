"""``/v1/models``."""

from typing import Any

from fastapi import APIRouter, Request

from ostinato.server.callers import CallerOfRequest
from ostinato.server.errors import ApiError
from ostinato.server.protocol.answers import ModelCard, ModelList
from ostinato.server.state import ServerState

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", response_model=ModelList)
async def list_models(request: Request, caller: CallerOfRequest) -> dict[str, Any]:
    """List the model under each of its names, and its adapters."""
    state: ServerState = request.app.state.server
    names = [*state.config.model_names, *state.llm.engine.adapters.by_name]
    return {"object": "list", "data": [_card(state, name) for name in names]}


@router.get("/models/{name:path}", response_model=ModelCard)
async def get_model(name: str, request: Request, caller: CallerOfRequest) -> dict[str, Any]:
    """Describe the model of that name."""
    state: ServerState = request.app.state.server
    adapter_of(state, name)
    return _card(state, name)


def adapter_of(state: ServerState, name: str) -> str:
    """Return the adapter of a model name; empty for the base model.

    Raises:
        ApiError: This server has no such model (404).
    """
    if name in state.config.model_names:
        return ""
    adapters = state.llm.engine.adapters.by_name
    if name not in adapters:
        known = ", ".join([*state.config.model_names, *adapters])
        raise ApiError(
            404,
            f"model={name!r:.200}: this server has {known}",
            param="model",
            code="model_not_found",
        )
    return name


def _card(state: ServerState, name: str) -> dict[str, Any]:
    named = state.llm.engine.adapters.by_name.get(name)
    of_adapter = {} if named is None else {
        "parent": state.config.model_names[0], "adapter": named.adapter.digest.hex()
    }  # fmt: skip
    return {
        **of_adapter,
        "id": name,
        "object": "model",
        "created": state.started_s,
        "owned_by": "ostinato",
        "max_model_len": state.llm.max_model_len,
    }

"""``/v1/models``, and LoRA adapters that are loaded and unloaded over HTTP.

An adapter is served under its own model name. Only the administrator may load one, and only from
folders that the operator allows (``--lora-folder``): a path must not make the server read any other
file.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from ostinato.core.errors import RequestError
from ostinato.engine.loop.adapters import LoRARequest
from ostinato.protocol.answers import ModelCard, ModelList
from ostinato.protocol.body import Body
from ostinato.runner.adapters.lora_config import CONFIG_FILE, WEIGHTS_FILE
from ostinato.server.access.callers import ADMIN_ONLY, CallerDep
from ostinato.server.errors import ApiError, unknown_name
from ostinato.server.state import ServerState, StateDep

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", response_model=ModelList)
async def list_models(state: StateDep, caller: CallerDep) -> ModelList:
    """List the model under each of its names, and its adapters."""
    names = [*state.config.model_names, *state.llm.engine.adapters.by_name]
    return {"object": "list", "data": [_card(state, name) for name in names]}


@router.get("/models/{name:path}", response_model=ModelCard)
async def get_model(name: str, state: StateDep, caller: CallerDep) -> ModelCard:
    """Describe the model of that name."""
    state.adapter_of(name)
    return _card(state, name)


def _card(state: ServerState, name: str) -> ModelCard:
    named = state.llm.engine.adapters.by_name.get(name)
    return ModelCard(
        id=name,
        object="model",
        created=state.started_s,
        owned_by="ostinato",
        max_model_len=state.llm.max_model_len,
        default_sampling_params=dict(state.llm.engine.defaults.values),
        parent=None if named is None else state.config.model_names[0],
        adapter=None if named is None else named.adapter.digest.hex(),
    )


class LoadAdapterBody(Body):
    """Body of a request to load an adapter, as in vLLM."""

    lora_name: str = Field(min_length=1, max_length=200, description="Its model name.")
    lora_path: str = Field(min_length=1, description="Its directory, below an allowed folder.")


class UnloadAdapterBody(Body):
    """Body of a request to unload an adapter, as in vLLM."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = Field(default=None, description="Its number; checked if given.")


@router.post("/load_lora_adapter", dependencies=ADMIN_ONLY)
async def load_adapter(body: LoadAdapterBody, state: StateDep) -> dict[str, Any]:
    """Load an adapter, or replace the loaded one of the same name."""
    path = _allowed(body.lora_path, state.config.lora_folders)
    return await load_named(state, body.lora_name, path)


@router.post("/unload_lora_adapter", dependencies=ADMIN_ONLY)
async def unload_adapter(body: UnloadAdapterBody, state: StateDep) -> dict[str, Any]:
    """Unload an adapter; its running requests finish without publishing blocks.

    Raises:
        ApiError: No adapter of that name and number is loaded (404).
    """
    named = state.llm.engine.adapters.by_name.get(body.lora_name)
    number = None if named is None else named.request.lora_int_id
    if number is None or body.lora_int_id not in (None, number):
        reason = "no such adapter is loaded"
        raise unknown_name("lora_name", body.lora_name, reason, "model_not_found")
    await state.llm.remove_lora(body.lora_name)
    return {"lora_name": body.lora_name, "lora_int_id": number, "unloaded": True}


async def load_named(state: ServerState, name: str, path: str | Path) -> dict[str, Any]:
    """Load an adapter and serve it under its own model name.

    Raises:
        RequestError: It cannot be served, or is above a limit.
        ApiError: The name belongs to the base model (400).
    """
    if name in state.config.model_names:
        raise ApiError(
            400, f"lora_name={name!r} is the base model's: choose another", param="lora_name"
        )
    adapters = state.llm.engine.adapters
    async with state.loading_adapter:
        old = adapters.by_name.get(name)
        taken = await state.llm.list_loras()
        number = next(n for n in range(1, len(taken) + 2) if n not in taken)
        if old is not None:
            number = old.request.lora_int_id
        loaded = await state.llm.add_lora(LoRARequest(name, number, str(path)))
        digest = adapters.of(name).digest.hex()
    return {"lora_name": name, "lora_int_id": number, "digest": digest, "loaded": loaded}


def _allowed(path: str, folders: tuple[str, ...]) -> Path:
    """Return an adapter's real directory.

    Raises:
        ApiError: It is outside the folders that the operator allows (403).
        RequestError: It is no path.
    """
    try:
        real_path = Path(path).resolve()
        files = [(real_path / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError) as error:  # too long, a null byte, a loop of links
        raise RequestError(f"lora_path={path!r:.200}: cannot be a directory ({error})") from error
    for folder in map(Path.resolve, map(Path, folders)):
        if all(file.is_relative_to(folder) for file in files):
            return real_path
    shown = ", ".join(folders) or "none; start the server with --lora-folder"
    raise ApiError(
        403,
        f"lora_path={path!r:.200} is not below a folder that adapters may come from ({shown})",
        param="lora_path",
        code="path_not_allowed",
    )

"""Loads and unloads the LoRA adapters of an engine, as ``LLM`` and ``AsyncLLM`` do."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ostinato.core.errors import RequestError
from ostinato.engine.api.engine_thread import EngineThread
from ostinato.engine.loop.adapters import LoRARequest, NamedAdapter
from ostinato.engine.loop.batch import one_each
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.prompts import Prompt
from ostinato.runner.adapters.lora import LoraAdapter


def load_adapter(engine: Engine, request: LoRARequest) -> bool:
    """Load an adapter that is new or has changed on disk, between steps; returns whether it was.

    Raises:
        RequestError: It cannot be served, or is above a limit; nothing has changed.
    """
    check_adapter_request(request)
    if engine.adapters.is_current(request):
        return False
    _add(engine, engine.adapters.read(request, engine.loaded))
    return True


def remove_adapter(engine: Engine, lora_id: int | str) -> bool:
    """Unload an adapter by its number or name, between steps; returns whether there was one.

    Effects: requests that have it finish, and publish nothing more; then its weights are freed.
    What it has cached stays, in case the same content is loaded again.
    """
    for name, named in engine.adapters.by_name.items():
        if lora_id in (name, named.request.lora_int_id):
            _end(engine, engine.adapters.remove(name))
            return True
    return False


def with_adapters(
    engine: Engine,
    prompts: list[Prompt],
    requests: LoRARequest | Sequence[LoRARequest | None] | None,
) -> list[Prompt]:
    """Return prompts with their adapters, which are loaded where they are not.

    Raises:
        RequestError: One cannot be served, or there is not one per prompt.
    """
    if requests is None:
        return prompts
    each = one_each("lora_request", requests, len(prompts))
    for request in {id(one): one for one in each if one is not None}.values():
        load_adapter(engine, request)
    names = ["" if request is None else request.lora_name for request in each]
    return [replace(p, adapter=name or p.adapter) for p, name in zip(prompts, names, strict=True)]


def check_adapter_request(request: object) -> None:
    """Raise ``RequestError`` for other types than ``LoRARequest``."""
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request={request!r:.80}: must be a LoRARequest")


async def load_adapter_between(thread: EngineThread, request: LoRARequest) -> bool:
    """Read an adapter while steps run, and load it between two; as ``load_adapter``."""
    engine = thread.engine
    check_adapter_request(request)
    if await asyncio.to_thread(engine.adapters.is_current, request):
        return False
    named = await asyncio.to_thread(engine.adapters.read, request, engine.loaded)
    await thread.call(lambda: _add(engine, named))
    return True


def _add(engine: Engine, named: NamedAdapter) -> None:
    """Let requests use an adapter; one of the same name is unloaded."""
    replaced = engine.adapters.add(named)
    if replaced is not None:
        _end(engine, replaced)


def _end(engine: Engine, adapter: LoraAdapter) -> None:
    if engine.adapters.end(adapter, engine.cache.manager.tables.live.values()):
        engine.audit.remove_adapter(adapter.digest)
        engine.rebase.remove_adapter(adapter.digest)
    engine.free_adapters()

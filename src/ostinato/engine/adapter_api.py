"""Loads and unloads the LoRA adapters of an engine, as ``LLM`` and ``AsyncLLM`` do."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ostinato.core.errors import RequestError
from ostinato.engine.adapters import LoRARequest
from ostinato.engine.engine import Engine
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.prompts import Prompt


def load_adapter(engine: Engine, request: LoRARequest) -> bool:
    """Load an adapter between steps, unless it is loaded as it is on disk.

    Returns:
        Whether anything was loaded.

    Raises:
        RequestError: It cannot be served, or is above a limit; nothing has changed.
    """
    check_adapter_request(request)
    if engine.adapters.is_current(request):
        return False
    engine.add_adapter(engine.adapters.read(request, engine.loaded))
    return True


def remove_adapter(engine: Engine, lora_id: int | str) -> bool:
    """Unload an adapter by its number or name; returns whether there was one."""
    for name, named in engine.adapters.by_name.items():
        if lora_id in (name, named.request.lora_int_id):
            engine.remove_adapter(name)
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
    each = requests if isinstance(requests, Sequence) else [requests] * len(prompts)
    if len(each) != len(prompts):
        raise RequestError(
            f"{len(each)} lora_request for {len(prompts)} prompts: give one for all, or one per "
            "prompt"
        )
    for request in {id(one): one for one in each if one is not None}.values():
        load_adapter(engine, request)
    names = ["" if request is None else request.lora_name for request in each]
    return [replace(p, adapter=name or p.adapter) for p, name in zip(prompts, names, strict=True)]


def check_adapter_request(request: object) -> None:
    """Refuse what is no ``LoRARequest``.

    Raises:
        RequestError: It is none.
    """
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request={request!r:.80}: must be a LoRARequest")


async def load_adapter_between(thread: EngineThread, request: LoRARequest) -> bool:
    """Read an adapter while steps run, and load it between two; as ``load_adapter``."""
    engine = thread.engine
    check_adapter_request(request)
    if await asyncio.to_thread(engine.adapters.is_current, request):
        return False
    named = await asyncio.to_thread(engine.adapters.read, request, engine.loaded)
    await thread.call(lambda: engine.add_adapter(named))
    return True

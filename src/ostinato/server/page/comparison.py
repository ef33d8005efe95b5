"""The hits of plug-ins beside those of the built-in parts, for the page of a lab's student."""

import asyncio
from typing import Any

from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.loop.engine import Engine
from ostinato.engine.settings.config import EngineConfig
from ostinato.labs.side_by_side import ServedRequest, compare, served_requests
from ostinato.plugins.arrivals import arrivals_of
from ostinato.plugins.loading import is_plugin
from ostinato.server.telemetry.engine_watch import EngineWatch


class Comparison:
    """Replays ended requests under the built-in parts, one replay at a time."""

    def __init__(self, llm: AsyncLLM) -> None:
        """Begin without a result."""
        config = llm.engine.config
        self._names = plugin_names(config)
        self._caching, self._scheduling = llm.engine.cache.config, llm.engine.scheduler.config
        self._watch = EngineWatch(llm, _read)
        self._result: dict[str, Any] = {"names": self._names, "requests": 0, "faults": 0}
        self._replay: asyncio.Task[None] | None = None

    async def look(self) -> dict[str, Any] | None:
        """Return the newest result, and begin the next; None without plug-ins."""
        if not self._names:
            return None
        served, num_faults = await self._watch.look()
        self._result["faults"] = num_faults
        is_running = self._replay is not None and not self._replay.done()
        if not is_running and len(served) != self._result["requests"]:
            self._replay = asyncio.create_task(self._compare(served))
        return self._result

    async def _compare(self, served: list[ServedRequest]) -> None:
        both = await asyncio.to_thread(compare, served, self._caching, self._scheduling)
        total = max(1, both.prompt_tokens)
        self._result |= {
            "requests": both.num_requests,
            "prompt": both.prompt_tokens,
            "own_ratio": both.own_tokens / total,
            "built_in_ratio": both.built_in_tokens / total,
        }


def plugin_names(config: EngineConfig) -> list[str]:
    """Return the names of an engine's plug-ins, without their folders."""
    values = (config.index, config.eviction_policy, config.order)
    return [value.rpartition("/")[2] for value in values if is_plugin(value)]


def _read(engine: Engine) -> tuple[list[ServedRequest], int]:
    """Return the ended requests, and how often plug-ins failed."""
    manager, order = engine.cache.manager, engine.scheduler.requests.order
    parts = [manager.index, *manager.pool.shares.policies]
    faults = [getattr(part, "faults", None) for part in parts]
    return served_requests(arrivals_of(order)), sum(f.num_faults for f in faults if f is not None)

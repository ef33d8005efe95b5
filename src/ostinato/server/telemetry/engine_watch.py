"""Reads the engine's counters without waiting for a long step.

Counters are copied between two steps, and a step may take long. A reader waits a moment and then
takes the previous copy, so that a scrape is answered while a long prompt is computed.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.loop.engine import Engine
from ostinato.errors import EngineStopped

SeenT = TypeVar("SeenT")

REUSE_FACTOR = 50
"""A read of 1 ms is not repeated within 50 ms, so that reads cost the engine at most 2 %."""


class EngineWatch(Generic[SeenT]):
    """Caches the last reading of one engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        take: Callable[[Engine], SeenT],
        timeout_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        reuse_factor: int = REUSE_FACTOR,
    ) -> None:
        """Watch an engine.

        Args:
            llm: The engine's front.
            take: Reads the engine between two steps; changes nothing.
            timeout_s: How long to wait for the end of a step if there is a previous reading.
            clock: Seconds, to measure how long readings take.
            reuse_factor: How many times as long as it took a reading is reused.
        """
        self._llm = llm
        self._take = take
        self._timeout_s = timeout_s
        self._clock, self._reuse_factor = clock, reuse_factor
        self._seen: SeenT | None = None
        self._fresh_until_s = 0.0
        self._reading: asyncio.Task[SeenT] | None = None

    async def look(self) -> SeenT:
        """Return the newest reading that is available soon; the first one waits for its step.

        Raises:
            EngineStopped: The engine has ended, and there is no reading.
        """
        if self._seen is not None and self._clock() < self._fresh_until_s:
            return self._seen
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        timeout_s = None if self._seen is None else self._timeout_s
        try:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._reading), timeout_s)
        except EngineStopped:
            if self._seen is None:
                raise
        assert self._seen is not None, "the first reading waits"
        return self._seen

    async def _read(self) -> SeenT:
        took_s = 0.0

        def timed(engine: Engine) -> SeenT:
            nonlocal took_s
            begin_s = self._clock()
            seen = self._take(engine)
            took_s = self._clock() - begin_s
            return seen

        self._seen = await self._llm.look(timed)
        self._fresh_until_s = self._clock() + self._reuse_factor * took_s
        return self._seen

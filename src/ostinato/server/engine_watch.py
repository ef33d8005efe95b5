"""Reads the engine's figures without waiting for it.

Counters are copied between two steps, and a step may take long. A reader waits for a moment and
then takes the last copy, so that a scrape is answered while a long prompt is computed.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.engine import Engine
from ostinato.errors import EngineStopped

SeenT = TypeVar("SeenT")

REST_FACTOR = 50
"""A look that took a millisecond is not repeated for fifty: looks cost the engine 2% at most."""


class EngineWatch(Generic[SeenT]):
    """Remembers what was seen last of one engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        question: Callable[[Engine], SeenT],
        patience_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch an engine.

        Args:
            llm: Whose engine.
            question: What to look at; it is asked between two steps and changes nothing.
            patience_s: How long to wait for the end of a step once something was seen.
            clock: Seconds; tells how long looks took.
        """
        self._llm = llm
        self._question = question
        self._patience_s = patience_s
        self._clock = clock
        self._seen: SeenT | None = None
        self._rests_until_s = 0.0
        self._asking: asyncio.Task[SeenT] | None = None

    async def look(self) -> SeenT:
        """Return the newest that is to be had soon; the first look waits for its step.

        Raises:
            EngineStopped: The engine has ended, and nothing was ever seen of it.
        """
        if self._seen is not None and self._clock() < self._rests_until_s:
            return self._seen
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        patience_s = None if self._seen is None else self._patience_s
        try:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._asking), patience_s)
        except EngineStopped:
            if self._seen is None:
                raise
        assert self._seen is not None, "the first look waits"
        return self._seen

    async def _ask(self) -> SeenT:
        took_s = 0.0

        def timed(engine: Engine) -> SeenT:
            nonlocal took_s
            begin_s = self._clock()
            seen = self._question(engine)
            took_s = self._clock() - begin_s
            return seen

        self._seen = await self._llm.look(timed)
        self._rests_until_s = self._clock() + REST_FACTOR * took_s
        return self._seen

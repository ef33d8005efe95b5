"""Engines with an event loop, whose steps a test lets pass one at a time.

::

    with async_llm(checkpoints) as llm:
        steps = StepByStep(llm)
        task = asyncio.create_task(last(llm.generate(prompt)))
        await steps.reached()               # the engine is about to compute
        await steps.until(something)        # the request is in the middle now
        steps.go_on(1000)                   # the rest at full speed
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato import AsyncLLM
from tests.support.engines import assert_idle
from tests.support.models.checkpoints import Checkpoints
from tests.support.waiting import until


@contextmanager
def async_llm(checkpoints: Checkpoints, **settings) -> Iterator[AsyncLLM]:
    """Lend an engine whose thread is gone and which is idle when the test is over."""
    settings = {
        "dtype": "float64",
        "block_size": 4,
        "num_blocks": 32,
        "max_model_len": 64,
        **settings,
    }
    llm = AsyncLLM(str(checkpoints.path("llama")), **settings)
    try:
        yield llm
    finally:
        llm.shutdown()
        assert_idle(llm.engine)


class StepByStep:
    """Lets an engine's steps pass one at a time."""

    def __init__(self, llm: AsyncLLM) -> None:
        """Stop the engine before its next forward pass."""
        self._permits = threading.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        self._arrivals = asyncio.Semaphore(0)
        self._execute = llm.engine.runner.execute
        llm.engine.runner.execute = self._wait

    def _wait(self, plan):
        self._loop.call_soon_threadsafe(self._arrivals.release)
        assert self._permits.acquire(timeout=30)
        return self._execute(plan)

    def go_on(self, steps: int = 1) -> None:
        """Let steps pass."""
        self._permits.release(steps)

    async def reached(self, passes: int = 1) -> None:
        """Wait until the engine has come to so many more forward passes, and waits there."""
        for _ in range(passes):
            await self._arrivals.acquire()

    async def until(self, task: asyncio.Future) -> None:
        """Let steps pass, a few at a time, until something is done."""

        def is_done() -> bool:
            self.go_on()
            return task.done()

        if not task.done():
            await until(is_done)


async def last(stream):
    """Read a stream to its end; returns its last output."""
    outputs = [output async for output in stream]
    return outputs[-1]

"""A router in a thread, for tests that speak to it with blocking clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ostinato.router.process.app import FleetApp
from ostinato.router.process.config import FleetConfig, WorkerSpec
from ostinato.router.process.lifecycle import address_of, start
from tests.support.waiting import wait_until

AnswerT = TypeVar("AnswerT")


class RouterThread:
    """A router that runs.

    Attributes:
        url: Its address.
        app: What it is made of.
    """

    def __init__(self, config: FleetConfig) -> None:
        """Start, and wait until it takes requests."""
        self.url = ""
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))
        self._thread.start()
        wait_until(lambda: self.url != "")

    async def _run(self) -> None:
        self.app = FleetApp(self._config)
        runner = await start(self.app)
        self.url = address_of(runner)
        await self._stop.wait()
        await runner.cleanup()

    def look(self, question: Callable[[FleetApp], AnswerT]) -> AnswerT:
        """Return an answer of the router's own thread."""

        async def ask() -> AnswerT:
            return question(self.app)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(30)

    def state(self, name: str) -> Any:
        """Return how the cache of a worker is known."""
        [status] = self.look(lambda app: [s for s in app.fleet.router.workers() if s.name == name])
        return status

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the router did not end"
        self._loop.close()


@contextmanager
def routing(workers: dict[str, str], **settings: Any) -> Iterator[RouterThread]:
    """Run a router before workers, named with their addresses, until the block is left."""
    specs = tuple(WorkerSpec(url, name) for name, url in workers.items())
    thread = RouterThread(FleetConfig(workers=specs, port=0, **settings))
    try:
        yield thread
    finally:
        thread.stop()

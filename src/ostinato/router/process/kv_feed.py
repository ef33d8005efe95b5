"""KV events of workers over ZeroMQ, and the recovery of missing ones; for the process and Ray.

::

    SUB ─► router.apply ──Resync─► replay socket ──too old─► snapshot ──none─► forget

The router says what is missing, and this file fetches it, while live batches queue in the socket.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from ostinato.router.policy import Resync, Router
from ostinato.router.policy.events import EventBatch, UnusableEvents, decode

logger = logging.getLogger("ostinato")

_END_OF_REPLAY = b"\xff" * 8
_REPLAY_TIMEOUT_S = 5.0
_MAX_BATCHES = 100_000
_MAX_MESSAGE_BYTES = 2**28
_MAX_ATTEMPTS = 5
OVERDUE_INTERVAL_S = 2.0
RESUBSCRIBE_S = 30.0
"""Seconds between the failure of a subscription and the next one."""

_THREAD_BYTES = 65_536
"""Size from which a message is decoded in a thread."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """ZeroMQ endpoints of a worker."""

    events: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Everything that a worker had cached at one moment.

    Attributes:
        sequence: Number of the first batch after it.
        payload: A batch of stored events.
    """

    sequence: int
    payload: bytes


FetchSnapshot = Callable[[], Awaitable[WorkerSnapshot | None]]


class KVFeed:
    """Feeds the events of one worker to the router.

    Attributes:
        num_batches: Live batches.
        num_replays: Replays requested.
        num_snapshots: Snapshots applied.
    """

    def __init__(
        self,
        name: str,
        endpoints: Endpoints,
        router: Router,
        fetch_snapshot: FetchSnapshot,
    ) -> None:
        self.num_batches = self.num_replays = self.num_snapshots = 0
        self._name = name
        self._endpoints = endpoints
        self._router = router
        self._fetch_snapshot = fetch_snapshot
        self._context = zmq.asyncio.Context.instance()
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Listen until cancelled, after loading what is cached already."""
        socket = self._socket(zmq.SUB, self._endpoints.events)
        try:
            socket.subscribe(self._endpoints.topic.encode())
            await self.begin()
            while True:
                frames = await socket.recv_multipart()
                self.num_batches += 1
                await self._take(frames)
                await asyncio.sleep(0)  # let requests run during a burst of events
        finally:
            socket.close(linger=0)

    async def begin(self) -> None:
        """Load what the worker has cached already, by snapshot or replay."""
        await self.fill(Resync(self._name, 0, begins=True))

    async def fill(self, missing: Resync | None) -> None:
        """Recover missing events by replay, then by snapshot; else clear the worker's blocks."""
        if missing is not None and missing.begins and self._lock.locked():
            return  # a recovery is under way
        async with self._lock:
            for _ in range(_MAX_ATTEMPTS):
                if missing is None:
                    return
                if missing.begins:
                    missing = await self._start(missing.reason)
                    continue
                if missing.snapshot or (batches := await self._replay(missing.replay_from)) is None:
                    if not await self._restored():
                        break
                    return
                missing = self._router.replayed(self._name, batches)
            logger.warning(
                "worker %s: events were lost, and its known blocks are cleared", self._name
            )
            self._router.forget(self._name)

    async def _start(self, reason: str) -> Resync | None:
        """Load all that is cached; returns what is missing, also after a first event."""
        if reason:
            logger.warning("worker %s: its cache counts as guessed: %s", self._name, reason)
        if await self._restored():
            return None
        batches = await self._replay(0)
        return self._router.begin(self._name, batches) if batches else None

    async def _take(self, frames: list[bytes]) -> None:
        """Process a message, and recover missing ones."""
        try:
            if len(frames) != 3 or len(frames[1]) != 8:
                raise UnusableEvents(f"a message has frames of {[len(f) for f in frames]} bytes")
            batch = await _decoded(int.from_bytes(frames[1], "big"), frames[2])
        except UnusableEvents as error:
            self._router.broken(self._name, str(error)[:200])
            return
        missing = self._router.apply(self._name, batch)
        if missing is not None:
            await self.fill(missing)

    async def _replay(self, start: int) -> list[EventBatch] | None:
        """Request the batches from a number on; None if the worker does not answer."""
        if self._endpoints.replay is None:
            return None
        self.num_replays += 1
        socket = self._socket(zmq.DEALER, self._endpoints.replay)
        batches: list[EventBatch] = []
        try:
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                while len(batches) < _MAX_BATCHES:
                    *_, number, payload = await socket.recv_multipart()
                    if number == _END_OF_REPLAY or not payload:
                        break
                    batches.append(await _decoded(int.from_bytes(number, "big"), payload))
        except (TimeoutError, UnusableEvents, ValueError) as error:
            logger.warning("worker %s: a replay of events failed: %r", self._name, error)
            return None
        finally:
            socket.close(linger=0)
        return batches

    async def _restored(self) -> bool:
        """Load a snapshot; return False if the worker has none."""
        snapshot = await self._fetch_snapshot()
        if snapshot is None:
            return False
        self.num_snapshots += 1
        try:
            batch = await _decoded(snapshot.sequence, snapshot.payload)
        except UnusableEvents as error:
            logger.warning("worker %s: its snapshot is not used: %s", self._name, error)
            return False
        return self._router.restore(self._name, snapshot.sequence, batch) is None

    def _socket(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.set_hwm(_MAX_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        return socket


class KVFeeds:
    """The feeds of all workers of a router; for its event loop only.

    A feed that fails is subscribed again. Workers that were due to publish and are silent are
    asked for what they may have published.

    Attributes:
        by_name: Feeds by the names of their workers.
    """

    def __init__(
        self,
        router: Router,
        clock: Callable[[], float] = time.monotonic,
        is_reachable: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Start without feeds; workers that are not reachable are not asked."""
        self.by_name: dict[str, KVFeed] = {}
        self._router, self._clock, self._is_reachable = router, clock, is_reachable
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}  # of each worker
        self._polling: asyncio.Task[None] | None = None

    def listen(
        self,
        name: str,
        endpoints: Endpoints,
        fetch_snapshot: FetchSnapshot,
        block_size: int | None = None,
    ) -> KVFeed:
        """Subscribe to a worker's events."""
        self.drop(name)
        feed = self.by_name[name] = KVFeed(name, endpoints, self._router, fetch_snapshot)
        self._router.add_worker(name, block_size=block_size, sends_events=True)
        self._start(name, self._run(name, feed))
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_overdue())
        return feed

    def drop(self, name: str) -> None:
        """End a worker's feed, if it has one."""
        self.by_name.pop(name, None)
        for task in self._tasks.pop(name, ()):
            task.cancel()

    async def stop(self) -> None:
        """End all feeds, and wait until they have ended."""
        polling = () if self._polling is None else (self._polling,)
        tasks = [*polling, *(task for each in self._tasks.values() for task in each)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        running = self._tasks.setdefault(name, set())
        running.add(task)
        task.add_done_callback(running.discard)

    async def _run(self, name: str, feed: KVFeed) -> None:
        while True:
            try:
                await feed.run()
            except Exception:
                logger.exception("worker %s: its events ended", name)
                self._router.broken(name, "its subscription to events failed")
            await asyncio.sleep(RESUBSCRIBE_S)

    async def _poll_overdue(self) -> None:
        """Fetch what silent workers may have published."""
        while True:
            await asyncio.sleep(OVERDUE_INTERVAL_S)
            for missing in self._router.overdue(self._clock()):
                feed = self.by_name.get(missing.worker)
                if feed is not None and self._is_reachable(missing.worker):
                    self._start(missing.worker, feed.fill(missing))


async def _decoded(sequence: int, payload: bytes) -> EventBatch:
    if len(payload) < _THREAD_BYTES:
        return decode(sequence, payload)
    return await asyncio.to_thread(decode, sequence, payload)

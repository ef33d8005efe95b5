"""``WorkerPool``: the workers, their health, and the router that chooses between them."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from contextlib import closing
from dataclasses import dataclass

import aiohttp

from ostinato.core.errors import ConfigError
from ostinato.core.setting import shared_settings
from ostinato.router.policy import Decision, Router, RouterConfig, RouteRequest
from ostinato.router.process.config import FleetConfig, WorkerSpec
from ostinato.router.process.kv_feed import KVFeeds
from ostinato.router.process.worker import Worker

_MAX_OWNERS = 100_000
_MAX_WORKERS = 1024
_MIN_PROBE_S = 0.2
_SLICED_TOKENS = 8192
"""Prompts of this length or more are routed in slices; shorter ones take about a millisecond."""


@dataclass(frozen=True, slots=True)
class ResponseOwner:
    """The owner of a stored response: the worker that has it, and its tenant."""

    worker: str
    tenant: str


class WorkerPool:
    """The workers of a router process; for its event loop only.

    Attributes:
        config: The settings.
        router: Tracks what each worker has cached and has to do.
        workers: Workers by name, in the order in which they joined.
    """

    def __init__(
        self,
        config: FleetConfig,
        session: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.router = Router(RouterConfig(**shared_settings(config, RouterConfig)))
        self.workers: dict[str, Worker] = {}
        self.session = session
        self.clock = clock
        self._owners: OrderedDict[str, ResponseOwner] = OrderedDict()  # by the ids of responses
        self._feeds = KVFeeds(self.router, clock, self._is_well)
        self._long_prompts = asyncio.Lock()

    async def start(self) -> None:
        """Add the configured workers, and monitor all workers from now on."""
        for spec in self.config.workers:
            self.join(spec)
        probes = [worker.tasks[0] for worker in self.workers.values()]
        if probes:
            await asyncio.wait(probes, timeout=self.config.connect_timeout_s)

    async def stop(self) -> None:
        """Stop monitoring."""
        tasks = [task for worker in self.workers.values() for task in worker.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._feeds.stop(), *tasks, return_exceptions=True)

    def join(self, spec: WorkerSpec) -> Worker:
        """Add a worker, or resume it if it is draining.

        Raises:
            ConfigError: Another worker has its name, or there are too many.
        """
        known = self.workers.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise ConfigError(
                    f"name={spec.name!r}: a worker of that name is at {known.spec.url}"
                )
            known.is_draining = False
            self.router.add_worker(spec.name, sends_events=known.feed is not None)
            return known
        if len(self.workers) >= _MAX_WORKERS:
            raise ConfigError(f"there are {_MAX_WORKERS} workers: remove one first")
        config = self.config
        worker = Worker(
            spec,
            self.session,
            config.worker_key,
            has_tenants=config.keys_file is not None,
            replaces_keys=config.replace_keys,
        )
        self.workers[spec.name] = worker
        self.router.add_worker(spec.name, sends_events=spec.events is not None)
        first = asyncio.create_task(self._meet(worker))
        worker.tasks = [first, asyncio.create_task(self._watch(worker, first))]
        return worker

    async def leave(self, name: str) -> None:
        """Drain a worker, and remove it after its last request."""
        worker = self.workers[name]
        worker.is_draining = True
        self.router.drain(name)
        while worker.num_live and worker.is_draining:
            await asyncio.sleep(0.05)
        if worker.is_draining and self.workers.get(name) is worker:
            del self.workers[name]
            worker.cancel()
            self._feeds.drop(name)
            self.router.remove(name)

    async def choose(self, request: RouteRequest, model: str, tried: Set[str]) -> Decision | None:
        """Choose a healthy worker that serves the model and was not tried."""
        return await self._route(request, self._unfit(model, tried))

    async def choose_owner(
        self, request: RouteRequest, name: str, tried: Set[str]
    ) -> Decision | None:
        """Choose a worker by name, if it can serve the request."""
        if name in tried or name not in self.workers or self.workers[name].refusal:
            return None
        others = [other for other in self.workers if other != name]
        return await self._route(request, {*others, *self._unfit("", tried)})

    async def _route(self, request: RouteRequest, unfit: Set[str]) -> Decision | None:
        """Choose a worker; long prompts one by one, so that the second sees the first, in slices.

        Raises:
            CancelledError: The client has left; nothing is assigned.
        """
        if len(request.tokens) < _SLICED_TOKENS:
            return self.router.route(request, self.clock(), unfit)
        async with self._long_prompts:
            with closing(self.router.route_in_slices(request, self.clock(), unfit)) as steps:
                while True:
                    try:
                        next(steps)
                    except StopIteration as end:
                        decision: Decision | None = end.value
                        return decision
                    await asyncio.sleep(0)

    def least_busy(self, model: str, tried: Set[str]) -> Worker | None:
        """Choose a worker for a request without a prompt."""
        unfit = self._unfit(model, tried)
        fit = [w for w in self.workers.values() if w.name not in unfit and not w.is_draining]
        return min(fit, key=lambda worker: worker.num_live, default=None)

    def owner_of(self, number: str) -> ResponseOwner | None:
        """Return the owner of a response, also by ``<id>-<text>``; None if unknown."""
        return self._owners.get(number) or self._owners.get(number.rpartition("-")[0])

    def note_owner(self, number: str, owner: ResponseOwner) -> None:
        """Remember the owner of a stored response."""
        self._owners[number] = owner
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)

    @property
    def num_live(self) -> int:
        """Unfinished requests at all workers."""
        return sum(worker.num_live for worker in self.workers.values())

    def _unfit(self, model: str, tried: Set[str]) -> set[str]:
        """Return the workers that cannot serve a request for a model."""
        allowed = {name for name, worker in self.workers.items() if not worker.refusal}
        serving = {name for name in allowed if self.workers[name].serves(model)}
        if not serving:  # a worker returns the error
            serving = allowed
        well = {name for name in serving if self.workers[name].is_well} - tried
        return self.workers.keys() - (well or serving - tried)  # if none is well, try any

    async def _meet(self, worker: Worker) -> None:
        """Check a new worker, and subscribe to its events."""
        await worker.probe()
        await self._listen(worker)

    async def _listen(self, worker: Worker) -> None:
        """Subscribe to a worker's events once their endpoint is known."""
        if worker.feed is not None or not worker.is_well:
            return
        endpoints = await worker.endpoints()
        if endpoints is None:
            return
        worker.feed = self._feeds.listen(worker.name, endpoints, worker.snapshot)

    def _is_well(self, name: str) -> bool:
        return name in self.workers and self.workers[name].is_well

    async def _watch(self, worker: Worker, first: "asyncio.Task[None]") -> None:
        """Check a worker's health periodically; soon after a failure."""
        await asyncio.wait([first])
        interval_s = self.config.health_interval_s
        while True:
            is_sound = worker.is_well and not worker.is_late
            await asyncio.sleep(interval_s if is_sound else min(interval_s, _MIN_PROBE_S))
            await worker.probe()
            if not worker.is_well:
                self._move_waiting(worker)
            elif not worker.is_late:
                await self._resync(worker)
                await self._listen(worker)
                prices = await worker.prices()
                if self.workers.get(worker.name) is worker:
                    self.router.set_prices(worker.name, prices)

    def _move_waiting(self, worker: Worker) -> None:
        """End the wait of requests for an unhealthy worker's first byte, if another is well."""
        now = asyncio.get_running_loop().time()
        for limit, (model, tried) in list(worker.waiting.items()):
            other = self.least_busy(model, {*tried, worker.name})
            if other is not None and other.is_well:
                del worker.waiting[limit]
                limit.reschedule(now)

    async def _resync(self, worker: Worker) -> None:
        """Resynchronize with a worker that may have restarted."""
        was_gone, broke_off = worker.was_gone, worker.broke_off
        worker.was_gone = worker.broke_off = False
        if was_gone:
            self.router.restarted(worker.name)
            worker.public_prefixes.clear()
            if worker.feed is not None:
                await worker.feed.begin()
        elif broke_off:
            missing = self.router.interrupted(worker.name)
            if worker.feed is not None:
                await worker.feed.fill(missing)

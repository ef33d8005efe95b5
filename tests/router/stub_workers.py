"""Engines' servers that answer by a script, and a router before them, all in one event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from ostinato.router.process.app import FleetApp
from ostinato.router.process.config import FleetConfig, WorkerSpec
from ostinato.router.process.lifecycle import address_of, start
from ostinato.server.access.callers import KeyedCallers
from ostinato.server.errors import ApiError

Answer = Callable[["StubWorker", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class StubWorker:
    """One scripted server.

    Attributes:
        name: In the router, and in its answers.
        answer: What it does with a request; by default it echoes the prompt.
        bodies: That it was sent, in order.
        headers: Of these requests.
        gone: Requests whose client left before the answer's end.
        num_waiting: Unfinished requests.
        tokenizes: Whether it answers ``/tokenize``.
        url: Its address.
        health: Status of its health.
        is_ours: Whether it has the administration of an Ostinato server.
        models: That it serves.
        keys_file: Keys that its administration asks for.
        prices: What ``/admin/steps`` answers.
    """

    name: str
    answer: Answer | None = None
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    gone: int = 0
    num_waiting: int = 0
    tokenizes: bool = False
    url: str = ""
    health: int = 200
    is_ours: bool = False
    models: tuple[str, ...] = ()
    keys_file: str | None = None
    prices: dict[str, Any] | None = None
    _runner: web.AppRunner | None = None
    _port: int = 0
    _listening: Any = None

    async def begin(self) -> None:
        """Listen; again on the same port if it has been killed."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/v1/{rest:.*}", self._generate)
        if self.tokenizes:
            app.router.add_post("/tokenize", self._generate)
        if self.is_ours:
            app.router.add_get("/admin/kv/events", self._no_events)
            app.router.add_route("*", "/admin/public/{rest:.*}", self._public)
        if self.prices is not None:
            app.router.add_get("/admin/steps", self._steps)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(
            self._runner.server, "127.0.0.1", self._port, reuse_address=True
        )
        self._port = self._listening.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def kill(self) -> None:
        """Close every connection at once and listen no more."""
        assert self._runner is not None and self._runner.server is not None
        for listener in self._listening.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await _let_others_run()  # what was just accepted becomes a connection
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        self._listening.close()  # asyncio forgets what it accepts from here on, and leaves it open
        await self._runner.cleanup()
        await _let_others_run()
        self._runner = None

    async def end(self) -> None:
        """Listen no more, if it still does."""
        if self._runner is not None:
            await self.kill()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _no_events(self, request: web.Request) -> web.Response:
        if self.keys_file is not None:
            try:
                KeyedCallers(self.keys_file).identify(request.headers)
            except ApiError as error:
                return web.Response(status=error.status)
        return web.json_response({"endpoint": None})

    async def _steps(self, request: web.Request) -> web.Response:
        return web.json_response(self.prices)

    async def _public(self, request: web.Request) -> web.Response:
        return web.json_response({"num_tokens": len((await request.json()).get("prompt", ()))})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model} for model in self.models]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        fields = json.loads(body) if body.startswith(b"{") else {}
        self.num_waiting += 1
        try:
            if self.answer is not None:
                return await self.answer(self, request, fields)
            return await echo(self, request, fields)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.num_waiting -= 1


async def _let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def echo(worker: StubWorker, request: web.Request, fields: dict[str, Any]) -> web.Response:
    """Answer with the worker's name and the prompt."""
    return web.json_response(
        {"id": f"cmpl-{worker.name}-{len(worker.bodies)}", "by": worker.name, **fields}
    )


def telling(status: int = 200, **fields: Any) -> Answer:
    """Return what answers every request with a status and fields."""

    async def tell(worker: StubWorker, request: web.Request, _: dict[str, Any]) -> web.Response:
        return web.json_response({"by": worker.name, **fields}, status=status)

    return tell


def waiting_for(gate: asyncio.Event) -> Answer:
    """Return what echoes once a gate is open."""

    async def wait(
        worker: StubWorker, request: web.Request, fields: dict[str, Any]
    ) -> web.StreamResponse:
        await gate.wait()
        return await echo(worker, request, fields)

    return wait


async def begun(request: web.Request, piece: bytes = b"data: 1\n\n") -> web.StreamResponse:
    """Begin the answer to a request by a piece."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(piece)
    return response


async def stream(
    worker: StubWorker, request: web.Request, fields: dict[str, Any]
) -> web.StreamResponse:
    """Stream as many pieces as asked for."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(fields.get("pieces", 3)):
        await response.write(f"data: {fields.get('prompt')}/{number}\n\n".encode())
        await asyncio.sleep(0)
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass(frozen=True)
class Reply:
    """An answer that was read to its end."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        """What it says, as JSON; None if it is empty."""
        return json.loads(self.text) if self.text else None


@dataclass(frozen=True)
class Routed:
    """A router that runs, and a client of it."""

    app: FleetApp
    url: str
    client: aiohttp.ClientSession

    async def send(self, method: str, path: str, **request: Any) -> Reply:
        """Send a request, and read the whole answer."""
        async with self.client.request(method, self.url + path, **request) as answer:
            return Reply(answer.status, answer.headers, await answer.text())

    async def post(self, body: Any, path: str = "/v1/completions", **more: Any) -> tuple[int, Any]:
        """Send a request; returns the status and the answer's JSON."""
        reply = await self.send("POST", path, json=body, **more)
        return reply.status, reply.json


@asynccontextmanager
async def routed(*workers: StubWorker, **settings: Any) -> AsyncIterator[Routed]:
    """Run workers and a router before them until the block is left."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.begin()
            stack.push_async_callback(worker.end)
        specs = tuple(WorkerSpec(worker.url, worker.name) for worker in workers)
        settings.setdefault("health_interval_s", 0.05)
        app = FleetApp(FleetConfig(workers=specs, port=0, **settings))
        runner = await start(app)
        stack.push_async_callback(runner.cleanup)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Routed(app, address_of(runner), client)


def names(*letters: str) -> list[StubWorker]:
    """Return workers of these names."""
    return [StubWorker(letter) for letter in letters]

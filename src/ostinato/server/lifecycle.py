"""Starts and drains a server.

::

    SIGTERM or Ctrl-C ─► drain: /ready 503, new requests 503, running ones go on
                           ├── the last one has ended ────────────┐
                           ├── drain_timeout_s is over ───────────┤─► engine ends ─► exit
                           └── the signal comes again ────────────┘
"""

import asyncio
import atexit
import gc
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from types import FrameType
from typing import Any

import uvicorn

from ostinato.core.errors import ConfigError
from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.loop.engine import logger
from ostinato.server.access.callers import KeyedCallers
from ostinato.server.access.connections import Connections, LogLimit, raise_file_limit
from ostinato.server.admin.bodies import PrewarmLine
from ostinato.server.admin.prewarming import prewarm_all
from ostinato.server.app import create_app
from ostinato.server.config import ServerConfig
from ostinato.server.routes.models import load_named
from ostinato.server.state import ServerState
from ostinato.server.telemetry.tracing import make_tracer

_SHUTDOWN_TIMEOUT_S = 5
"""Time for clients to read their responses to the end, once the engine has stopped."""


def open_state(model: str, settings: dict[str, Any], config: ServerConfig) -> ServerState:
    """Load a model with settings of ``EngineConfig``, and return the state of its server.

    Raises:
        ConfigError: A setting is out of range, or the keys file is invalid.
        ModelError: The model cannot be served.
    """
    tracer = make_tracer(config)  # before the model, so that a missing extra is reported at once
    if config.keys_file is None:
        state = ServerState(AsyncLLM(model, **settings), config)
    else:
        callers = KeyedCallers(config.keys_file)
        llm = AsyncLLM(model, **settings, tenant_shares=callers.keys.tenant_shares())
        state = ServerState(llm, config, callers)
    if tracer is not None:
        state.observers.append(tracer)
    return state


def warm_up(state: ServerState, prompts: list[PrewarmLine]) -> None:
    """Compute prompts before the first request.

    Raises:
        ConfigError: One of them cannot be served or leased; the engine has been stopped.
    """
    _run_or_shut_down(state, prewarm_all(state, prompts))


def load_adapters(state: ServerState, adapters: Mapping[str, str]) -> None:
    """Load adapters, paths by name, before the first request.

    Raises:
        RequestError: One of them cannot be served; the engine has been stopped.
    """

    async def load_all() -> None:
        for name, path in adapters.items():
            await load_named(state, name, path)

    _run_or_shut_down(state, load_all())


def _run_or_shut_down(state: ServerState, work: Coroutine[Any, Any, object]) -> None:
    try:
        asyncio.run(work)
    except BaseException:
        state.llm.shutdown()
        raise


def listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket, before a model is loaded.

    Raises:
        ConfigError: The address is in use, or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"host={config.host!r}, port={config.port}: cannot listen there ({error.strerror}); "
            "give another --port, or --port 0 for any free one"
        ) from error
    # Connections inherit it. asyncio sets it only where the protocol is named, unlike here, and
    # without it Nagle's algorithm and delayed acknowledgements add 40 ms to responses.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run_server(
    state: ServerState, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    """Announce the address and serve until a signal, and then until the last request has ended.

    Effects: the listener is closed, and the engine is shut down.
    """
    server = DrainingServer(state, announce)
    try:
        server.run(sockets=[listener])
    finally:
        state.llm.shutdown()


class DrainingServer(uvicorn.Server):
    """Accepts no requests after the first signal, and ends when the last one has ended."""

    def __init__(self, state: ServerState, announce: Callable[[str], None]) -> None:
        """Create a server that is not started."""
        config = state.config
        connections = Connections(config, raise_file_limit(), config.send_timeout_s)
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(LogLimit())
        protocol: Any = connections.protocol
        super().__init__(
            uvicorn.Config(
                create_app(state),
                http=protocol,
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_keyfile=state.config.tls_key_file,
                ssl_certfile=state.config.tls_certificate_file,
                lifespan="off",
                ws="none",
                timeout_keep_alive=75,  # longer than most clients keep connections alive
                timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
            )
        )
        self._state = state
        self._announce = announce
        self._deadline_s = float("inf")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, and announce the address.

        Effects: objects loaded so far are frozen out of garbage collections: one that scans a
        model's objects would delay some request by a quarter of a second.
        """
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or Triton counts what is frozen as leaked
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            scheme = "http" if self._state.config.tls_key_file is None else "https"
            self._announce(f"{scheme}://{shown}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at the second."""
        if self._state.is_draining:
            self._deadline_s = 0.0
            return
        self._state.is_draining = True
        timeout_s = self._state.config.drain_timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        if self._state.num_live:
            logger.warning(
                "shutting down: %d answers have %g s to finish; the same signal again stops them",
                self._state.num_live,
                timeout_s,
            )

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop now; called ten times a second."""
        is_over = self._state.num_live == 0 or time.monotonic() >= self._deadline_s
        return (self._state.is_draining and is_over) or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """After a signal, stop the engine, which ends open streams."""
        if self._state.is_draining:
            await asyncio.to_thread(self._state.llm.shutdown)
        await super().shutdown(sockets)

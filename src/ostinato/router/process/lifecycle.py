"""Starts and drains a router process.

Like the server, after SIGTERM or Ctrl-C it refuses new requests, and exits after the last one,
after ``drain_timeout_s``, or at a second signal.
"""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable

from aiohttp import web

from ostinato.core.errors import ConfigError
from ostinato.router.process.app import FleetApp
from ostinato.router.process.config import FleetConfig
from ostinato.router.process.connections import KEEP_ALIVE_S, GuardedSite
from ostinato.server.access.connections import Connections, LogLimit, raise_file_limit

logger = logging.getLogger("ostinato")

_MAX_LINE_BYTES = 16_384


def run_router(config: FleetConfig, announce: Callable[[str], None]) -> None:
    """Run a router until it is stopped by a signal and drained.

    Args:
        config: Settings of the router.
        announce: Called with the router's address once it accepts requests.

    Raises:
        ConfigError: The address is in use, or a file cannot be read.
    """
    asyncio.run(_run(config, announce))


async def _run(config: FleetConfig, announce: Callable[[str], None]) -> None:
    signals = _Signals()
    for name in ("aiohttp.server", "asyncio"):
        logging.getLogger(name).addFilter(LogLimit())
    gc.collect()
    gc.freeze()  # exclude loaded modules from garbage collection
    app = FleetApp(config)
    runner = await start(app)
    try:
        announce(address_of(runner))
        await signals.first.wait()
        await _drain(app, signals)
    finally:
        await runner.cleanup()


async def start(app: FleetApp) -> web.AppRunner:
    """Start to listen; stop with ``cleanup`` of the result.

    Raises:
        ConfigError: The address is in use, or not of this machine.
    """
    runner = web.AppRunner(
        app.web,
        handler_cancellation=True,  # cancel the request when its client disconnects
        keepalive_timeout=KEEP_ALIVE_S,
        access_log=None,
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_LINE_BYTES,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    config = app.config
    # A request needs a second descriptor, for its worker.
    connections = Connections(config, raise_file_limit() // 2, config.silence_timeout_s)
    try:
        await GuardedSite(runner, config.host, config.port, connections).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"host={config.host!r}, port={config.port}: cannot listen there ({error.strerror}); "
            "give another --port, or --port 0 for any free one"
        ) from error
    return runner


def address_of(runner: web.AppRunner) -> str:
    """Return the router's address."""
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Signals:
    """SIGTERM and Ctrl-C: the first one, and the second."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _drain(app: FleetApp, signals: _Signals) -> None:
    """Wait for running requests."""
    app.admission.is_draining = True
    timeout_s = app.config.drain_timeout_s
    logger.warning(
        "shutting down: %d requests have %g s to finish; a second signal stops them",
        app.fleet.num_live,
        timeout_s,
    )
    deadline_s = time.monotonic() + timeout_s
    while app.fleet.num_live and time.monotonic() < deadline_s and not signals.second.is_set():
        await asyncio.sleep(0.05)

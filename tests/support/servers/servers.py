"""Real servers for tests: as ``ostinato serve`` runs them, in a thread, on a free port.

::

    with serving(state) as url:
        httpx.get(f"{url}/health")
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ostinato import AsyncLLM
from ostinato.engine.loop.snapshot import take_snapshot
from ostinato.server.config import ServerConfig
from ostinato.server.lifecycle import DrainingServer, listen
from ostinato.server.state import ServerState
from ostinato.server.telemetry.engine_watch import EngineWatch
from tests.support.engines import assert_idle
from tests.support.waiting import wait_until

_PATIENCE_S = 30


class ServerThread:
    """A server in a thread.

    Attributes:
        url: Its address.
        server: For tests that send it signals: ``server.handle_exit(signal.SIGTERM, None)``.
    """

    def __init__(self, state: ServerState, send_buffer_bytes: int | None = None) -> None:
        """Start, and wait until it takes requests."""
        self.url = ""
        self.server = DrainingServer(state, self._note)
        listener = listen(ServerConfig(port=0))
        if send_buffer_bytes is not None:  # of the connections, which inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self._thread = threading.Thread(target=self.server.run, args=([listener],))
        self._thread.start()
        wait_until(lambda: self.url != "")

    def _note(self, address: str) -> None:
        self.url = address

    def stop(self) -> None:
        """End it without a signal, so that its engine goes on."""
        self.server.should_exit = True
        self.join()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not end"


@contextmanager
def serving(state: ServerState, send_buffer_bytes: int | None = None) -> Iterator[str]:
    """Run a server until the block is left; returns its address. Its engine goes on.

    Every scrape reads the engine again, so that it counts what was answered before it.
    """
    state.snapshots = EngineWatch(state.llm, take_snapshot, reuse_factor=0)
    thread = ServerThread(state, send_buffer_bytes)
    try:
        yield thread.url
    finally:
        thread.stop()


def await_idle(llm: AsyncLLM) -> None:
    """Wait until an engine has nothing to do, and assert law 9 with its indexes checked."""
    wait_until(lambda: not llm.engine.has_work)
    assert_idle(llm.engine)


def await_idle_server(state: ServerState) -> None:
    """Wait until a server counts no unfinished request and its engine is idle (law 9).

    A client that goes away leaves its request behind: it may even start only after its client left.
    """
    wait_until(lambda: state.num_live == 0)
    await_idle(state.llm)


def events_of(response: httpx.Response) -> Iterator[str]:
    """Yield what each server-sent event of a response holds."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")

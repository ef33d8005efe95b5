"""Real servers for tests: uvicorn in a thread, on a free port of loopback.

::

    with serving(state) as url:
        httpx.get(f"{url}/health")
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from ostinato import AsyncLLM
from ostinato.server.app import create_app
from ostinato.server.state import ServerState
from tests.support.engines import assert_idle


@contextmanager
def serving(state: ServerState) -> Iterator[str]:
    """Run a server until the block is left; returns its address, without a slash at the end."""
    config = uvicorn.Config(
        create_app(state), host="127.0.0.1", port=0, log_level="warning", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def await_idle(llm: AsyncLLM, seconds: float = 10.0) -> None:
    """Wait until an engine has nothing to do, and assert law 9 with its indexes checked."""
    deadline = time.monotonic() + seconds
    while llm.engine.has_work and time.monotonic() < deadline:
        time.sleep(0.005)
    assert_idle(llm.engine)

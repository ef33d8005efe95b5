"""A client that does not read costs others neither places in the engine nor memory."""

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from ostinato.server.telemetry.observer import Observer, ServedRequest
from tests.server.keyed import MODEL, keyed_server
from tests.support.servers.servers import await_idle, serving
from tests.support.waiting import held_up, wait_until

N = 16


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(MODEL, num_blocks=512, max_num_seqs=N)
    yield llm
    llm.shutdown()


class Ended(Observer):
    """Counts the requests that have ended."""

    num_requests = 0

    def finished(self, record: ServedRequest) -> None:
        self.num_requests += 1


def silent_reader(url: str, max_tokens: int) -> socket.socket:
    """Ask for a stream of several hundred kilobytes, and read nothing."""
    body = {"model": MODEL, "prompt": "To be", "n": N, "max_tokens": max_tokens, "stream": True}
    data = json.dumps(body | {"temperature": 1, "logprobs": 5, "ignore_eos": True}).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    begun = connection.recv(12, socket.MSG_PEEK)
    assert begun == b"HTTP/1.1 200", connection.recv(1000)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except ConnectionResetError:
        pass  # closed with output that nobody has read
    return answer


def test_a_reader_that_stops_frees_its_place_when_its_output_is_computed(llm: AsyncLLM):
    """Two streams that nobody reads; a third client finds the whole server free."""
    state, ended = ServerState(llm, ServerConfig(model_names=(MODEL,), max_requests=2 * N)), Ended()
    state.observers.append(ended)
    with serving(state, send_buffer_bytes=4096) as url, ExitStack() as stack:
        silent = [stack.enter_context(silent_reader(url, 24)) for _ in range(2)]
        wait_until(lambda: ended.num_requests == 2)
        assert not state.num_live
        body = {"model": MODEL, "prompt": "To be", "max_tokens": 1, "n": N}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        for connection in silent:
            answer = b""
            while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                answer += connection.recv(65536)
            whole = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", answer)  # a chunk may end anywhere
            assert whole.count(b'"finish_reason":"length"') == N, "nothing is missed"
    await_idle(llm)


def test_a_reader_that_takes_nothing_in_time_is_disconnected(llm: AsyncLLM):
    """Its requests are cancelled, though they have hardly begun."""
    config = ServerConfig(model_names=(MODEL,), send_timeout_s=0.2)
    state = ServerState(llm, config)
    with serving(state, send_buffer_bytes=4096) as url, silent_reader(url, 230) as connection:
        wait_until(lambda: state.num_live)
        wait_until(lambda: not state.num_live)
        assert b"[DONE]" not in rest_of(connection)
    await_idle(llm)


@pytest.mark.parametrize("limit", ["max_unread_bytes", "max_tenant_unread_bytes"])
def test_unread_output_is_bounded_in_bytes(llm: AsyncLLM, limit: str):
    state = ServerState(llm, ServerConfig(model_names=(MODEL,), **{limit: 20_000}))
    with serving(state, send_buffer_bytes=4096) as url, silent_reader(url, 230) as connection:
        wait_until(lambda: state.num_live)
        wait_until(lambda: not state.num_live)
        assert b"[DONE]" not in rest_of(connection)
    await_idle(llm)


def test_a_key_has_a_share_of_the_places(tmp_path: Path):
    """Ann has four of eight places, and Bob finds half of the rest."""
    with keyed_server(tmp_path, server={"max_requests": 8}) as server:

        def status(tenant: str, n: int) -> tuple[int, str]:
            body = {"model": MODEL, "prompt": "To be", "n": n, "max_tokens": 1}
            answer = server.ask(tenant, "/v1/completions", body)
            return answer.status_code, answer.json().get("error", {}).get("code", "")

        assert status("ann", 5) == (400, "too_many_continuations")
        with ThreadPoolExecutor() as threads, held_up(server.state.llm.engine.runner):
            running = [threads.submit(status, "ann", 4)]
            wait_until(lambda: server.state.num_live == 4)
            assert status("ann", 1) == (429, "key_share")
            assert status("bob", 3) == (429, "key_share")
            running.append(threads.submit(status, "bob", 2))
            wait_until(lambda: server.state.num_live == 6)
            assert status("bob", 1) == (429, "key_share")
        assert [future.result()[0] for future in running] == [200, 200]

"""Half-sent requests do not keep others out, with and without a key."""

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.access.connections import LogLimit
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.server.keyed import keyed_server
from tests.support.servers.servers import serving

MOST = 8

POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    """Serve few connections, and wait for a head for half a second."""
    llm = AsyncLLM("tiny-shakespeare", num_blocks=64)
    yield ServerState(
        llm,
        ServerConfig(max_connections_per_address=MOST, header_timeout_s=0.5, body_timeout_s=0.5),
    )
    llm.shutdown()


def _connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _answer(connection: socket.socket) -> bytes:
    """Read one answer, which is an object of JSON."""
    answer = b""
    while not answer.endswith(b"}"):
        piece = connection.recv(4096)
        assert piece, f"the connection was closed after {answer!r}"
        answer += piece
    return answer


def test_a_new_connection_takes_the_place_of_the_oldest_half_sent_one(state: ServerState):
    """Fifty heads without an end; a whole request is answered at once."""
    with serving(state) as url, ExitStack() as stack:
        for _ in range(50):
            half = stack.enter_context(_connect(url))
            half.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\n"])
def test_a_head_that_never_ends_is_closed(state: ServerState, sent: bytes):
    """Byte by byte does not help: the time is that of the whole head."""
    with serving(state) as url, _connect(url) as half:
        half.sendall(sent)
        assert half.recv(100) == b""


def test_a_body_that_never_ends_is_refused(state: ServerState):
    with serving(state) as url, _connect(url) as half:
        half.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        answer = _answer(half)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"--body-timeout-s" in answer
        assert half.recv(100) == b"", "the connection is closed"


def test_a_body_that_trickles_is_refused_before_its_time_is_over(state: ServerState):
    """After the time for a head, it must have come at the minimum rate."""
    slow = ServerState(
        state.llm, ServerConfig(header_timeout_s=0.2, body_timeout_s=3600, min_body_rate=10**6)
    )
    with serving(slow) as url, _connect(url) as half:
        half.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        answer = _answer(half)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"--min-body-rate" in answer


def test_a_body_in_tiny_chunks_is_refused(state: ServerState):
    """Each costs the event loop as much as a large one: 240,000 bytes cost 1,024 chunks."""
    with serving(state) as url, _connect(url) as sender:
        sender.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 240_000)
        answer = _answer(sender)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"larger chunks" in answer
        assert sender.recv(100) == b"", "the connection is closed"


def test_what_follows_a_refusal_is_not_parsed(tmp_path: Path):
    """Without a key the answer comes at once, and the rest of the body is dropped."""
    with keyed_server(tmp_path) as server, _connect(server.url) as sender:
        sender.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        assert _answer(sender).startswith(b"HTTP/1.1 401 ")
        sender.sendall(b"no chunk at all\r\n" * 1000)
        assert sender.recv(100) == b"", "the connection is closed"


def test_a_head_in_tiny_pieces_is_closed(state: ServerState):
    """Each read costs the event loop, and a head has few of them."""
    with serving(state) as url, _connect(url) as sender:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        with pytest.raises(ConnectionError):
            for _ in range(10**6):
                sender.sendall(b"x")


def test_connections_are_kept_alive_between_requests(state: ServerState):
    """Ten requests over one connection; it counts as waiting only between them."""
    with serving(state) as url, httpx.Client(base_url=url) as client:
        for _ in range(10):
            assert client.get("/health").status_code == 200


def test_without_a_key_a_body_is_not_even_read(tmp_path: Path):
    """The answer comes while not one byte of the announced eight millions has been sent."""
    with keyed_server(tmp_path) as server, _connect(server.url) as half:
        half.sendall(POST + b"Content-Length: 8000000\r\n\r\n")
        assert half.recv(100).startswith(b"HTTP/1.1 401 ")


def test_bodies_of_one_tenant_together_are_bounded(tmp_path: Path):
    """Ann's third body does not fit; Bob's does."""
    body = b" " * 600
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\n"
        "Content-Length: 1000\r\n\r\n"
    )
    with (
        keyed_server(tmp_path, server={"max_tenant_body_bytes": 1500}) as server,
        ExitStack() as stack,
    ):
        for _ in range(2):
            half = stack.enter_context(_connect(server.url))
            half.sendall(head.format(server.keys["ann"]).encode() + body)
        third = stack.enter_context(_connect(server.url))
        third.sendall(head.format(server.keys["ann"]).encode() + body)
        answer = _answer(third)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"--max-tenant-body-bytes" in answer
        assert server.num_cached("bob", "To be") == 0


def test_a_message_is_logged_ten_times_a_minute():
    """Clients must not fill the disk with complaints about themselves."""
    limit = LogLimit()
    records = [logging.LogRecord("x", 30, "", 0, "Invalid request", (), None) for _ in range(25)]
    shown = [record.getMessage() for record in records if limit.filter(record)]
    assert len(shown) == 10
    assert "suppressed" in shown[-1]

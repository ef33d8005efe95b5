"""Connections that cost a client nothing: limits, and a time limit for each request's head."""

import asyncio
from contextlib import AsyncExitStack

from tests.router.stub_workers import Routed, names, routed, waiting_for
from tests.support.waiting import until

HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HEAD = HALF_A_HEAD + b"no\r\n\r\n"


async def connect(
    router: Routed, stack: AsyncExitStack, sent: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(router.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(sent)
    return reader, writer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def test_a_head_that_is_never_completed_ends_its_connection():
    """The first head of a connection, and one after a complete request."""
    async with routed(*names("a"), header_timeout_s=0.5) as router, AsyncExitStack() as stack:
        reader, _ = await connect(router, stack, HALF_A_HEAD)
        assert await is_closed(reader)
        reader, writer = await connect(router, stack, HEAD)
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(HALF_A_HEAD)
        assert await is_closed(reader)


async def test_the_oldest_unfinished_head_makes_room_for_a_new_connection():
    limits = {"max_connections": 8, "header_timeout_s": 60.0}
    async with routed(*names("a"), **limits) as router, AsyncExitStack() as stack:
        half_open = [await connect(router, stack, HALF_A_HEAD) for _ in range(30)]
        assert (await router.send("GET", "/health")).status == 200
        for reader, _ in half_open[:22]:
            assert await is_closed(reader)
        assert not half_open[-1][0].at_eof()


async def test_a_request_that_is_served_is_not_ended_for_new_connections():
    """One address may have two connections: the third is refused while both are served."""
    gate, [worker] = asyncio.Event(), names("a")
    worker.answer = waiting_for(gate)
    async with routed(worker, max_connections_per_address=2) as router, AsyncExitStack() as stack:
        served = [asyncio.create_task(router.post({"prompt": "x"})) for _ in range(2)]
        await until(lambda: worker.num_waiting == 2)
        reader, _ = await connect(router, stack, HEAD)
        assert await is_closed(reader)
        gate.set()
        assert [status for status, _ in await asyncio.gather(*served)] == [200, 200]

"""Clients and workers that misbehave: nothing of theirs stays assigned, running or connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import aiohttp
import pytest
from aiohttp import web

from ostinato.router.process.config import WorkerSpec
from ostinato.server.access.keys import add_key
from tests.router.stub_workers import Routed, StubWorker, begun, names, routed
from tests.support.waiting import until

TURN = {"prompt": "To be, or not to be. " * 40}
HEAD = b"HTTP/1.1 200 OK\r\n"
FLOOD = b"".join(b"X-%d: flood\r\n" % number for number in range(20_000))


def is_idle(router: Routed) -> bool:
    """Return whether no request is running, and no work is assigned to a worker."""
    fleet = router.app.fleet
    fleet.router.check()
    statuses = fleet.router.workers()
    assigned = sum(status.num_requests + status.load_tokens for status in statuses)
    return not (fleet.num_live or assigned or router.app.admission.num_live)


async def is_served(router: Routed, **request: Any) -> bool:
    """Whether an honest request is answered, after which nothing is left."""
    status, _ = await router.post(TURN, **request)
    await until(lambda: is_idle(router))
    return status == 200


# --- clients ---


async def speak(router: Routed, *pieces: bytes) -> bytes:
    """Send bytes over a connection of their own; returns the answer's first line."""
    port = int(router.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            for _ in range(4 if len(pieces) > 2 else 0):  # the router reads each by itself
                await asyncio.sleep(0)
        return await reader.readline()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


def post(**headers: object) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode()


FLOODED = post(Content_Length=2).replace(b"\r\n\r\n", b"\r\n" + FLOOD + b"\r\n")
CHUNKED, CHUNK = post(Transfer_Encoding="chunked"), b"1\r\nx\r\n"
HOSTILE = {
    "huge": ([post(Content_Length=10**12), b"x"], b" 413 "),
    "huge-chunked": ([CHUNKED, b"2000\r\n" + b"x" * 8192 + b"\r\n"], b" 413 "),
    "slow": ([post(Content_Length=9), b"{"], b" 408 "),
    "flood": ([FLOODED, b"{}"], b" 400 "),
    "long-header": ([post(X_Long="y" * 100_000, Content_Length=2), b"{}"], b" 400 "),
    "smuggled": ([post(Content_Length=2, Transfer_Encoding="chunked"), b"0\r\n\r\n"], b" 400 "),
    "bad-chunk": ([CHUNKED, b"zz\r\n"], b" 400 "),
    "bytes": ([CHUNKED + CHUNK, *[CHUNK] * 1300], b" 413 "),
    "wrong-key": ([post(Authorization="Bearer wrong", Content_Length=2), b"{}"], b" 401 "),
}
"""What is sent, and the status of the answer."""


@pytest.mark.parametrize(("pieces", "status"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_request_is_refused_and_nothing_of_it_reaches_a_worker(
    pieces, status, tmp_path
):
    key = add_key(tmp_path / "keys.json", "ann")

    [worker] = names("a")
    limits = {"max_requests": 1, "max_body_bytes": 4096, "body_timeout_s": 60.0}
    if b" 408 " in status:
        limits["body_timeout_s"] = 0.1
    keys = str(tmp_path / "keys.json")
    async with routed(worker, keys_file=keys, **limits) as router:
        with_key = [pieces[0].replace(b"Host", b"X-Api-Key: %s\r\nHost" % key.encode())]
        sent = pieces if b" 401 " in status else with_key + pieces[1:]
        assert status in await speak(router, *sent)
        await until(lambda: is_idle(router))
        assert worker.bodies == []
        if b" 408 " not in status:
            assert await is_served(router, headers={"x-api-key": key})


@pytest.mark.parametrize("point", ["body", "tokens", "head", "stream", "unread"])
async def test_a_client_may_leave_at_any_point_and_takes_its_work_along(point):
    """In its body, while tokens are counted, before the answer, within it, or reading nothing."""
    reached = asyncio.Event()

    async def wait(worker: StubWorker, request: web.Request, fields: Any) -> web.StreamResponse:
        if fields == TURN:
            return web.Response()
        if request.path == "/v1/completions" and point in ("stream", "unread"):
            response = await begun(request)
            reached.set()
            while point == "unread":
                await response.write(b"x" * 2**16)
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    [worker] = names("a")
    worker.answer, worker.tokenizes = wait, point == "tokens"
    silence_s = 0.2 if point == "unread" else 60.0
    async with routed(worker, silence_timeout_s=silence_s, retries=50) as router:
        port = int(router.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(Content_Length=20) + b'{"prompt":"To be"')
        if point != "body":
            writer.write(b"  }")
            await reached.wait()
        else:
            await until(lambda: router.app.admission.num_live)
        if point != "unread":
            writer.close()
        await until(lambda: is_idle(router))
        await until(lambda: worker.num_waiting == 0)
        writer.close()
        worker.tokenizes = False
        assert await is_served(router)


async def test_a_key_opens_no_answer_of_another_tenant_where_workers_cannot_tell_them_apart(
    tmp_path,
):
    """With ``replace_keys`` all requests come to the worker with one key: the router tells."""
    keys = tmp_path / "keys.json"
    ann, bob = add_key(keys, "ann"), add_key(keys, "bob")

    [worker] = names("a")
    theirs = {"worker_key": "theirs", "replace_keys": True}
    async with routed(worker, keys_file=str(keys), **theirs) as router:
        as_ann, as_bob = ({"x-api-key": key} for key in (ann, bob))
        _, answer = await router.post({"input": "Ay me!"}, "/v1/responses", headers=as_ann)
        for method, path, body in (
            ("GET", f"/v1/responses/{answer['id']}", None),
            ("DELETE", f"/v1/responses/{answer['id']}", None),
            ("POST", f"/v1/responses/{answer['id']}/cancel", {}),
            ("GET", f"/v1/explain/{answer['id']}", None),
            ("POST", "/v1/responses", {"previous_response_id": answer["id"]}),
        ):
            for headers, status in ((as_bob, 404), (as_ann, 200)):
                got = await router.send(method, path, json=body, headers=headers)
                assert got.status == status, (method, path)
        assert is_idle(router)


async def test_sessions_of_two_tenants_are_two_sessions_though_they_have_one_name(tmp_path):
    keys = tmp_path / "keys.json"
    ann, bob = add_key(keys, "ann"), add_key(keys, "bob")

    async with routed(*names("a", "b"), keys_file=str(keys), policy="session") as router:
        homes = []
        for key in (ann, bob):
            sent = {"json": TURN, "headers": {"x-api-key": key, "x-session-id": "play"}}
            answer = await router.send("POST", "/v1/completions", **sent)
            homes.append(answer.headers["x-ostinato-worker"])
        assert homes[0] != homes[1], "bob's request would show where ann's conversation is"


# --- workers ---


@asynccontextmanager
async def scripted(
    *pieces: bytes, ends: bool = True, gate: asyncio.Event | None = None
) -> AsyncIterator[WorkerSpec]:
    """Run a worker that is well, and answers each request with bytes, one piece per gate."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/v1/completions" not in head:
                status = b"200 OK" if b" /health " in head else b"404 Not Found"
                empty = b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                writer.write(b"HTTP/1.1 " + status + empty)
                return
            for number, piece in enumerate(pieces):
                if number and gate is not None:
                    await gate.wait()
                writer.write(piece)
                await writer.drain()
            if not ends:
                await reader.read()
                await asyncio.Event().wait()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield WorkerSpec(f"http://127.0.0.1:{port}", "evil")
    finally:
        server.close()


NONSENSE = {
    "garbage": (b"\x00\xff\x17 garbage \x01\r\n\r\n" * 9, True),
    "flood": (HEAD + FLOOD + b"\r\n", True),
    "long-header": (HEAD + b"X-Long: " + b"y" * 2**17, False),
    "endless": (HEAD + b"X-Endless: y", False),
    "silent": (b"", False),
    "length": (HEAD + b"Content-Length: -1\r\n\r\n", True),
    "bad-chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", True),
    "endless-refusal": (
        b"HTTP/1.1 503 Full\r\nContent-Length: 9999999\r\n\r\nnever whole",
        False,
    ),
}
"""What is answered, and whether the connection ends then."""


@pytest.mark.parametrize(("answer", "ends"), NONSENSE.values(), ids=NONSENSE)
async def test_a_worker_that_answers_nonsense_or_nothing_is_passed_over(answer, ends):
    """The next worker serves the request, as no byte was sent; nothing stays assigned."""
    [sound] = names("sound")
    async with (
        scripted(answer, ends=ends) as evil,
        routed(sound, silence_timeout_s=0.2, retries=50, policy="round_robin") as router,
    ):
        router.app.fleet.join(evil)
        await until(lambda: router.app.fleet.workers["evil"].is_well)
        for _ in range(2):  # one of them goes to the evil one first
            status, told = await router.post(TURN)
            assert (status, told["by"]) == (200, "sound")
        assert router.app.fleet.workers["evil"].num_failed >= 1
        await until(lambda: is_idle(router))


@pytest.mark.parametrize(
    ("head", "rest", "ends"),
    [
        (b"Content-Length: 99\r\n\r\ndata: 1\n\n", b"", True),
        (b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"zz\r\n", True),
        (b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"", False),
    ],
    ids=["short", "bad-chunk", "falls-silent"],
)
async def test_a_stream_that_turns_to_nonsense_or_falls_silent_is_broken_off(head, rest, ends):
    gate = asyncio.Event()
    async with (
        scripted(HEAD + head, rest, ends=ends, gate=gate) as evil,
        routed(silence_timeout_s=0.3, retries=50) as router,
    ):
        router.app.fleet.join(evil)
        await until(lambda: router.app.fleet.workers["evil"].is_well)
        async with router.client.post(f"{router.url}/v1/completions", json=TURN) as got:
            assert (got.status, await got.content.readany()) == (200, b"data: 1\n\n")
            gate.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.read()
        await until(lambda: is_idle(router))


async def test_a_worker_that_does_not_tokenize_in_time_holds_up_one_request_and_no_more():
    """Without a tokenizer of its own, the router asks the others."""

    async def never(worker: StubWorker, request: web.Request, fields: Any) -> web.StreamResponse:
        if request.path == "/tokenize":
            await asyncio.Event().wait()
        return web.json_response({"by": worker.name})

    [worker] = names("a")
    worker.answer, worker.tokenizes = never, True
    async with routed(worker) as router:
        with mock.patch("ostinato.router.process.worker.TOKENIZE_TIMEOUT_S", 0.1):
            for _ in range(3):
                assert await is_served(router)
    assert len(worker.bodies) == 4, "once for tokens, and three times for answers"


# --- workers that would not keep tenants apart ---


@pytest.mark.parametrize(
    ("worker_has_keys", "replaces_keys", "is_served"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
async def test_an_engine_that_would_take_tenants_for_one_caller_gets_none_of_their_requests(
    worker_has_keys: bool, replaces_keys: bool, is_served: bool, tmp_path
):
    """With one key for all, each tenant would have that key's rights, and see others' hits."""
    keys = tmp_path / "keys.json"
    ann, root = add_key(keys, "ann"), add_key(keys, "root", administers=True)

    settings = {"keys_file": str(keys), "worker_key": root, "replace_keys": replaces_keys}
    worker = StubWorker("a", is_ours=True, keys_file=str(keys) if worker_has_keys else None)
    async with routed(worker, **settings) as router:
        status, _ = await router.post({"prompt": "x"}, headers={"x-api-key": ann})
        assert status == (200 if is_served else 503)
        assert len(worker.bodies) == (1 if is_served else 0)
        answer = await router.send("GET", "/admin/workers", headers={"x-api-key": root})
        [row] = answer.json["workers"]
        assert ("Ostinato" in row["trouble"]) is not is_served


async def test_only_an_administrator_may_ask_to_go_first(tmp_path):
    """Also before workers that know nothing of keys."""
    keys = tmp_path / "keys.json"
    ann, root = add_key(keys, "ann"), add_key(keys, "root", administers=True)

    [worker] = names("a")
    async with routed(worker, keys_file=str(keys)) as router:
        for priority in (-1, -1.0, "-1", 0, None, [-1]):
            for key, is_free in ((ann, False), (root, True)):
                sent = {"prompt": "x", "priority": priority}
                status, answer = await router.post(sent, headers={"x-api-key": key})
                is_refused = not is_free and priority in (-1, "-1")
                assert status == (400 if is_refused else 200), (priority, answer)

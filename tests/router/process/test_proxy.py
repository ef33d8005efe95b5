"""What passes through the router, and what happens where something breaks, before stub workers."""

import asyncio
import gzip
import json
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ostinato.server.access.keys import add_key
from tests.router.stub_workers import (
    Routed,
    StubWorker,
    begun,
    echo,
    names,
    routed,
    stream,
    telling,
    waiting_for,
)
from tests.support.waiting import until


async def status_of(router: Routed, path: str = "/v1/completions", **request: Any) -> int:
    return (await router.send("POST", path, **request)).status


async def test_bodies_and_answers_pass_byte_for_byte():
    """Spaces, unknown fields, packed answers and queries; headers of one connection do not."""
    packed = gzip.compress(b"ay")

    async def answer(worker: StubWorker, request: web.Request, fields: Any) -> web.Response:
        headers = {"X-Cache": "warm", "Connection": "X-Own", "X-Own": "1"}
        assert request.query_string == "beta=true"
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", **headers})

    [worker] = names("a")
    worker.answer = answer
    body = b'{ "prompt":"\xc3\xa9" ,\n"odd": [1 , 2],"prompt_cache_key":null}'
    async with routed(worker) as router:
        sent = {"X-Mine": "1", "Authorization": "Bearer k", "x-ostinato-worker": "evil"}
        got = await router.send("POST", "/v1/messages?beta=true", data=body, headers=sent)
        assert got.text == "ay"
        assert got.headers["X-Cache"] == "warm" and "X-Own" not in got.headers
        assert got.headers["x-ostinato-worker"] == "a"
    assert worker.bodies == [body]
    [headers] = worker.headers
    assert (headers["X-Mine"], headers["Authorization"]) == ("1", "Bearer k")
    assert "x-ostinato-worker" not in headers


async def test_a_client_that_goes_away_takes_its_request_along():
    """Before the first byte, and in the middle of a stream."""

    async def hang(worker: StubWorker, request: web.Request, fields: Any) -> web.StreamResponse:
        if fields["begins"]:
            await begun(request)
        await asyncio.Event().wait()
        raise AssertionError

    async def leave(router: Routed, worker: StubWorker, begins: bool) -> None:
        sent, gone = len(worker.bodies) + 1, worker.gone + 1
        post = router.client.post(f"{router.url}/v1/completions", json={"begins": begins})
        task = asyncio.ensure_future(post.__aenter__())
        await until(lambda: len(worker.bodies) == sent)
        if begins:
            (await task).close()
        else:
            task.cancel()
        await until(lambda: worker.gone == gone)

    [worker] = names("a")
    worker.answer = hang
    async with routed(worker) as router:
        for begins in (False, True):
            await leave(router, worker, begins)
        await until(lambda: router.app.fleet.num_live == 0)


async def test_a_request_is_tried_elsewhere_only_while_no_byte_was_sent():
    received = asyncio.Event()

    async def break_off(
        worker: StubWorker, request: web.Request, fields: Any
    ) -> web.StreamResponse:
        if fields["begins"]:
            await begun(request)
            await received.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.StreamResponse()

    broken, sound = workers = names("broken", "sound")
    broken.answer = break_off
    async with routed(*workers, policy="round_robin") as router:
        for _ in range(4):
            status, answer = await router.post({"begins": False})
            assert (status, answer["by"]) == (200, "sound")
        before = len(broken.bodies) + len(sound.bodies)
        outcomes = []
        for _ in range(2):
            url, body = f"{router.url}/v1/completions", {"begins": True}
            async with router.client.post(url, json=body) as answer:
                content = await answer.content.readany()
                received.set()
                try:
                    content += await answer.content.read()
                    outcomes.append(json.loads(content)["by"])
                except aiohttp.ClientPayloadError:
                    outcomes.append("broke off")
        assert sorted(outcomes) == ["broke off", "sound"]
        assert len(broken.bodies) + len(sound.bodies) == before + 2


async def test_a_worker_that_cannot_is_passed_over_and_if_none_can_its_answer_is_handed_on():
    full, free = workers = names("full", "free")
    full.answer = telling(503)
    async with routed(*workers) as router:
        assert [(await router.post({}))[1]["by"] for _ in range(4)] == ["free"] * 4
        free.answer = full.answer
        status, answer = await router.post({})
        assert (status, answer["by"] in ("full", "free")) == (503, True)
        await asyncio.gather(full.kill(), free.kill())
        status, answer = await router.post({})
        assert (status, answer["error"]["code"]) == (503, "no_worker")


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_request_that_waits_for_a_worker_that_turns_ill_is_moved(is_alone: bool):
    """Unless no other can serve it: then it waits on, and is answered by the first."""
    gate = asyncio.Event()

    async def hang(worker: StubWorker, request: web.Request, fields: Any) -> web.StreamResponse:
        worker.health = 500
        await gate.wait()
        return await echo(worker, request, fields)

    ill, sound = workers = names("ill", "sound")
    ill.answer = hang
    async with routed(*workers[: 1 if is_alone else 2], policy="round_robin") as router:
        task = asyncio.create_task(router.post({"prompt": "Wherefore art thou?"}))
        await until(lambda: ill.num_waiting == 1)
        await until(lambda: not router.app.fleet.workers["ill"].is_well)
        if is_alone:
            gate.set()
        status, answer = await task
        assert (status, answer["by"]) == (200, "ill" if is_alone else "sound")
        assert len(sound.bodies) == (0 if is_alone else 1)
        await until(lambda: ill.num_waiting == 0)


async def test_an_attempt_that_failed_is_no_computed_prompt():
    """Nor is it charged to its key: the metrics and the limit count what a worker answered."""
    [worker] = names("a")
    worker.answer = telling(503)
    async with routed(worker) as router:
        assert (await router.post({"prompt": "Who's there?"}))[0] == 503
        assert "router_prompt_tokens_total{" not in (await router.send("GET", "/metrics")).text
        assert router.app.fleet.router.workers()[0].computed_tokens == 0
        worker.answer = None
        assert (await router.post({"prompt": "Who's there?"}))[0] == 200
        page = (await router.send("GET", "/metrics")).text
        assert 'router_prompt_tokens_total{worker="a"}' in page


async def test_workers_join_and_leave_while_requests_run():
    first, second = names("first", "second")
    await second.begin()
    gate = asyncio.Event()
    first.answer = waiting_for(gate)
    async with routed(first) as router:
        running = asyncio.create_task(router.post({"prompt": "long"}))
        await until(lambda: first.bodies)
        status, _ = await router.post({"url": second.url, "name": "second"}, "/admin/workers")
        assert status == 201
        answer = await router.send("DELETE", "/admin/workers/first")
        assert (answer.status, answer.json["num_live"]) == (202, 1)
        await until(lambda: router.app.fleet.workers["second"].is_well)
        assert (await router.post({"prompt": "long"}))[1]["by"] == "second"
        assert list(router.app.fleet.workers) == ["first", "second"]
        gate.set()
        assert (await running)[1]["by"] == "first"
        await until(lambda: list(router.app.fleet.workers) == ["second"])
        status, _ = await router.post({"url": f"{second.url}/v1?x=1"}, "/admin/workers")
        assert status == 400
    await second.end()


async def test_keys_open_routes_and_no_body_is_read_without_one(tmp_path):
    keys = tmp_path / "keys.json"
    root, ann = add_key(keys, "ops", administers=True), add_key(keys, "ann", max_requests=1)

    [worker] = names("a")
    settings = {"keys_file": str(keys), "worker_key": "theirs", "replace_keys": True}
    async with routed(worker, max_body_bytes=1000, **settings) as router:
        as_ann, as_root = ({"Authorization": f"Bearer {key}"} for key in (ann, root))
        assert await status_of(router, json={}) == 401
        assert await status_of(router, json={}, headers={"x-api-key": ann}) == 200
        assert worker.headers[0]["Authorization"] == "Bearer theirs"
        assert "x-api-key" not in worker.headers[0]
        for path in ("/route", "/admin/workers"):
            assert await status_of(router, path, json={}, headers=as_ann) == 403
        assert await status_of(router, "/route", json={}, headers=as_root) == 200
        large = b"x" * 2000
        assert await status_of(router, data=large, headers=as_ann) == 413

        async def pieces():
            for _ in range(20):
                yield b"y" * 100

        assert await status_of(router, data=pieces(), headers=as_ann) == 413
        assert len(worker.bodies) == 1


async def test_the_tokens_per_minute_of_a_key_are_those_of_the_fleet(tmp_path):
    keys = tmp_path / "keys.json"
    ann = add_key(keys, "ann", tokens_per_minute=600)
    workers = names("a", "b")
    for worker in workers:
        worker.answer = telling(usage={"completion_tokens": 700})
    headers = {"Authorization": f"Bearer {ann}"}
    async with routed(*workers, keys_file=str(keys)) as router:
        assert await status_of(router, json={"prompt": "To be"}, headers=headers) == 200
        assert await status_of(router, json={"prompt": "or not"}, headers=headers) == 429


async def test_nothing_but_the_operators_workers_is_ever_connected_to():
    """Not by redirects, whole addresses in the request line, foreign pages, or headers."""

    async def redirect(worker: StubWorker, request: web.Request, fields: Any) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/v1/completions"})

    [worker] = names("a")
    worker.answer = redirect
    async with routed(worker) as router:
        assert await status_of(router, json={}, allow_redirects=False) == 307
        for header in ("Host", "Origin"):
            foreign = {header: "http://evil.example" if header == "Origin" else "evil.example"}
            assert await status_of(router, json={}, headers=foreign) == 403
        port = int(router.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        line = b"POST http://127.0.0.1:1/v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        writer.write(line + b"Content-Length: 2\r\n\r\n{}")
        assert b" 307 " in await reader.readline()
        writer.close()
        assert len(worker.bodies) == 2


async def test_a_route_can_be_asked_for_alone_with_its_reasons():
    """For those who keep their gateway; a dry run leaves nothing behind."""
    workers = names("a", "b")
    async with routed(*workers) as router:
        body = {"prompt": "to be or not to be " * 20}
        _, told = await router.post(body, "/route?dry_run=1")
        assert told["status"] == "explained" and told["url"] in [w.url for w in workers]
        _, told = await router.post(body, "/route")
        assert {row["worker"] for row in told["candidates"]} == {"a", "b"}
        assert told["state"] == "guessed" and told["explanation"]
        path = f"/route/{told['decision']}"
        assert (await router.send("DELETE", path)).json["status"] == "finished"
        assert (await router.send("DELETE", path)).status == 409
        assert (await router.send("GET", path)).json["worker"] == told["worker"]
        _, again = await router.post(body, "/route")
        assert again["worker"] == told["worker"] and again["expected_cached_tokens"] > 300
        assert not any(worker.bodies for worker in workers)
        page = (await router.send("GET", "/metrics")).text
        assert 'ostinato_router_worker_up{worker="a"} 1.0' in page


async def test_a_prompt_is_prewarmed_at_as_many_workers_as_asked_for():
    workers = names("a", "b", "c")
    async with routed(*workers) as router:
        body = {"prompt": "All the world's a stage. " * 20}
        _, first = await router.post(body, "/admin/prewarm?copies=2")
        assert [row["status"] for row in first["sent"]] == ["finished"] * 2
        assert [len(worker.bodies) for worker in workers].count(1) == 2
        _, again = await router.post(body, "/admin/prewarm?copies=3")
        assert len(again["sent"]) == 1 and all(worker.bodies for worker in workers)
        assert json.loads(workers[0].bodies[0]) == {**body, "max_tokens": 1, "stream": False}


async def test_a_public_prefix_is_published_at_as_many_workers_as_asked_for_and_tenants_follow():
    """The prompts are token ids, and the workers say that they are Ostinatos."""
    workers = names("a", "b", "c")
    for worker in workers:
        worker.is_ours = True
    async with routed(*workers) as router:
        await until(lambda: all(w.is_ours for w in router.app.fleet.workers.values()))
        path, body = "/admin/public/play", {"prompt": list(range(64))}
        told = (await router.send("PUT", f"{path}?copies=2", json=body)).json["workers"]
        assert len(told) == 2 and all(each == {"num_tokens": 64} for each in told.values())
        for number in range(4):
            ask = {"prompt": [*range(64), *[number] * 8]}
            _, made = await router.post(ask, "/route?dry_run=1&path=/v1/completions")
            assert made["worker"] in told and made["expected_cached_tokens"] == 64
        assert (await router.send("PUT", f"{path}?copies=4", json=body)).status == 409
        _, answer = await router.post({}, f"{path}/unpublish")
        assert len(answer["workers"]) == 3
        _, made = await router.post(ask, "/route?dry_run=1&path=/v1/completions")
        assert made["expected_cached_tokens"] == 0


async def test_a_request_goes_to_a_worker_that_serves_its_model():
    large, small = workers = names("large", "small")
    large.models, small.models = ("l",), ("s", "both")
    async with routed(*workers) as router:
        for model, by in (("l", "large"), ("s", "small")):
            for _ in range(3):
                assert (await router.post({"model": model}))[1]["by"] == by
        listed = (await router.send("GET", "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["l", "s", "both"]
        assert (await router.post({"model": "none"}))[0] == 200, "a worker says so, not we"


@pytest.mark.parametrize(
    "num_requests",
    [300, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
    ids=str,
)
async def test_workers_that_are_killed_at_random_lose_nothing_that_had_not_begun(num_requests: int):
    """Each whole answer is that of its request, once; only begun streams may break off."""
    import random

    chance = random.Random(num_requests)

    async def slow(worker: StubWorker, request: web.Request, fields: Any) -> web.StreamResponse:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if fields["stream"]:
            return await stream(worker, request, fields)
        return web.json_response(fields)

    async def ask(router: Routed, number: int, tally: dict[str, int]) -> None:
        body = {"prompt": f"request {number}", "stream": number % 2 == 0, "pieces": 8}
        begun = b""
        try:
            async with router.client.post(f"{router.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for piece in answer.content.iter_any():
                    begun += piece
        except aiohttp.ClientPayloadError:
            assert body["stream"], "a whole answer was cut"
            tally["broke off"] += 1
            return
        if body["stream"]:
            wanted = (
                "".join(f"data: request {number}/{i}\n\n" for i in range(8)) + "data: [DONE]\n\n"
            )
            assert begun.decode() == wanted
        else:
            assert json.loads(begun) == body
        tally["whole"] += 1

    async def kill_one_by_one(
        workers: list[StubWorker], router: Routed, done: asyncio.Event
    ) -> None:
        def is_seen(name: str, well: bool) -> bool:
            return done.is_set() or router.app.fleet.workers[name].is_well == well

        while not done.is_set():
            worker = chance.choice(workers)
            await worker.kill()
            await until(partial(is_seen, worker.name, False))
            await worker.begin()
            await until(partial(is_seen, worker.name, True))

    workers = names("a", "b", "c", "d")
    for worker in workers:
        worker.answer = slow
    tally, done = {"whole": 0, "broke off": 0, "kills": 0}, asyncio.Event()
    async with routed(*workers, retries=6, health_interval_s=0.01) as router:
        killing = asyncio.create_task(kill_one_by_one(workers, router, done))
        for start in range(0, num_requests, 20):
            batch = range(start, min(start + 20, num_requests))
            await asyncio.gather(*(ask(router, number, tally) for number in batch))
        done.set()
        await killing
        await until(lambda: router.app.fleet.num_live == 0)
        router.app.fleet.router.check()
    assert tally["whole"] + tally["broke off"] == num_requests
    assert tally["whole"] > num_requests / 2


@pytest.mark.parametrize(
    "name",
    ["x-session-id", "x-session-affinity", "x-claude-code-session-id", "session_id", "thread-id"],
)
async def test_the_conversation_is_read_from_the_headers_of_agents(name: str):
    """Two conversations have two homes, whatever the agent calls them; each keeps its own."""
    async with routed(*names("a", "b"), policy="session") as router:

        async def home(session: str) -> str:
            body = {"prompt": f"Of {session}.", "model": "tiny"}
            sent = {"json": body, "headers": {name: session}}
            answer = await router.send("POST", "/v1/completions", **sent)
            return answer.headers["x-ostinato-worker"]

        homes = {session: await home(session) for session in ("one", "two")}
        assert sorted(homes.values()) == ["a", "b"]
        for session in ("two", "one", "two"):
            assert await home(session) == homes[session]


async def test_documents_of_one_query_go_to_one_worker():
    """Its query is computed there; embeddings are compared by their first text."""
    workers = names("a", "b", "c")
    async with routed(*workers) as router:
        for number in range(6):
            for query in ("Who is king of Denmark? " * 9, "Where does it rain? " * 9):
                body = {"query": query, "documents": [f"document {number}"], "model": "m"}
                assert await status_of(router, "/v1/rerank", json=body) == 200
    marks = (b"Denmark", b"rain")
    homes = [[sum(mark in body for body in each.bodies) for each in workers] for mark in marks]
    assert [sorted(counts) for counts in homes] == [[0, 0, 6], [0, 0, 6]]


@pytest.mark.parametrize("kind", ["embd", "score", "rerank", "classify", "choose", "cmpl"])
async def test_an_explanation_comes_from_the_worker_that_answered(kind: str):
    """Also of one text of many: its number follows the id."""
    async with routed(*names("a", "b")) as router:

        async def worker_of(method: str, path: str, **body: Any) -> str:
            return (await router.send(method, path, json=body)).headers["x-ostinato-worker"]

        for number in range(4):
            name = f"{kind}-{number:032x}"
            query = {"query": f"{number} " * 200, "documents": ["a"], "id": name}
            home = await worker_of("POST", "/v1/rerank", **query)
            for suffix in ("", "-0", "-17"):
                assert await worker_of("GET", f"/v1/explain/{name}{suffix}") == home

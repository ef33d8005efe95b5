"""What happens while the engine computes: health, leaving, full queues, failures, the end."""

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from ostinato import LLM, AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from ostinato.server.telemetry.observer import ServedRequest
from ostinato.tenants.terms import LeaseId
from tests.engine.loop.faults import sabotage
from tests.support.servers.servers import (
    ServerThread,
    await_idle,
    await_idle_server,
    events_of,
    serving,
)
from tests.support.waiting import held_up, wait_until

MODEL = "tiny-shakespeare"
LONG: Any = {"model": MODEL, "prompt": "To be", "max_tokens": 400, "ignore_eos": True}


class Notes:
    """An observer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ServedRequest]] = []
        self.refusals: list[str | None] = []

    def accepted(self, record: ServedRequest) -> None:
        self.told.append(("accepted", record))

    def first_token(self, record: ServedRequest) -> None:
        self.told.append(("first_token", record))

    def finished(self, record: ServedRequest) -> None:
        self.told.append(("finished", record))

    def refused(self, caller: object, call: object, error: Any) -> None:
        self.refusals.append(error.code)


def test_health_is_answered_while_a_step_is_computed(
    http: httpx.Client, url: str, state: ServerState
):
    """The step ends only when all answers are there: if it held up the event loop, none was."""
    call = {**LONG, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        with held_up(state.llm.engine.runner) as begun:
            completing = pool.submit(httpx.post, f"{url}/v1/completions", json=call, timeout=120)
            assert begun.wait(60)
            assert [http.get("/health").status_code for _ in range(5)] == [200] * 5
        assert completing.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_takes_the_request_along(http: httpx.Client, state: ServerState, stream):
    """Long before its 900 tokens were there, its blocks are free again."""
    call = {**LONG, "max_tokens": 900, "stream": stream, "n": 2}
    free = state.llm.engine.cache.manager.pool.num_free
    if stream:
        with http.stream("POST", "/v1/completions", json=call) as response:
            next(events_of(response))
            before = state.llm.engine.scheduler_stats.computed_output_tokens
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=call, timeout=0.2)
        before = state.llm.engine.scheduler_stats.computed_output_tokens
    await_idle_server(state)

    assert state.llm.engine.scheduler_stats.computed_output_tokens - before < 900
    assert state.llm.engine.cache.manager.pool.num_free == free


def test_a_full_queue_says_so_and_when_to_come_again():
    llm = AsyncLLM(MODEL, num_blocks=256)
    notes = Notes()
    state = ServerState(llm, ServerConfig(max_requests=3), observers=[notes])
    long = {**LONG, "n": 2, "max_tokens": 900}
    with serving(state) as url, httpx.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json={**long, "stream": True}) as one:
            events = events_of(one)  # kept: dropping it would close the stream
            next(events)
            full = http.post("/v1/completions", json=long)
            never = http.post("/v1/completions", json={**long, "n": 4})
            many = http.post("/v1/completions", json={**LONG, "prompt": [[1], [2]]})
            chat = http.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "Ho"}], "n": 2},
            )
            fits = http.post("/v1/completions", json={**LONG, "max_tokens": 1})
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        assert full.json()["error"]["code"] == "queue_full"
        assert never.status_code == 400
        assert "--max-requests" in never.json()["error"]["message"]
        assert (many.status_code, chat.status_code) == (429, 429)
        assert notes.refusals == ["queue_full", "too_many_continuations"] + ["queue_full"] * 2
        assert fits.status_code == 200
        wait_until(lambda: state.num_live == 0)
        assert http.post("/v1/completions", json={**long, "max_tokens": 1}).status_code == 200
    await_idle(llm)
    llm.shutdown()


@pytest.fixture
def notes(state: ServerState) -> Iterator[Notes]:
    """Watch the server's requests."""
    notes = Notes()
    state.observers.append(notes)
    yield notes
    state.observers.remove(notes)


def test_observers_learn_of_each_request_how_it_went(
    http: httpx.Client, notes: Notes, state: ServerState
):
    """One that ends, one that can never be served, and one whose reader leaves."""
    http.post("/v1/completions", json={**LONG, "max_tokens": 3, "user": "ann"})
    http.post("/v1/completions", json={**LONG, "prompt": [10**6]})
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        next(events_of(response))
    wait_until(lambda: state.num_live == 0)

    assert [what for what, _ in notes.told] == [
        *("accepted", "first_token", "finished"),
        *("accepted", "finished"),
        *("accepted", "first_token", "finished"),
    ]
    well, refused, left = [record for what, record in notes.told if what == "finished"]
    assert well.output is not None and well.output.finished and not well.is_gone
    assert (well.call.user, well.error) == ("ann", None)
    assert refused.error is not None and refused.error.status == 400
    assert left.is_gone and left.error is None


@pytest.fixture
def breakable() -> Iterator[ServerState]:
    """Serve the embedded model with an engine of its own."""
    llm = AsyncLLM(MODEL, num_blocks=256, forward="plain")  # a hook of its modules raises
    yield ServerState(llm)
    llm.shutdown()


def test_a_failed_step_fails_its_requests_and_no_others(breakable: ServerState):
    """Before its first token a request gets a 500, after it an event; the next one is served."""
    with serving(breakable) as url, httpx.Client(base_url=url) as http:
        with _sabotage(breakable.llm):
            whole = http.post("/v1/completions", json=LONG)
        with _sabotage(breakable.llm):
            early = http.post("/v1/completions", json={**LONG, "stream": True})
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            events = events_of(response)
            next(events)
            with _sabotage(breakable.llm):
                *_, last = events
        for answer in (whole, early):
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "step_failed"
        assert json.loads(last)["error"]["code"] == "step_failed"
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        await_idle(breakable.llm)


def test_openais_client_raises_what_a_stream_dies_of(breakable: ServerState):
    with (
        serving(breakable) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = iter(
            client.completions.create(model=MODEL, prompt="To be", max_tokens=500, stream=True)
        )
        next(stream)
        with _sabotage(breakable.llm), pytest.raises(openai.APIError, match="a layer gave up"):
            list(stream)


def _sabotage(llm: AsyncLLM) -> Any:
    """Make the next forward pass raise; the helper wants an ``LLM``, for its ``engine`` alone."""
    lender: Any = llm
    offline: LLM = lender
    return sabotage(offline)


@pytest.mark.parametrize("how", ["a second signal", "the timeout"])
def test_draining_does_not_wait_for_ever(breakable: ServerState, how: str):
    """What still runs is ended, and its reader is told."""
    timeout_s = 60.0 if how == "a second signal" else 0.1
    state = ServerState(breakable.llm, ServerConfig(drain_timeout_s=timeout_s))
    thread = ServerThread(state)
    call = {**LONG, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{thread.url}/v1/completions", json=call) as response:
        events = events_of(response)
        next(events)
        thread.server.handle_exit(signal.SIGTERM, None)
        if how == "a second signal":
            assert httpx.get(f"{thread.url}/ready").json() == {"status": "draining"}
            thread.server.handle_exit(signal.SIGTERM, None)
        *_, last = events
    thread.join()

    assert json.loads(last)["error"]["type"] == "server_error"
    assert not state.llm.is_running and state.num_live == 0


def test_a_prompt_that_is_kept_for_a_day_outlives_the_crowd():
    """`prompt_cache_retention`: one lease, however often it is asked for; others are evicted."""
    llm = AsyncLLM(MODEL, num_blocks=40, block_size=4, max_model_len=64)
    with serving(ServerState(llm)) as url, httpx.Client(base_url=url) as http:

        def details(prompt: str, **more: Any) -> dict[str, int]:
            call = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}
            answer = http.post("/v1/completions", json=call).raise_for_status().json()
            counts: dict[str, int] = answer["usage"]["prompt_tokens_details"]
            counts.pop("cache_write_tokens", None)
            return counts

        kept, other = "Kept for a day, all of it", "Held in memory as all are"
        first = details(kept, prompt_cache_retention="24h")
        again = details(kept, prompt_cache_retention="24h")
        details(other, prompt_cache_retention="in_memory")
        for number in range(20):
            details(f"{number} citizens, and a voice that none has heard")

        assert first == {"cached_tokens": 0, "retained_tokens": 24}
        assert again == {"cached_tokens": 24, "retained_tokens": 24}
        assert details(other) == {"cached_tokens": 0}
        assert details(kept) == {"cached_tokens": 24}
    assert asyncio.run(llm.end_lease(LeaseId(0)))
    assert not asyncio.run(llm.end_lease(LeaseId(1))), "the prompt was leased twice"
    await_idle(llm)
    llm.shutdown()

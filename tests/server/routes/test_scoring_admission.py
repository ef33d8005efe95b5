"""A request of many texts is admitted as a whole or refused before any work, and leaves nothing."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from ostinato.server.access.callers import ANONYMOUS
from ostinato.server.errors import ApiError
from ostinato.server.telemetry.observer import Observer, ServedRequest
from tests.server.keyed import MODEL, Keyed, keyed_server
from tests.support.servers.servers import await_idle, await_idle_server
from tests.support.waiting import wait_until

TEXTS = [f"text number {number}" for number in range(10, 22)]


class Places(Observer):
    """Counts requests, and can try to get a place of the key whenever one has ended."""

    def __init__(self, keyed: Keyed) -> None:
        self._limit, self.num_accepted, self.num_refused = keyed.state.rate_limit, 0, 0
        self.caller, self.intrudes = ANONYMOUS, False

    def accepted(self, record: ServedRequest) -> None:
        self.num_accepted, self.caller = self.num_accepted + 1, record.caller

    def finished(self, record: ServedRequest) -> None:
        if not self.intrudes:
            return
        try:
            self._limit.enter(record.caller, 1)
        except ApiError:
            self.num_refused += 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """Serve keys that may have two requests at once, one of them with few tokens per minute."""
    tenants = {
        "pair": {"max_requests": 2},
        "poor": {"max_requests": 2, "tokens_per_minute": 30},
    }
    with keyed_server(tmp_path_factory.mktemp("keys"), tenants) as server:
        yield server


@pytest.fixture
def places(served: Keyed) -> Iterator[Places]:
    """Observe the server's requests; afterwards nothing runs (law 9)."""
    observer = Places(served)
    served.state.observers.append(observer)
    yield observer
    served.state.observers.remove(observer)
    await_idle_server(served.state)


def embed(served: Keyed, tenant: str, texts: list) -> httpx.Response:
    return served.ask(tenant, "/v1/embeddings", {"model": MODEL, "input": texts})


def test_a_budget_that_ends_midway_refuses_the_next_request(served: Keyed, places: Places):
    """The bucket of tokens goes into debt, as with one long prompt."""
    answer = embed(served, "poor", TEXTS)
    assert answer.status_code == 200, answer.text
    assert places.num_accepted == len(TEXTS)

    refused = embed(served, "poor", TEXTS[:1])

    assert refused.status_code == 429
    assert "30 tokens per minute" in refused.json()["error"]["message"]
    assert places.num_accepted == len(TEXTS)


def test_other_requests_take_no_place_of_an_admitted_one(served: Keyed, places: Places):
    """Whenever one of its texts has ended, another request of the key asks for its place."""
    places.intrudes = True

    answer = embed(served, "pair", TEXTS)

    assert answer.status_code == 200, answer.text
    assert places.num_refused == len(TEXTS)


def test_without_places_no_text_is_tokenized(
    served: Keyed, places: Places, monkeypatch: pytest.MonkeyPatch
):
    embed(served, "pair", TEXTS[:1])  # so that its caller is known
    texts: list[object] = []
    monkeypatch.setattr(served.state.llm.engine.scorer, "cut", lambda *given: texts.append(given))
    served.state.rate_limit.enter(places.caller, 1)
    try:
        answer = embed(served, "pair", TEXTS)
    finally:
        served.state.rate_limit.leave(places.caller, 1)

    assert answer.status_code == 429
    assert "1 of 2 continuations" in answer.json()["error"]["message"]
    assert texts == []


@pytest.mark.parametrize(
    ("last", "named"),
    [("long " * 600, "max_model_len=2048"), ("", "no tokens"), ([5000], "token id 5000")],
)
def test_a_text_that_cannot_be_served_is_named_before_any_is_computed(
    served: Keyed, places: Places, last: object, named: str
):
    first = TEXTS if isinstance(last, str) else [[1, 2]] * len(TEXTS)
    answer = embed(served, "pair", [*first, last])

    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert "text 12 " in answer.json()["error"]["message"]
    assert places.num_accepted == 0


def test_a_client_that_goes_away_ends_all_of_its_texts(
    served: Keyed, places: Places, monkeypatch: pytest.MonkeyPatch
):
    """Two of twelve texts are in the engine, which is held in its step until the client is gone."""
    runner, begun, go_on = served.state.llm.engine.runner, threading.Event(), threading.Event()
    execute = runner.execute

    def held(*arguments, **keywords):
        begun.set()
        assert go_on.wait(30)
        return execute(*arguments, **keywords)

    monkeypatch.setattr(runner, "execute", held)
    try:
        with served.client("pair") as client:
            with pytest.raises(httpx.ReadTimeout):
                body = {"model": MODEL, "input": TEXTS}
                client.post("/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=0.2))
            assert begun.wait(30)
        wait_until(lambda: served.state.num_live == 0)
    finally:
        go_on.set()

    await_idle(served.state.llm)
    assert places.num_accepted == 2

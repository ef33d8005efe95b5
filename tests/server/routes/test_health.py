"""Health, readiness, version and models."""

import httpx
import pytest

import ostinato


def test_health_readiness_and_version_need_no_model(http: httpx.Client):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": ostinato.__version__}


def test_the_model_is_listed_under_each_of_its_names(http: httpx.Client):
    cards = http.get("/v1/models").json()["data"]

    assert [card["id"] for card in cards] == ["tiny-shakespeare", "bard"]
    assert http.get("/v1/models/bard").json() == cards[1]
    assert http.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_are_refused_in_openais_shape(http: httpx.Client):
    unknown = http.get("/v1/nothing")
    wrong = http.delete("/v1/models")

    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "stranger",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "[not an address"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
def test_pages_of_strangers_are_not_let_in_without_keys(http: httpx.Client, stranger):
    """DNS rebinding, and requests across sites: a browser sends them on behalf of anybody."""
    refused = http.post("/tokenize", json={"prompt": "x"}, headers=stranger)

    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "foreign_host"


@pytest.mark.parametrize(
    "own",
    [
        {"host": "localhost:8000"},
        {"host": "[::1]:8000"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "http://localhost"},
    ],
)
def test_pages_of_this_machine_are_let_in(http: httpx.Client, own: dict[str, str]):
    assert http.post("/tokenize", json={"prompt": "x"}, headers=own).status_code == 200

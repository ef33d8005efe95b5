"""Health, readiness, version and models."""

import httpx

import ostinato


def test_health_readiness_and_version_need_no_model(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": ostinato.__version__}


def test_the_model_is_listed_under_each_of_its_names(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()["data"]

    assert [card["id"] for card in cards] == ["tiny-shakespeare", "bard"]
    assert http.get("/v1/models/bard").json() == cards[1]
    assert http.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_are_refused_in_openais_shape(http: httpx.Client) -> None:
    unknown = http.get("/v1/nothing")
    wrong = http.delete("/v1/models")

    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")

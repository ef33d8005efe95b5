"""``GET /v1/explain/ID``: the sender of a request learns why it missed, and no other tenant."""

import httpx
import pytest

from tests.server.keyed import MODEL, Keyed, keyed_server

PROMPT = "When shall we three meet again, in thunder, lightning, or in rain? "


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    with keyed_server(tmp_path_factory.mktemp("keys"), {}) as server:
        yield server


def test_a_chat_is_told_in_which_message_it_differs(http: httpx.Client):
    ids = []
    for weather in ("fair", "foul"):
        messages = [
            {"role": "system", "content": f"The weather is {weather}, and the battle lost."},
            {"role": "user", "content": "Where the place?"},
        ]
        body = {"model": "bard", "messages": messages, "max_tokens": 1, "cache_salt": "witch"}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        ids.append(answer.json()["id"])
    told = http.get(f"/v1/explain/{ids[1]}").json()
    assert told["difference"]["place"] == "messages[0] (system), line 1, column 17"
    assert told["spans"][-1]["reason"] == "differs"
    assert told["spans"][-1]["request"] == ids[0]
    assert "^" in told["text"]


def test_a_completion_is_known_by_its_id(http: httpx.Client):
    body = {"model": "bard", "prompt": PROMPT, "max_tokens": 1, "cache_salt": "toad"}
    answer = http.post("/v1/completions", json=body).json()
    told = http.get(f"/v1/explain/{answer['id']}").json()
    assert told["num_tokens"] == answer["usage"]["prompt_tokens"]
    assert http.get(f"/v1/explain/{answer['id']}-0").json()["num_tokens"] == told["num_tokens"]


def test_who_asks_of_nothing_gets_a_404(http: httpx.Client):
    answer = http.get("/v1/explain/nothing")
    assert answer.status_code == 404
    assert "'nothing' is not remembered" in answer.json()["error"]["message"]


def test_no_tenant_learns_of_another_s_request(keyed: Keyed):
    mine, theirs = (keyed.complete(tenant, PROMPT)["id"] for tenant in ("ann", "bob"))
    assert keyed.ask("ann", f"/v1/explain/{mine}", method="GET").status_code == 200
    for tenant in ("bob", "ops"):
        answer = keyed.ask(tenant, f"/v1/explain/{mine}", method="GET")
        assert answer.status_code == 404
        unknown = keyed.ask(tenant, "/v1/explain/nothing-at-all", method="GET")
        same = answer.text.replace(mine, "nothing-at-all").replace("-0'", "'")
        assert same == unknown.text.replace("-0'", "'")
    told = keyed.ask("bob", f"/v1/explain/{theirs}", method="GET").json()
    assert [s["reason"] for s in told["spans"]] == ["never seen"]
    assert (told["num_remembered"], told["num_forgotten"]) == (0, 0)


def test_a_wait_for_a_stranger_s_work_is_told_apart_from_the_own_tenant_s(keyed: Keyed):
    """While Ann's answer streams, Bob's two prompts take part in her steps, and in each other's."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with keyed.client("ann").stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        prompts = [PROMPT, PROMPT[::-1]]
        name = keyed.complete("bob", prompts, max_tokens=60, ignore_eos=True)["id"]
    waits = [
        keyed.ask("bob", f"/v1/explain/{name}-{number}", method="GET").json()["wait"]
        for number in (0, 1)
    ]
    for wait in waits:
        parts_s = wait["own_s"] + wait["tenant_s"] + wait["others_s"]
        assert wait["own_s"] > 0 and wait["others_s"] > 0
        assert parts_s <= wait["seconds"] * (1 + 1e-6)
    assert any(wait["tenant_s"] > 0 for wait in waits), "one ran beside the other"
    alone = keyed.complete("bob", PROMPT[1:] + "?")["id"]
    wait = keyed.ask("bob", f"/v1/explain/{alone}", method="GET").json()["wait"]
    assert wait["tenant_s"] == 0

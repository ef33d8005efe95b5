"""Beam search over HTTP, in vLLM's fields."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.keyed import MODEL, Keyed, keyed_server
from tests.support.servers.servers import await_idle_server

PROMPT = "To be, or not to be, that is the question:"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    tenants: dict[str, Any] = {"one": {}, "poor": {"tokens_per_minute": 60}}
    with keyed_server(tmp_path_factory.mktemp("keys"), tenants) as server:
        yield server
        await_idle_server(server.state)


def ask(served: Keyed, tenant: str = "one", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "use_beam_search": True}
    return served.ask(tenant, "/v1/completions", {**body, **fields})


def test_the_best_answers_come_first_and_share_the_prompt(served: Keyed):
    first, again = (ask(served, n=3, beam_width=5, logprobs=1).json() for _ in range(2))

    sums = [sum(c["logprobs"]["token_logprobs"]) for c in first["choices"]]
    lengths = [len(c["logprobs"]["tokens"]) for c in first["choices"]]
    scores = [total / length for total, length in zip(sums, lengths, strict=True)]
    assert scores == sorted(scores, reverse=True)
    assert len({choice["text"] for choice in first["choices"]}) == 3
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in first["choices"]]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


def test_more_beams_find_an_answer_that_is_at_least_as_likely(served: Keyed):
    """One beam is greedy search."""
    totals = []
    for width in (1, 8):
        [choice] = ask(served, n=1, beam_width=width, logprobs=0).json()["choices"]
        totals.append(sum(choice["logprobs"]["token_logprobs"]))
    greedy = ask(served, use_beam_search=False, temperature=0).json()["choices"][0]["text"]

    assert totals[1] > totals[0]
    assert ask(served, n=1).json()["choices"][0]["text"] == greedy


def test_a_stream_gets_all_answers_at_its_end(served: Keyed):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.keys["one"])
    messages: list[Any] = [{"role": "user", "content": "Who is there?"}]
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "n": 2}
    extra = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}

    whole = client.chat.completions.create(messages=messages, extra_body=extra, **settings)
    texts = ["", ""]
    for chunk in client.chat.completions.create(
        messages=messages, extra_body=extra, stream=True, **settings
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3, "beam_width": 2}, "n=3 is above beam_width=2"),
        ({"beam_width": 10**6}, "at most 128 on this server"),
        ({"temperature": 0.5}, "temperature=0.5"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"stop": "x"}, "stop="),
        ({"logit_bias": {"7": 1}}, "logit_bias="),
        ({"guided_choice": ["a"]}, "structured_outputs="),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs=1"),
        ({"echo": True, "max_tokens": 0}, "there is nothing to search"),
        ({"stop_token_ids": [*range(3, 30)]}, "27 stop_token_ids: at most 16"),
        ({"length_penalty": 99}, "length_penalty=99"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "beam_width": 2}, "set use_beam_search=true"),
    ],
)
def test_what_beams_do_not_take_is_refused_by_name(
    served: Keyed, fields: dict[str, Any], message: str
):
    answer = ask(served, **fields)

    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_tokens_of_beams_that_died_are_charged(served: Keyed):
    """One answer of 12 tokens is returned, and 8 beams were computed for it."""
    assert ask(served, "poor", n=1, beam_width=8).status_code == 200

    refused = ask(served, "poor", n=1)

    assert refused.status_code == 429


def test_a_client_that_goes_away_ends_its_beams(served: Keyed):
    with served.client("one") as client, pytest.raises(httpx.ReadTimeout):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
        body |= {"use_beam_search": True, "n": 8}
        client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.3))

    await_idle_server(served.state)


def test_metrics_say_what_beams_cost_and_what_each_route_hit(served: Keyed):
    def value(*parts: str) -> float:
        rows = served.ask("ops", "/metrics", method="GET").text.splitlines()
        rows = [row for row in rows if row[0] != "#" and all(part in row for part in parts)]
        return sum(float(row.split()[-1]) for row in rows)

    hits = "ostinato_route_prompt_tokens_total{", 'result="hit"', 'route="/v1/choose"'
    before = value("ostinato_beam_tokens_total "), value(*hits)
    ask(served, n=1, beam_width=4, max_tokens=3)
    body = {"model": MODEL, "prompt": f"{PROMPT} or ", "choices": ["a", "b", "c"]}
    usage = served.ask("one", "/v1/choose", body).json()["usage"]

    assert value("ostinato_beam_tokens_total ") - before[0] == 1 + 4 + 4
    assert value(*hits) - before[1] == usage["prompt_tokens_details"]["cached_tokens"] > 0

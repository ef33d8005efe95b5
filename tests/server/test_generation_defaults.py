"""Over HTTP, what a request leaves out samples as the model's generation config says."""

from typing import Any

import httpx
import pytest

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "ROMEO:", "max_tokens": 24}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ROMEO:"}]}),
    ("/v1/responses", {"input": "ROMEO:", "max_output_tokens": 24}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "ROMEO:"}], "max_tokens": 24}),
]


def ask(http: httpx.Client, path: str, body: dict[str, Any], **more: Any) -> Any:
    whole = {"model": "tiny-shakespeare", "seed": 5, **body, **more}
    answer = http.post(path, json=whole)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: Any) -> str:
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return parts[0]["text"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_temperature_that_is_left_out_is_the_models(http: httpx.Client, path, body):
    """The embedded model says 0.8; null is left out, and 1.0, OpenAI's own default, is not."""
    body = {"max_tokens": 24, **body} if path == "/v1/chat/completions" else body
    own = text_of(ask(http, path, body))
    assert own == text_of(ask(http, path, body, temperature=0.8))
    assert own == text_of(ask(http, path, body, temperature=None))
    assert own != text_of(ask(http, path, body, temperature=1.0))


def test_a_response_echoes_what_it_sampled_with(http: httpx.Client):
    path, body = BODIES[2]
    assert ask(http, path, body)["temperature"] == 0.8
    assert ask(http, path, body, temperature=0.1)["temperature"] == 0.1


def test_the_list_of_models_says_what_applies(http: httpx.Client):
    [card, _] = http.get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == {"temperature": 0.8, "max_tokens": 256}

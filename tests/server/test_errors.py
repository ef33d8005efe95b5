"""What is refused, with which status, and how it looks."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from ostinato.server.state import ServerState

MODEL = "tiny-shakespeare"
TEXT: Any = {"model": MODEL, "prompt": "To be", "max_tokens": 1}
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Ho!"}], "max_tokens": 1}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return a refusal, which has all of OpenAI's four fields."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_openais_client_raises_its_own_errors(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="this server has") as unknown:
        client.completions.create(model="gpt-4", prompt="To be")
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as wrong:
        client.completions.create(model=MODEL, prompt="To be", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="suffix") as unsupported:
        client.completions.create(model=MODEL, prompt="To be", suffix="x")

    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (wrong.value.type, wrong.value.param) == ("invalid_request_error", "temperature")
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "suffix")


def test_a_value_outside_of_its_range_is_named_with_the_range(http: httpx.Client):
    error = error_of(http.post("/v1/chat/completions", json={**CHAT, "max_tokens": -3}))

    assert error["message"].startswith("max_tokens=-3: ")
    assert "greater than or equal to 1" in error["message"]


def test_an_unknown_field_is_refused_where_the_operator_wants_it(http: httpx.Client, state):
    strict = replace(state.config, strict_fields=True)
    with patch.object(state, "config", strict):
        error = error_of(http.post("/v1/completions", json={**TEXT, "nonsense": 1}))

    assert (error["param"], error["code"]) == ("nonsense", "unknown_parameter")
    assert "--strict-fields" in error["message"]


def test_null_is_the_same_as_leaving_a_field_out(http: httpx.Client):
    answer = http.post("/v1/completions", json={**TEXT, "best_of": None, "temperature": None})

    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, None),
        ({"prompt": [[]]}, None),
        ({"prompt": ""}, None),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, None),
        ({"prompt": [10**6]}, None),
        ({"prompt": [2**70]}, None),
        ({"prompt": "x" * 5000}, None),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 10**400}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, None),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream": "yes"}, "stream"),
        ({"cache": {"read": 1}}, "cache.read"),
        ({"cache": {"erase": True}}, "cache.erase"),
        ({"cache_salt": "x" * 600}, "cache_salt"),
        ({"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": "24h", "cache": {"write": False}}, None),
        ({"priority": 2**40}, "priority"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2, "max_tokens": 2}, None),
        ({"structured_outputs": {"regex": "ab"}, "allowed_token_ids": [1]}, None),
    ],
)
def test_a_wrong_value_is_a_client_error(http: httpx.Client, wrong, param):
    assert error_of(http.post("/v1/completions", json={**TEXT, **wrong}))["param"] == param


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None),
        ({"top_logprobs": 3}, None),
        ({"logprobs": True, "top_logprobs": 5000}, "logprobs"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"reasoning_effort": {}}, "reasoning_effort"),
    ],
)
def test_a_wrong_chat_is_a_client_error(http: httpx.Client, wrong, param):
    assert error_of(http.post("/v1/chat/completions", json={**CHAT, **wrong}))["param"] == param


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 400, "missing_required_parameter"),
        (b"[]", 400, "invalid_type"),
        (b"null", 400, "invalid_type"),
        (b'{"model": "\xff"}', 400, "invalid_utf8"),
        (b'{"model": "tiny-shakespeare", "prompt": "\\ud800"}', 400, "invalid_value"),
        (b'{"model": "tiny-shakespeare", "prompt": ["a", "\\ud800"]}', 400, "invalid_value"),
        (b'{"model": "tiny-shakespeare", "prompt": "x", "stop": "\\ud800"}', 400, "invalid_value"),
        (b'{"model": "tiny-shakespeare", "prompt": "x", "user": "\\ud800"}', 400, "invalid_value"),
        (b'{"\\ud800": 1, "model": "x", "prompt": "x"}', 400, "invalid_value"),
        (b'{"model": "\\udfff", "prompt": "x"}', 404, "model_not_found"),
        (b"[" * 100_000, 400, "too_deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, 400, "too_deep"),
        (b'{"model": "x", "prompt": "' + b"[" * 1000 + b'"}', 404, "model_not_found"),
        (b'{"model": "' + b"9" * 5000 + b'", "prompt": "x"}', 404, "model_not_found"),
        (b'{"n": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b'{"model": "tiny-shakespeare", "prompt": "x", "top_p": NaN}', 400, "invalid_value"),
        (b'{"model": "tiny-shakespeare", "prompt": "x", "top_p": 1e999}', 400, "invalid_value"),
        (b'{"prompt": "' + b"x" * 9_000_000 + b'"}', 413, "body_too_large"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_a_body_that_is_no_sound_json_is_a_client_error(http: httpx.Client, body, status, code):
    headers = {"content-type": "application/json"}
    response = http.post("/v1/completions", content=body, headers=headers)

    assert error_of(response, status)["code"] == code


def test_a_body_that_is_sent_in_pieces_is_cut_off_as_well(http: httpx.Client):
    """Without a length announced, the bytes are counted as they come."""
    pieces = (b"x" * 2**20 for _ in range(20))
    response = http.post("/v1/completions", content=pieces)

    assert error_of(response, 413)["code"] == "body_too_large"


def test_a_prompt_that_can_never_fit_says_what_would(http: httpx.Client, state: ServerState):
    error = error_of(http.post("/v1/completions", json={**TEXT, "prompt": [1] * 100_000}))

    assert error["code"] == "context_length_exceeded"
    assert str(state.llm.max_model_len) in error["message"]


def test_one_wrong_prompt_among_many_refuses_all_and_leaves_nothing_running(http: httpx.Client):
    """The fixture asserts that the engine is idle afterwards."""
    prompts = [[1, 2, 3], [4, 5], [10**6]]
    error_of(http.post("/v1/completions", json={**TEXT, "prompt": prompts, "max_tokens": 500}))

"""Logs of requests: every API's bodies, whatever they are wrapped in, or an error by field."""

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.lab.log.request_log import parse_requests, read_request_log, render_plainly
from ostinato.lab.replay.explain_log import explain_log
from ostinato.lab.replay.word_tokens import word_tokenizer
from ostinato.settings import PrefixCacheConfig
from tests.lab.log.logged_requests import ANTHROPIC, CHAT, SAID, read, refused, rendered, write

# --- what reaches the prompt -----------------------------------------------------------------


def test_anthropic_requests_with_other_systems_are_other_prompts():
    """Both were once read as the same messages, so that nothing seemed to differ."""
    two = [read({**ANTHROPIC, "system": system}) for system in ("Be brief.", "Be long.")]
    first, second = explain_log(two, word_tokenizer(), PrefixCacheConfig(64, 4))
    assert first.reasons == ("never seen",)
    assert second.difference is not None
    assert second.difference.place.startswith("system, line 1, column 4")


def test_an_anthropic_request_is_written_tools_first_then_system_then_messages():
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "door"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A knight."}
    body = {
        **ANTHROPIC,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *SAID,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
    }
    assert rendered(body) == (
        '<|tools|>\n{"name": "look", "input_schema": {"type": "object"}}\n'
        "<|system|>\nBe brief.\n<|user|>\nWho comes?\n"
        '<|assistant|>\nI look.<tool_call id="toolu_1">'
        '{"name": "look", "arguments": {"at": "door"}}</tool_call>\n'
        "<|tool toolu_1|>\nA knight.\n<|user|>\nAnd?\n<|assistant|>\n"
    )


def test_a_request_to_the_responses_api_is_written_like_the_same_chat():
    items = [
        *SAID,
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "A knight."},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "A knight."},
    ]
    response = {"model": "m", "instructions": "Be brief.", "input": items}
    assert rendered(response) == rendered({"model": "m", "messages": messages})
    assert rendered({"model": "m", "input": "Who comes?"}) == rendered(CHAT)


def test_chat_templates_are_given_openai_messages_whatever_was_sent():
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "door"}}
    tools = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
    messages = [*SAID, {"role": "assistant", "content": [call]}]
    body = read({**ANTHROPIC, "messages": messages, "tools": tools}).body
    function = {"name": "look", "arguments": {"at": "door"}}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        *SAID,
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
    ]  # fmt: skip
    described = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": described}]


def test_older_calls_of_functions_are_read_as_tool_calls():
    old = {"role": "assistant", "content": None, "function_call": {"name": "look"}}
    said = {**CHAT, "messages": [*SAID, old, {"role": "function", "name": "look", "content": "A"}]}
    assert '{"name": "look"}' in rendered(said)
    call = read(said).body["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "look"}


def test_images_are_told_apart_by_content_however_their_base64_is_wrapped():
    def with_image(data: str) -> str:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return rendered(
            {
                **CHAT,
                "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            }
        )

    data = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8A" * 4
    wrapped = "\n".join(data[i : i + 76] for i in range(0, len(data), 76))
    assert "sha256:" in with_image(data) and data[:40] not in with_image(data)
    assert with_image(data) == with_image(wrapped) != with_image(data.replace("w", "x"))
    url = {"type": "image_url", "image_url": {"url": "https://a.example/b.png", "detail": "low"}}
    text = rendered({**CHAT, "messages": [{"role": "user", "content": [url]}]})
    assert "https://a.example/b.png" in text and "low" in text


@pytest.mark.parametrize(
    "setting",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"functions": [{"name": "look", "parameters": {}}]},
    ],
)
def test_parameters_that_reach_a_prompt_are_written(setting):
    assert rendered({**CHAT, **setting}) != rendered(CHAT)
    assert rendered({**CHAT, "temperature": 0.3, "seed": 5, "user": "ann"}) == rendered(CHAT)


# --- what is refused -------------------------------------------------------------------------


def part(**fields: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (part(type="hologram"), "messages[0].content[0]: type='hologram' is not understood"),
        (part(type="text", text=5), "messages[0].content[0].text must be a string, not 5"),
        (part(type="text", text="a", mood="sad"), "messages[0].content[0].mood is not understood"),
        ({**CHAT, "flavour": "sour"}, "flavour is not understood; if it does not change"),
        ({**CHAT, "messages": [{**SAID[0], "tone": 1}]}, "messages[0].tone is not understood"),
        ({**CHAT, "messages": [{"role": "bard", "content": "a"}]}, "messages[0].role='bard'"),
        ({**CHAT, "messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({**CHAT, "messages": ["Who?"]}, "messages[0] must be an object, not 'Who?'"),
        ({**CHAT, "messages": []}, "messages is empty"),
        ({**CHAT, "tools": [5]}, "tools[0] must be an object, not 5"),
        ({"model": "m", "input": [{"type": "item_reference", "id": "i"}]},
         "input[0]: type='item_reference' is not understood"),
        ({"model": "m", "input": "a", "prompt": {"id": "pmpt_1"}}, "prompt refers to what"),
        ({"model": "m", "input": "a", "previous_response_id": "resp_1"},
         "previous_response_id='resp_1': the log holds no earlier response"),
        ({"model": "m", "prompt": [1, 2, 3]}, "prompt holds token ids"),
        ({"model": "m", "contents": []}, "it has model, contents"),
        ({"request_body": "{torn"}, "request_body is no JSON"),
        ({**CHAT, "response": "data: {}"}, "leave it out with --ignore response"),
        ({**CHAT, "timestamp": "yesterday"}, "timestamp='yesterday' is neither a number nor"),
        ([CHAT], "must be an object, not list"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(record, reason):
    assert reason in refused(record)


def test_a_field_that_does_not_matter_can_be_ignored_at_any_depth():
    record = {**CHAT, "flavour": "sour", "messages": [{**SAID[0], "flavour": "sweet"}]}
    [request] = parse_requests(json.dumps(record), 1, ("flavour",))
    assert render_plainly(request) == rendered(CHAT)


# --- what it is wrapped in -------------------------------------------------------------------

ANSWER = {"id": "resp_7", "choices": [{"message": {"role": "assistant", "content": "A knight."}}]}
WRAPPED: dict[str, dict] = {
    "bare": CHAT,
    "openai batch": {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": CHAT},
    "anthropic batch": {"custom_id": "1", "params": ANTHROPIC},
    "helicone": {"request_body": json.dumps(CHAT), "response_body": json.dumps(ANSWER)},
    "portkey": {
        "request": {"url": "https://a.example", "method": "POST", "headers": {}, "body": CHAT},
        "response": {"status": 200, "body": ANSWER},
        "created_at": "2025-03-01T10:00:00Z",
    },
    "litellm": {
        "id": "x", "call_type": "acompletion", "startTime": 1.7e9, "model": "m", "messages": SAID,
        "model_parameters": {"temperature": 0}, "response": ANSWER, "response_cost": 0.1,
    },
    "litellm proxy": {
        "request_id": "x", "messages": {}, "response": ANSWER,
        "proxy_server_request": {"url": "/v1/messages", "body": ANTHROPIC},
    },
    "bedrock": {
        "timestamp": "2025-03-01T10:00:00Z", "modelId": "m",
        "input": {"inputBodyJson": {"anthropic_version": "b", "max_tokens": 9, "messages": SAID}},
        "output": {"outputBodyJson": {"id": "resp_7", "content": [{"type": "text",
                                                                   "text": "A knight."}]}},
    },
    "langfuse": {"input": {"messages": SAID}, "model": "m", "output": ANSWER},
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_a_request_is_found_in_what_gateways_write_around_it(name):
    request = read(WRAPPED[name])
    assert render_plainly(request).endswith("<|user|>\nWho comes?\n<|assistant|>\n")
    assert request.model == "m"
    if {"response", "response_body", "output"} & WRAPPED[name].keys():
        assert request.answer == "A knight."


def test_a_response_without_an_answer_or_with_an_error_is_none():
    for response in ({"choices": []}, {"error": {"code": 429}}, {"body": {"error": "no"}}, ""):
        assert read({**CHAT, "response": response}).answer == ""


def test_tools_that_litellm_logs_as_parameters_are_read():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    record = WRAPPED["litellm"] | {"model_parameters": {"tools": tools}}
    assert '"look"' in rendered(record)


@pytest.mark.parametrize(
    "moment", [1740823200, 1740823200000, 1740823200e6, "1740823200", "2025-03-01T10:00:00Z",
               "2025-03-01T11:00:00+01:00", "2025-03-01 10:00:00"]
)  # fmt: skip
def test_times_are_read_as_seconds_to_microseconds_or_iso(moment):
    assert read({"timestamp": moment, "body": CHAT}).at_s == 1740823200


def test_a_conversation_continued_by_the_id_of_a_response_is_completed(tmp_path: Path):
    first = {"body": {"model": "m", "instructions": "Be brief.", "input": "Who comes?"},
             "response": {"id": "resp_1", "output": [{"type": "message", "role": "assistant",
                          "content": [{"type": "output_text", "text": "A knight."}]}]}}  # fmt: skip
    second = {"model": "m", "instructions": "Be long.", "input": "And?",
              "previous_response_id": "resp_1"}  # fmt: skip
    log = read_request_log(write(tmp_path / "log.jsonl", [first, second]))
    assert render_plainly(log.requests[1]) == (
        "<|system|>\nBe long.\n<|user|>\nWho comes?\n<|assistant|>\nA knight.\n"
        "<|user|>\nAnd?\n<|assistant|>\n"
    )


def test_an_answer_that_was_logged_again_and_again_is_held_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostinato.lab.log.request_log.Conversations.MAX_LETTERS", 40)
    again = {"body": {"model": "m", "input": "Who comes?"},
             "response": {"id": "resp_1", "output": []}}  # fmt: skip
    more = {"model": "m", "input": "And?", "previous_response_id": "resp_1"}
    log = read_request_log(write(tmp_path / "log.jsonl", [*[again] * 9, more]))
    assert "Who comes?" in render_plainly(log.requests[9])


def test_several_prompts_of_one_request_are_several_requests(tmp_path: Path):
    log = write(tmp_path / "log.jsonl", [{"model": "m", "prompt": ["One", "Two"]}])
    assert [render_plainly(r) for r in read_request_log(log).requests] == ["One", "Two"]


def test_two_models_share_nothing():
    two = [read({**CHAT, "model": model}) for model in ("m-1", "m-2")]
    _, second = explain_log(two, word_tokenizer(), PrefixCacheConfig(64, 4))
    assert second.num_cached_tokens == 0 and second.reasons[0] == "other model"
    assert "seen from line 1, which asked for another model" in str(second)

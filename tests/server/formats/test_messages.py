"""Anthropic's API, as its official client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from ostinato.server.state import ServerState
from tests.server.formats.conftest import CITIES, says
from tests.server.formats.conftest import WEATHER_CALL as CALL

WEATHER: Any = {
    "name": "get_weather",
    "description": "Tell the weather.",
    "input_schema": CITIES,
}
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
LONG = "You are a helpful assistant. Answer briefly, and say so if you do not know. " * 5


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    """Lend the official client."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(claude: anthropic.Anthropic, messages: Any = ASK, **settings: Any) -> Any:
    settings = {"model": "scribe", "max_tokens": 100, **settings}
    return claude.messages.create(messages=messages, **settings)


def total(usage: Any) -> int:
    """Add up the tokens of the prompt."""
    return int(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


# --- text ---


def test_an_answer_has_the_familiar_shape(claude: anthropic.Anthropic):
    answer = ask(claude, system="Be kind.", extra_body=says("Very well."))

    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "scribe")
    assert answer.id.startswith("msg_")
    assert [(block.type, block.text) for block in answer.content] == [("text", "Very well.")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("settings", "reason", "sequence", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None, "Very"),
        ({"stop_sequences": ["nothing", "we"]}, "stop_sequence", "we", "Very "),
        ({}, "end_turn", None, "Very well."),
    ],
)
def test_it_says_why_it_ended(claude: anthropic.Anthropic, settings, reason, sequence, text):
    answer = ask(claude, extra_body=says("Very well."), **settings)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    assert answer.content[0].text == text or reason == "max_tokens"


def test_events_come_in_order(claude: anthropic.Anthropic):
    said = f"Look:\n{CALL}"
    stream = ask(claude, tools=[WEATHER], stream=True, extra_body=says(said))
    kinds = [event.type for event in stream]
    brief = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    one = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert brief == ["message_start", *one, *one, "message_delta", "message_stop"]


def test_the_system_text_may_come_in_blocks_and_content_too(claude: anthropic.Anthropic):
    blocks: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    in_blocks = claude.messages.count_tokens(model="scribe", system=blocks, messages=ASK)
    in_one = claude.messages.count_tokens(model="scribe", system="Be kind.", messages=ASK)
    assert in_blocks.input_tokens == in_one.input_tokens > 10


def test_counting_agrees_with_running(claude: anthropic.Anthropic):
    counted = claude.messages.count_tokens(
        model="scribe", messages=ASK, tools=[WEATHER], system=LONG
    )
    ran = ask(claude, tools=[WEATHER], system=LONG, max_tokens=1)
    assert counted.input_tokens == total(ran.usage)


def test_a_schema_is_kept(claude: anthropic.Anthropic):
    wanted = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    answer = ask(claude, extra_body={"output_config": wanted, "seed": 3})
    assert json.loads(answer.content[0].text)["city"] in ("Paris", "Oslo")


# --- tools ---


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_is_valid(claude: anthropic.Anthropic, choice: Any):
    choice = {**choice, "disable_parallel_tool_use": True}
    answer = ask(claude, tools=[WEATHER], tool_choice=choice, max_tokens=300)
    [call] = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Paris", "Oslo") and call.id.startswith("toolu_")


def test_calls_and_results_go_round(claude: anthropic.Anthropic):
    """Ask, call, answer the call, ask again, in a stream: the second prompt finds the first."""
    settings: Any = {"model": "scribe", "max_tokens": 100, "tools": [WEATHER]}
    extra = says(f"Let me look.\n{CALL}")
    with claude.messages.stream(**settings, messages=ASK, extra_body=extra) as stream:
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert first.stop_reason == "tool_use"
    call = first.content[1]
    assert call.type == "tool_use" and call.input == {"city": "Oslo"}

    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Snow."}
    more: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    second = ask(claude, more, tools=[WEATHER], max_tokens=3)
    assert second.usage.cache_read_input_tokens > 0.9 * total(first.usage)


def test_without_parallel_use_there_is_one_call(claude: anthropic.Anthropic):
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask(claude, tools=[WEATHER], tool_choice=choice, extra_body=says(CALL * 2))
    assert [block.type for block in answer.content] == ["tool_use"]
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


# --- the cache ---


def system(text: str, ttl: str | None = None) -> list[Any]:
    control = {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}
    return [{"type": "text", "text": text, "cache_control": control}]


def num_leases(state: ServerState) -> int:
    return state.llm.engine.cache.admin.num_leases


def test_a_breakpoint_is_written_once_and_read_ever_after(
    claude: anthropic.Anthropic, scribe: tuple[str, ServerState]
):
    """One lease, however often it is asked for; what stands behind it is counted as input."""
    before = num_leases(scribe[1])
    text = "A prompt of this test alone. " + LONG
    usages = [
        ask(claude, [{"role": "user", "content": f"{n} and so on"}], system=system(text)).usage
        for n in range(3)
    ]
    first, *later = usages
    assert first.cache_read_input_tokens == 0 and first.cache_creation_input_tokens > 100
    assert first.cache_creation.ephemeral_5m_input_tokens == first.cache_creation_input_tokens
    for usage in later:
        assert usage.cache_read_input_tokens >= first.cache_creation_input_tokens
        assert usage.cache_creation_input_tokens == 0
    assert {total(usage) for usage in usages} == {total(first)}
    assert num_leases(scribe[1]) == before + 1


def test_what_is_kept_survives_what_would_evict_it(
    claude: anthropic.Anthropic, scribe: tuple[str, ServerState]
):
    kept = "This shall be kept for an hour. " + LONG
    lost = "This shall be lost as soon as its place is needed. " + LONG
    ask(claude, system=system(kept, "1h"), max_tokens=1)
    ask(claude, system=lost, max_tokens=1)

    pool = scribe[1].llm.engine.cache.config.num_slots
    for number in range(-(-pool // 900)):
        ask(claude, [{"role": "user", "content": f"{number} " + "q" * 900}], max_tokens=1)

    again = ask(claude, system=system(kept, "1h"), max_tokens=1).usage
    gone = ask(claude, system=lost, max_tokens=1).usage
    assert again.cache_read_input_tokens > 100 and again.cache_creation_input_tokens == 0
    assert gone.cache_read_input_tokens < 50


def test_an_hour_and_five_minutes_are_counted_apart(claude: anthropic.Anthropic):
    first = [{"role": "user", "content": [*system("Five minutes. " + LONG)]}]
    usage = ask(claude, first, system=system("An hour. " + LONG, "1h"), max_tokens=1).usage

    created = usage.cache_creation
    assert created.ephemeral_1h_input_tokens > 100 and created.ephemeral_5m_input_tokens > 100
    both = created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
    assert usage.cache_creation_input_tokens == both


def test_tools_and_results_can_be_kept(claude: anthropic.Anthropic):
    tool = {
        **WEATHER,
        "description": "Of this test. " + LONG,
        "cache_control": {"type": "ephemeral"},
    }
    result = {"type": "tool_result", "tool_use_id": "a", "content": LONG}
    messages: Any = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}}
            ],
        },
        {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
    ]
    one = ask(claude, tools=[tool], max_tokens=1).usage
    assert one.cache_creation_input_tokens > 100
    two = ask(claude, messages, tools=[tool], max_tokens=1).usage
    assert two.cache_read_input_tokens >= one.cache_creation_input_tokens
    assert two.cache_creation_input_tokens > 50


def test_salts_and_switches_of_the_cache_hold_here_too(claude: anthropic.Anthropic):
    text = "For the salt alone. " + LONG
    for extra, read in (
        ({}, False),
        ({"cache_salt": "other"}, False),
        ({"cache_salt": "other"}, True),
        ({"cache_salt": "other", "cache": {"read": False}}, False),
    ):
        usage = ask(claude, system=text, max_tokens=1, extra_body=extra).usage
        assert (usage.cache_read_input_tokens > 0) == read


# --- errors ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"messages": [*ASK, {"role": "assistant", "content": "The"}]}, "last message"),
        ({"messages": []}, "messages"),
        ({"system": system("a") * 5}, "at most 4"),
        ({"tool_choice": {"type": "any"}}, "tools offers nothing"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "name says which"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "nope"}}]}, None),
        (
            {
                "tools": [{**WEATHER, "input_schema": {"type": "nope"}}],
                "tool_choice": {"type": "any"},
            },
            "Invalid type: nope",
        ),
        ({"system": system("a"), "extra_body": {"cache": {"write": False}}}, "needs cache.write"),
    ],
)
def test_what_cannot_be_done_is_refused(claude: anthropic.Anthropic, settings, message):
    settings = {"messages": ASK, "max_tokens": 1, **settings}
    if message is None:  # the schema is shown to the model, and binds nothing
        ask(claude, **settings)
        return
    with pytest.raises(anthropic.BadRequestError, match=message) as refusal:
        ask(claude, **settings)
    body: Any = refusal.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_unknown_models_and_paths_are_errors_of_this_shape(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError, match="this server has scribe") as refusal:
        ask(claude, model="claude")
    assert refusal.value.body["error"]["type"] == "not_found_error"


def test_an_impossible_form_is_refused_before_a_stream_begins(url: str):
    body = {
        "model": "scribe",
        "max_tokens": 50,
        "messages": ASK,
        "stream": True,
        "structured_outputs": {"grammar": 'start: "a" <|nosuch|>'},
    }
    answer = httpx.post(f"{url}/v1/messages", json=body)
    assert answer.status_code == 400 and answer.json()["type"] == "error"

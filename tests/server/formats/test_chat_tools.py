"""Formats of answers and calls of tools, as the official client sees them."""

import json
from typing import Any

import openai
import pytest

from ostinato.server.state import ServerState
from tests.server.formats.conftest import prompt_and_answer, says

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
)


def ask(client: openai.OpenAI, messages: Any = ASK, **settings: Any) -> Any:
    settings = {"model": "scribe", "max_tokens": 400, "seed": 5, **settings}
    return client.chat.completions.create(messages=messages, **settings)


def is_weather(arguments: str) -> bool:
    given = json.loads(arguments)
    return set(given) == {"city", "days"} and given["city"] in ("Paris", "Oslo")


# --- formats ---


def test_a_schema_is_kept(client: openai.OpenAI):
    schema = {"name": "person", "strict": True, "schema": PERSON}
    answer = ask(client, response_format={"type": "json_schema", "json_schema": schema}, n=3)

    for choice in answer.choices:
        person = json.loads(choice.message.content)
        assert set(person) == {"name", "age"} and len(person["name"]) <= 5
        assert choice.finish_reason == "stop"


def test_an_object_begins_like_one(client: openai.OpenAI):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=30)
    assert answer.choices[0].message.content.startswith("{")


def test_text_as_a_format_binds_nothing(client: openai.OpenAI):
    forms: Any = ({}, {"response_format": {"type": "text"}})
    texts = [ask(client, max_tokens=5, **form).choices[0].message.content for form in forms]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nope"}},
                }
            },
            "Invalid type: nope",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "unclosed group"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "give one of"),
        (
            {
                "extra_body": {"structured_outputs": {"regex": "a"}},
                "response_format": {"type": "json_object"},
            },
            "leave out response_format",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools='get_weather' is offered twice"),
        ({"tool_choice": "required"}, "requires a call, and tools offers nothing"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice='x' is not offered: tools has get_time",
        ),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id says which call"),
    ],
)
def test_what_cannot_be_kept_is_refused(client: openai.OpenAI, settings, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **{"messages": ASK, **settings})


# --- calls ---


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_required_call_is_valid_though_the_model_knows_nothing(
    client: openai.OpenAI, temperature: float
):
    answer = ask(
        client,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
    )
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert call.function.name in ("get_weather", "get_time") and call.type == "function"
    assert call.function.arguments == "{}" or is_weather(call.function.arguments)


def test_several_calls_may_be_required(client: openai.OpenAI):
    """With one tool that takes a moment; each call has a name of its own to be answered by."""
    answer = ask(client, tools=[CLOCK], tool_choice="required", n=8, temperature=2.0)
    calls = [choice.message.tool_calls for choice in answer.choices]
    assert max(map(len, calls)) > 1
    names = [call.id for made in calls for call in made]
    assert len(set(names)) == len(names)


def test_the_named_tool_is_called(client: openai.OpenAI):
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, tools=[CLOCK, WEATHER], tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and is_weather(call.function.arguments)


def test_calls_come_in_a_stream(client: openai.OpenAI):
    """First the name with an empty text of arguments, then the arguments, piece by piece."""
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    chunks = list(ask(client, tools=[WEATHER], tool_choice=choice, stream=True))

    made = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert (
        made[0].function.name == "get_weather" and made[0].id and made[0].function.arguments == ""
    )
    assert all(c.id is None and c.function.name is None for c in made[1:]) and len(made) > 3
    assert is_weather("".join(c.function.arguments for c in made))
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_the_clients_own_stream_helper_reads_it(client: openai.OpenAI):
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model="scribe", messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=300, seed=2
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()

    assert "tool_calls.function.arguments.delta" in kinds
    assert is_weather(final.choices[0].message.tool_calls[0].function.arguments)


def test_calls_are_read_out_of_what_a_model_says_by_itself(client: openai.OpenAI):
    said = f"Let me look.\n{CALL}\n{CALL.replace('Oslo', 'Paris')}"
    answer = ask(client, tools=[WEATHER], extra_body=says(said)).choices[0]

    assert answer.message.content == "Let me look." and answer.finish_reason == "tool_calls"
    cities = [json.loads(c.function.arguments)["city"] for c in answer.message.tool_calls]
    assert cities == ["Oslo", "Paris"]


def test_without_parallel_calls_the_first_ends_the_answer(client: openai.OpenAI):
    settings = {"tools": [WEATHER], "parallel_tool_calls": False, "extra_body": says(CALL * 2)}
    answer = ask(client, **settings).choices[0]
    assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"
    assert is_weather(answer.message.tool_calls[0].function.arguments)


def test_text_stays_text_where_tools_are_offered(client: openai.OpenAI):
    """Also what only looks like the beginning of a call; and all of it with tool_choice none."""
    for said, settings in (
        ("It is a < b, and <tool", {}),
        ("<tool_call>nonsense</tool_call>", {}),
        (CALL, {"tool_choice": "none"}),
    ):
        answer = ask(client, tools=[WEATHER], extra_body=says(said), **settings).choices[0]
        streamed = ask(client, tools=[WEATHER], extra_body=says(said), stream=True, **settings)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert answer.message.content == text == said
        assert answer.finish_reason == "stop" and answer.message.tool_calls is None


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI):
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=45).choices[0]
    assert answer.finish_reason == "length"


def test_results_go_into_the_next_prompt(client: openai.OpenAI, url: str):
    """The whole round: ask, call, answer the call, ask again; the second prompt finds the first."""
    first = ask(client, tools=[WEATHER], extra_body=says(CALL))
    call = first.choices[0].message.tool_calls[0]
    again = [
        *ASK,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Snow."},
    ]
    second = ask(client, again, tools=[WEATHER], max_tokens=5)

    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens * 0.9


# --- what the model is told ---


def prompt_of(scribe: tuple[str, ServerState], **body: Any) -> str:
    """Return the prompt that a chat becomes, as the engine sees it."""
    body = {"model": "scribe", "max_tokens": 1, "messages": ASK, **body}
    prompt, answer = prompt_and_answer(scribe, "/v1/chat/completions", body)
    answer.raise_for_status()
    return prompt


ROUND: list[Any] = [
    {"role": "system", "content": "Be kind."},
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "Snow."}]},
]


def test_a_template_without_tools_is_told_in_words(scribe: tuple[str, ServerState]):
    prompt = prompt_of(scribe, messages=ROUND, tools=[WEATHER])

    assert prompt.startswith("[system] You may call these functions")
    assert '"name": "get_weather", "description": "Tell the weather."' in prompt
    assert prompt.endswith(
        "</tool_call>\n\nBe kind.\n"
        "[user] How is the weather in Paris?\n"
        '[assistant] <tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Oslo", "days": 1}}\n</tool_call>\n'
        "[user] <tool_response>\nSnow.\n</tool_response>\n"
        "[assistant] "
    )


def test_a_template_with_tools_is_handed_them(tool_scribe: tuple[str, ServerState]):
    assert prompt_of(tool_scribe, messages=ROUND, tools=[WEATHER, CLOCK]) == (
        "TOOLS get_weather get_time; call in <tool_call>\n"
        "[system] Be kind.\n"
        "[user] How is the weather in Paris?\n"
        '[assistant]  CALL get_weather {"city": "Oslo", "days": 1}\n'
        "[tool] Snow.\n"
        "[assistant] "
    )


def test_tool_choice_leaves_the_prompt_as_it_is(
    scribe: tuple[str, ServerState], tool_scribe: tuple[str, ServerState]
):
    """A turn that forbids or forces calls hits all that the turns before it left."""
    for server in (scribe, tool_scribe):
        prompts = {
            prompt_of(server, tools=[WEATHER], tool_choice=choice)
            for choice in ("none", "auto", "required")
        }
        assert len(prompts) == 1

"""The lenient reader of routers and the models of servers read one prompt out of a body."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ostinato.protocol.chat import ChatBody
from ostinato.protocol.conversation import ASIDE
from ostinato.protocol.lenient import LenientBody, read_leniently
from ostinato.protocol.messages import MessagesBody
from ostinato.protocol.responses import ResponsesBody
from ostinato.protocol.volatile import CHECKSUM_RULES, Stabiliser

Body = dict[str, Any]

TEXTS = st.sampled_from(["", "a", "To be", "ü\n"])
NAMES = st.sampled_from(["clock", "weather"])
IDS = st.sampled_from(["call_1", "call_2"])
OBJECTS = st.dictionaries(NAMES, TEXTS, max_size=2)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Body]:
    """Objects with some of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


def objects(
    more: st.SearchStrategy[Body] | None = None, **fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[Body]:
    """Objects with all of the fields, and perhaps some more."""
    whole = st.fixed_dictionaries(fields)
    return whole if more is None else st.builds(lambda a, b: {**a, **b}, whole, more)


def function(name: str) -> Body:
    return {"name": name, "description": "Tells.", "parameters": {"type": "object"}, "strict": True}


# --- chat completions ---

TEXT_PARTS = objects(type=st.just("text"), text=TEXTS)
CALLS = objects(
    id=IDS,
    type=st.just("function"),
    function=objects(name=NAMES, arguments=st.sampled_from(["{}", '{"a": 1}', "not"])),
)
CHAT_TURNS = st.one_of(
    objects(
        optional(name=NAMES),
        role=st.sampled_from(["system", "developer", "user"]),
        content=st.one_of(TEXTS, st.lists(TEXT_PARTS, max_size=3)),
    ),
    objects(
        optional(
            tool_calls=st.lists(CALLS, min_size=1, max_size=2),
            reasoning=TEXTS,
            reasoning_content=TEXTS,
        ),
        role=st.just("assistant"),
        content=TEXTS,
    ),
    objects(role=st.just("tool"), tool_call_id=IDS, content=TEXTS),
)
CHATS = objects(
    optional(
        tools=st.just([{"type": "function", "function": function("clock")}]),
        tool_choice=st.sampled_from(["none", "auto"]),
        reasoning_effort=st.sampled_from(["low", "xhigh"]),
        chat_template_kwargs=st.just({"enable_thinking": True}),
        max_tokens=st.just(9),
        n=st.just(3),
        cache_salt=TEXTS,
    ),
    model=st.just("m"),
    messages=st.lists(CHAT_TURNS, min_size=1, max_size=5),
)

# --- Anthropic's messages ---

RESULTS = objects(
    optional(is_error=st.booleans()),
    type=st.just("tool_result"),
    tool_use_id=IDS,
    content=st.one_of(TEXTS, st.lists(TEXT_PARTS, max_size=2)),
)
USES = objects(type=st.just("tool_use"), id=IDS, name=NAMES, input=OBJECTS)
THOUGHTS = st.one_of(
    objects(type=st.just("thinking"), thinking=TEXTS, signature=TEXTS),
    objects(type=st.just("redacted_thinking"), data=TEXTS),
)
LAST = st.just({"role": "user", "content": "and now?"})
BLOCK_TURNS = st.one_of(
    objects(
        role=st.just("user"),
        content=st.one_of(TEXTS, st.lists(st.one_of(TEXT_PARTS, RESULTS), max_size=4)),
    ),
    objects(
        role=st.just("assistant"),
        content=st.one_of(TEXTS, st.lists(st.one_of(TEXT_PARTS, USES, THOUGHTS), max_size=4)),
    ),
)
BILLING = "x-anthropic-billing-header: cc_version=2.1.80.1fe; cc_entrypoint=cli; cch=00a1b;"
MESSAGES = objects(
    optional(
        system=st.one_of(
            TEXTS,
            st.lists(TEXT_PARTS, max_size=2),
            st.just([{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}]),
        ),
        tools=st.just(
            [
                {"name": "clock", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search"},
            ]
        ),
        tool_choice=st.sampled_from([{"type": "none"}, {"type": "auto"}]),
        thinking=st.sampled_from([{"type": "disabled"}, {"type": "adaptive"}]),
        output_config=st.just({"effort": "max"}),
    ),
    model=st.just("m"),
    max_tokens=st.just(7),
    messages=st.builds(lambda turns, last: [*turns, last], st.lists(BLOCK_TURNS, max_size=4), LAST),
)

# --- responses ---

SAID = st.sampled_from(["input_text", "output_text"])
RESPONSE_TEXTS = objects(type=SAID, text=TEXTS)
ITEMS = st.one_of(
    objects(
        optional(type=st.just("message")),
        role=st.sampled_from(["user", "assistant", "system", "developer"]),
        content=st.one_of(TEXTS, st.lists(RESPONSE_TEXTS, max_size=2)),
    ),
    objects(
        optional(namespace=st.just("home")),
        type=st.just("function_call"),
        call_id=IDS,
        name=NAMES,
        arguments=st.sampled_from(["{}", '{"a": 1}']),
    ),
    objects(type=st.just("custom_tool_call"), call_id=IDS, name=NAMES, input=TEXTS),
    objects(
        type=st.sampled_from(["function_call_output", "custom_tool_call_output"]),
        call_id=IDS,
        output=st.one_of(TEXTS, st.lists(RESPONSE_TEXTS, max_size=2)),
    ),
    objects(
        optional(content=st.lists(objects(type=st.just("reasoning_text"), text=TEXTS), max_size=2)),
        type=st.just("reasoning"),
        summary=st.lists(objects(type=st.just("summary_text"), text=TEXTS), max_size=1),
    ),
    objects(type=st.just("web_search_call")),
)
RESPONSES = objects(
    optional(
        instructions=TEXTS,
        tools=st.just(
            [
                {"type": "function", **function("clock")},
                {"type": "custom", "name": "shell", "format": {"type": "text"}},
                {"type": "custom", "name": "sum", "description": "Adds.",
                 "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}},
                {"type": "namespace", "name": "home",
                 "tools": [{"type": "function", **function("lamp")}]},
                {"type": "web_search"},
            ]
        ),
        tool_choice=st.sampled_from(["none", "auto"]),
        reasoning=st.just({"effort": "minimal"}),
    ),
    model=st.just("m"),
    input=st.one_of(
        st.just("Hello"),
        st.builds(
            lambda items: [*items, {"role": "user", "content": "?"}], st.lists(ITEMS, max_size=5)
        ),
    ),
)  # fmt: skip


@given(CHATS)
def test_a_chat_is_read_as_its_model_reads_it(body: Body):
    """The router compares the prompt that the worker computes, or its choice sees no hits."""
    model, lenient = both(ChatBody, "/v1/chat/completions", body)
    assert_same(model, lenient, [message.rendered() for message in model.messages])
    assert lenient.max_tokens == (9 * body.get("n", 1) if "max_tokens" in body else 256 * model.n)
    assert lenient.salt == model.cache_salt


@given(MESSAGES)
def test_a_message_is_read_as_its_model_reads_it(body: Body):
    """Reasoning, results that are errors, and the line of a client whose checksum changes."""
    model, lenient = both(MessagesBody, "/v1/messages", body)
    settled = Stabiliser(CHECKSUM_RULES).settle(model.conversation())
    assert_same(model, lenient, settled.messages)


@given(RESPONSES)
def test_a_response_is_read_as_its_model_reads_it(body: Body):
    """An assistant's text and calls are one message; tools of a namespace have its name."""
    model, lenient = both(ResponsesBody, "/v1/responses", body)
    assert_same(model, lenient, [*model.head(), *model.conversation()])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/x"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"{",
        b'{"messages": 3, "tools": 1, "input": {}, "system": [1]}',
        b'{"messages": [1, {}, {"content": 2, "role": []}], "tool_choice": {}, "thinking": []}',
        b'{"input": [1, {"type": 3}, {"type": "function_call"}], "reasoning": "x"}',
        b'{"tools": [{"function": 1, "type": "custom"}, {"type": "namespace", "tools": [{}]}]}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_request_raises_nothing(path: str, body: bytes):
    """Its worker returns the error; the router has no say in what a worker accepts."""
    assert isinstance(read_leniently(path, body), LenientBody)


def both(model: type[BaseModel], path: str, body: Body) -> tuple[Any, LenientBody]:
    raw = json.dumps(body).encode()
    return model.model_validate_json(raw), read_leniently(path, raw)


def assert_same(model: Any, lenient: LenientBody, messages: list[Body]) -> None:
    seen, expected = (
        [{k: v for k, v in with_objects(message).items() if k != ASIDE} for message in each]
        for each in (lenient.messages or (), messages)
    )
    assert seen == expected, "what templates see"
    assert lenient.tools == [tool.describe() for tool in model.tool_use.tools]
    variables = {"add_generation_prompt": True, **lenient.template}
    assert variables == {"add_generation_prompt": True, **model.template()}


def with_objects(message: Body) -> Body:
    """The message with arguments of calls as objects, in which form templates read them."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, **({"tool_calls": calls} if calls else {})}

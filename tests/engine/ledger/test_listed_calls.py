"""Clients that write calls as a text: with the ids of a turn, and equal, they mean that turn."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.ledger.listed_calls import with_listed_calls
from tests.engine.ledger.test_continuation import loop
from tests.support.ledger_talks import LedgerTalk, drops_reasoning
from tests.support.models.chat_families import FAMILIES, Message


def listed(calls: list[Any]) -> str:
    """Write calls as smolagents does: a list that Python prints."""
    shown = list[Any]()
    for call in calls:
        function = call["function"]
        read = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        shown.append({"id": call["id"], "type": "function", "function": read})
    return f"Calling tools:\n{shown}"


def lists_calls(message: Message) -> Message:
    """Send a text that lists the calls, without reasoning, as smolagents does."""
    message = drops_reasoning(message)
    calls = message.pop("tool_calls")
    lead = f"{message['content']}\n" if message["content"] else ""
    return {**message, "content": lead + listed(calls)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loop_of_listed_calls_repeats_every_token(name: str):
    """The results come as messages of the user, which do not end the loop."""
    talk = LedgerTalk(FAMILIES[name])
    assert loop(talk, lists_calls, role="user") == 0
    report = talk.prompt().report
    assert (report.num_turns, report.num_listed, report.num_restored) == (10, 10, 10)


def test_a_question_behind_an_answer_ends_such_a_loop():
    """The template drops the reasoning of the loop, and the calls stay as they were written."""
    talk = LedgerTalk(FAMILIES["qwen"])
    loop(talk, lists_calls, 2, "user")
    talk.answer("All is seen.", "Two files.", client=drops_reasoning)
    talk.say("user", "Really?")
    chat = talk.prompt()
    text = talk.text(chat)
    assert "I look at" not in text and "Calling tools" not in text
    assert (chat.report.num_turns, len(chat.report.dropped)) == (3, 3)


EDITS = (
    ("call_0", "call_7"), ("'call_0'", "''"), ("'call_0'", "'call_1'"), ("1.0", "2"),
    ("True", "1"), ("'read'", "'write'"), ("Calling", "Called"), ("Calling", "Well.\nCalling"),
    ("Calling", "Well. Calling"), ("}]", "}] Well."), ("'type'", "'type"),
)  # fmt: skip
"""Of a list: ids, arguments, names, the heading, and what stands around it."""


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_a_list_that_was_edited_is_the_text_that_it_is(old: str, new: str):
    """Nothing is put back, at this message or behind it: as without the ledger."""
    talk = LedgerTalk(FAMILIES["qwen"])
    loop(talk, lists_calls, 2, "user")
    text = talk.messages[1]["content"]
    assert old in text
    talk.messages[1] = {"role": "assistant", "content": text.replace(old, new)}
    chat = talk.prompt()
    assert talk.text(chat) == talk.text(talk.prompt(is_on=False))
    assert (chat.report.num_turns, chat.report.num_listed, chat.report.num_unequal) == (0, 0, 1)


def test_ids_of_another_tenant_or_adapter_mean_nothing():
    """The whole conversation of a tenant, ids and all, sent by another one."""
    owner = LedgerTalk(FAMILIES["qwen"], cache_salt="owner")
    loop(owner, lists_calls, 2, "user")
    for other in ({"cache_salt": "thief"}, {"cache_salt": "owner", "adapter": "other"}):
        thief = LedgerTalk(FAMILIES["qwen"], owner.turns, **other)
        thief.messages = list(owner.messages)
        chat = thief.prompt()
        assert thief.text(chat) == thief.text(thief.prompt(is_on=False))
        assert chat.report.num_turns == chat.report.num_unequal == 0


VALUES = st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text()


@given(
    st.dictionaries(st.text(), VALUES | st.lists(VALUES)), st.sampled_from(["", "I look.", "a\n"])
)
def test_what_python_prints_is_read_as_the_same_calls(arguments: dict[str, Any], lead: str):
    call = {"id": "call_1", "function": {"name": "sh", "arguments": json.dumps(arguments)}}
    text = (f"{lead}\n" if lead else "") + listed([call])
    content = [{"type": "text", "text": text}]
    read = with_listed_calls({"role": "assistant", "content": content})
    assert read is not None and read["content"] == lead
    assert read["tool_calls"][0]["function"]["arguments"] == arguments


HOSTILE = (
    "[" * 100_000, "[" + "-" * 100_000 + "1]", "['" + "a" * 100_000, "'\\z" * 50_000,
    "[{'id': 'a', 'function': __import__('os')}]", "[{'id': b'a', 'function': {}}]", "[1, 2]",
    "{'id': 'a', 'function': {}}", "",
)  # fmt: skip


def test_a_text_that_lists_no_calls_is_refused():
    """Also one that is deep, long, or no text that Python prints."""
    for text in HOSTILE:
        assert with_listed_calls({"content": f"Calling tools:\n{text}"}) is None, text[:30]

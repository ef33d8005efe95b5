"""Random dialogues, families and clients: the ledger changes tokens, and no meaning."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ledger_talks import LedgerTalk, drops_reasoning, renames, respells
from tests.support.models.chat_families import FAMILIES, Call, Message

TEXTS = st.sampled_from(["", "ok", "A phrase.", " two  spaces ", "<eos>", "{", "caf\u00e9", "ok\n"])
THOUGHTS = st.sampled_from(["", "Hm.", "A phrase.", "Two\n\nlines."])
ARGUMENTS = st.sampled_from(
    ['{"b":1,"a":[true,null]}', '{ "x" : 1.0 }', '{"s": "caf\\u00e9"}', "{}", '{"a":{"b":"{"}}']
)
CALLS = st.lists(st.builds(Call, st.sampled_from(["list", "read"]), ARGUMENTS), max_size=2)


def drop(field: str, message: Message) -> Message:
    """Send a message of the assistant without one of its fields; ``id`` is that of each call."""
    if field == "content":  # a body without it is read so
        return {**message, "content": ""}
    if field != "id":
        return {k: v for k, v in message.items() if k != field}
    calls = [{"function": call["function"]} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls}


FIELDS = ("content", "tool_calls", "id", "reasoning", "reasoning_content")
CLIENTS = st.lists(
    st.sampled_from([drops_reasoning, respells, renames, *(partial(drop, f) for f in FIELDS)]),
    max_size=3,
)
EDITS = st.sampled_from([None, None, None, "content", "reasoning"])

Step = tuple[str, str, list[Call], list[Any], Any, str]
STEPS = st.lists(st.tuples(THOUGHTS, TEXTS, CALLS, CLIENTS, EDITS, TEXTS), min_size=1, max_size=5)


def edit(message: Message, field: str | None) -> Message:
    """Change a message that the model wrote."""
    if field is None:
        return message
    changed = f"{message.get(field, '')} edited"
    more = {"reasoning_content": changed} if field == "reasoning" else {}
    return {**message, field: changed, **more}


def play(talk: LedgerTalk, steps: list[Step]) -> Any:
    """Hold a conversation, and yield it before each answer, with its client's prompt."""
    talk.say("user", "Begin.")
    for reasoning, content, calls, clients, change, result in steps:
        family = talk.family
        if calls and not family.shows_text_beside_calls:
            content = ""
        if not talk.prompt().begun:
            talk.messages.append({"role": "assistant", "content": "unknown"})
        else:
            talk.answer(reasoning if family.reasons else "", content, calls)
            message = talk.messages[-1]
            for client in clients:
                message = client(message)
            talk.messages[-1] = edit(message, change)
        for _ in calls or [None]:
            talk.say("tool" if calls else "user", result)
        yield talk


def without_reasoning(turns: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [turn[:3] for turn in turns]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", FAMILIES)
@given(steps=STEPS, keep=st.sampled_from(["template", "always"]))
def test_prompts_mean_the_same_with_the_ledger_and_without(name: str, steps: list[Step], keep: str):
    """Texts and calls as JSON are equal; reasoning is what was sent or what was written."""
    talk = LedgerTalk(FAMILIES[name], keep_reasoning=keep)
    for _ in play(talk, steps):
        off, on = talk.prompt(is_on=False), talk.prompt()
        turns = [talk.family.turns(talk.text(chat)) for chat in (off, on)]
        assert without_reasoning(turns[0]) == without_reasoning(turns[1])
        if not on.report.num_restored:
            assert talk.text(on) == talk.text(off)
            assert list(on.tokens) == list(off.tokens)
    talk.turns.ledger.check()
    talk.texts.known.check()

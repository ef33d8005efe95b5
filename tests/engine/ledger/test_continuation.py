"""The next prompt continues with what the model wrote, where the message means the same."""

from typing import Any

import pytest

from tests.support.ledger_talks import (
    Client,
    LedgerTalk,
    drops_reasoning,
    renames,
    respells,
)
from tests.support.models.chat_families import FAMILIES, NEEDS_CALLS, Call, ChatFamily, Message

LIST = Call("list", '{"path":"src",  "depth": 1.0, "all":true}')
READ = Call("read", '{"name": "caf\\u00e9.py"}')


def careless(message: Message) -> Message:
    """Do all that clients do."""
    return renames(respells(drops_reasoning(message)))


def loop(talk: LedgerTalk, client: Client, num_turns: int = 10, role: str = "tool") -> int:
    """Call tools in turns; returns how many prompts do not repeat what was written."""
    talk.say("user", "Which files are there?")
    num_lost = 0
    for turn in range(num_turns):
        thought = f"I look at {turn}." if talk.family.reasons else ""
        text = "Let me see." if turn % 2 and talk.family.shows_text_beside_calls else ""
        calls = [LIST, READ] if turn % 3 == 0 else [READ]
        talk.answer(thought, text, calls, client)
        for _ in calls if role == "tool" else calls[:1]:
            talk.say(role, "ok" if turn % 2 else f"file {turn}")
        tokens = list(talk.prompt().tokens)
        num_lost += tokens[: len(talk.written)] != talk.written
    return num_lost


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_loop_repeats_every_token_whatever_its_client_drops(name: str):
    """Ten turns; calls are respelled and renamed, reasoning is not sent."""
    talk = LedgerTalk(FAMILIES[name])
    assert loop(talk, careless) == 0
    assert talk.prompt().report.num_restored == 10


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_without_the_ledger_the_same_loop_loses_its_turns(name: str):
    """So the test above can fail."""
    talk = LedgerTalk(FAMILIES[name], max_bytes=0)
    with pytest.raises(AssertionError, match="frames"):
        loop(talk, careless)
    on = LedgerTalk(FAMILIES[name])
    loop(on, careless)
    plain = on.prompt(is_on=False)
    assert list(plain.tokens)[: len(on.written)] != on.written
    assert plain.report.num_turns == 0


def test_an_append_only_client_gets_the_same_tokens_with_the_ledger():
    """A template that shows all that was written, as it was: nothing is restored."""
    talk = LedgerTalk(FAMILIES["chatml"])
    talk.say("user", "Hi.")
    talk.answer("", "Hello.")
    talk.say("user", "And?")
    report = talk.prompt().report
    assert (report.num_turns, report.num_restored) == (1, 0)


def test_a_cut_answer_is_continued_as_well():
    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("user", "Count.")
    talk.answer("", "one two thr", is_ended=False)
    talk.say("user", "More.")
    assert list(talk.prompt().tokens)[: len(talk.written)] == talk.written


# --- reasoning, at the next message of the user --------------------------------------------------


def two_questions(name: str, **settings: Any) -> LedgerTalk:
    talk = LedgerTalk(FAMILIES[name], **settings)
    talk.say("user", "Which files?")
    talk.answer("I look.", "", [LIST], careless)
    talk.say("tool", "none")
    talk.answer("Nothing there.", "There is none.", client=careless)
    talk.say("user", "Sure?")
    return talk


@pytest.mark.parametrize("name", ["qwen", "qwen-opened", "deepseek", "chatml"])
def test_at_the_next_question_the_template_decides(name: str):
    """All of these drop reasoning there; calls stay as they were written."""
    talk = two_questions(name)
    chat = talk.prompt()
    text = talk.text(chat)
    assert "I look." not in text and "Nothing there." not in text
    assert LIST.arguments in text
    assert [drop.message for drop in chat.report.dropped] == [1, 3]


@pytest.mark.parametrize("name", ["qwen", "qwen-opened", "deepseek", "chatml"])
@pytest.mark.parametrize("where", ["setting", "request"])
def test_reasoning_is_kept_across_questions_where_that_is_chosen(name: str, where: str):
    choice = {"keep_reasoning": "always"}
    talk = two_questions(name, **(choice if where == "setting" else {}))
    chat = talk.prompt(**(choice if where == "request" else {}))
    assert list(chat.tokens)[: len(talk.written)] == talk.written
    assert not chat.report.dropped


def test_the_place_of_dropped_reasoning_is_where_the_prompts_part():
    """In tokens of the prompt: there, the prompt before has the reasoning."""
    talk = two_questions("qwen")
    chat = talk.prompt()
    first = chat.report.dropped[0]
    both = zip(chat.tokens, talk.written, strict=False)
    assert first.place == [a == b for a, b in both].index(False)
    mark = talk.tokenizer.convert_tokens_to_ids("<think>")
    assert talk.written[first.place] == mark
    end = first.place + first.num_tokens - 1
    assert talk.written[end] == talk.tokenizer.convert_tokens_to_ids("</think>")


def test_the_second_loop_continues_behind_what_the_template_dropped():
    talk = two_questions("qwen")
    for turn in range(3):
        talk.answer(f"Again {turn}.", "", [READ], careless)
        talk.say("tool", "ok")
        assert list(talk.prompt().tokens)[: len(talk.written)] == talk.written


# --- what differs ends it ------------------------------------------------------------------------


def edited(messages: list[Message], number: int, **changes: Any) -> list[Message]:
    return [{**m, **changes} if n == number else m for n, m in enumerate(messages)]


def calling(*calls: Call) -> list[dict[str, Any]]:
    """Return calls with the ids of the second of three turns, which bring nothing by themselves."""
    functions = ({"name": call.name, "arguments": call.arguments} for call in calls)
    return [{"id": f"call_{n}", "function": f} for n, f in enumerate(functions, start=2)]


def three_turns() -> LedgerTalk:
    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("system", "You list files.")
    talk.say("user", "Which files?")
    for turn in range(3):
        talk.answer(f"Thought {turn}.", "", [LIST, READ], careless)
        talk.say("tool", f"result {turn}")
    return talk


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "another value": calling(Call("list", '{"path":"src","depth":2,"all":true}'), READ),
    "true is not 1": calling(Call("list", '{"path":"src","depth":1,"all":1}'), READ),
    "a missing key": calling(Call("list", '{"path":"src","depth":1}'), READ),
    "another name": calling(Call("ls", LIST.arguments), READ),
    "another order": calling(READ, LIST),
    "one call less": calling(LIST),
    "one call more": calling(LIST, READ, READ),
    "no JSON": calling(Call("list", LIST.arguments + "}"), READ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ_are_not_put_back_nor_is_what_follows(what: str):
    talk = three_turns()
    messages = edited(talk.messages, 4, tool_calls=DIFFERENT[what])
    chat = talk.prompt(messages)
    text = talk.text(chat)
    assert "Thought 0." in text and "Thought 1." not in text and "Thought 2." not in text
    assert (chat.report.num_turns, chat.report.num_unequal) == (1, 1)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_another_message_before_a_turn_means_another_place(number: int):
    """System, user or result edited: the turns behind it are unknown."""
    talk = three_turns()
    chat = talk.prompt(edited(talk.messages, number, content="Something else."))
    text = talk.text(chat)
    assert "Thought 2." not in text and chat.report.num_turns == (1 if number == 3 else 0)
    plain = talk.prompt(edited(talk.messages, number, content="Something else."), is_on=False)
    if number < 3:
        assert text == talk.text(plain)


@pytest.mark.parametrize(
    ("content", "is_equal"), [("", True), (None, True), (" ", False), ("Hm.", False)]
)
def test_texts_are_equal_to_the_letter(content: Any, is_equal: bool):
    talk = three_turns()
    message = {**talk.messages[6], "content": content}
    if content is None:  # as the server hands it on
        message["content"] = ""
    report = talk.prompt([*talk.messages[:6], message, talk.messages[7]]).report
    assert (report.num_turns == 3) is is_equal


def test_other_reasoning_than_was_written_is_another_message():
    talk = three_turns()
    messages = edited(talk.messages, 4, reasoning="Mine.", reasoning_content="Mine.")
    chat = talk.prompt(messages)
    assert "Mine." in talk.text(chat) and "Thought 1." not in talk.text(chat)
    assert chat.report.num_turns == 1


def test_messages_that_no_model_wrote_do_not_end_the_ledger():
    """Examples before the conversation, as some clients send them."""
    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("user", "An example?")
    talk.messages.append({"role": "assistant", "content": "Like this."})
    assert loop(talk, careless, 3) == 0
    assert talk.prompt().report.num_turns == 3


def test_a_loop_whose_first_turns_are_gone_is_continued_from_then_on():
    """They were evicted; the client still sends their reasoning, and the template shows it."""
    talk = LedgerTalk(FAMILIES["qwen"])
    loop(talk, respells, 2)
    talk.turns.clear()
    talk.answer("New.", "", [READ], careless)
    talk.say("tool", "ok")
    chat = talk.prompt()
    assert chat.report.num_turns == 1 and "New." in talk.text(chat)
    assert list(chat.tokens)[: len(talk.written)] == talk.written


def test_tokens_come_back_after_the_known_texts_were_dropped():
    """The ledger alone has them; what is put back so is counted."""
    talk = LedgerTalk(FAMILIES["chatml"])
    talk.say("user", "Hi.")
    talk.answer("", "A phrase that keeps returning.")
    talk.say("user", "And?")
    talk.texts.known.clear()
    chat = talk.prompt()
    assert list(chat.tokens)[: len(talk.written)] == talk.written
    assert chat.report.num_restored == 1
    talk.texts.known.check()


# --- the template's frames -----------------------------------------------------------------------


def test_a_template_whose_frames_cannot_be_told_is_used_as_it_is():
    """It refuses a result without a call, as the rendering with marks has it."""
    family = ChatFamily(NEEDS_CALLS, "hermes", lambda content, calls: content, reasons=False)
    talk = LedgerTalk(family)
    talk.say("user", "Hi.")
    talk.messages.append({"role": "assistant", "content": "", "tool_calls": calling(LIST)})
    talk.say("tool", "ok")
    assert talk.text(talk.prompt()) == talk.text(talk.prompt(is_on=False))
    talk.answer("", "Fine.")
    talk.say("user", "So?")
    assert talk.prompt().report.num_turns == 1, "a text has frames"


def test_an_answer_that_quotes_a_frame_is_left_as_it_is_rendered():
    """Its end could be in two places; nothing is put back, and nothing is lost."""
    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("user", "Quote.")
    quoted = "<eos>\n<bos>user\nNext.<eos>\n<bos>assistant\n"
    talk.answer("", f"It writes {quoted}so.", client=careless)
    talk.say("user", "Next.")
    assert talk.text(talk.prompt()) == talk.text(talk.prompt(is_on=False))


def test_a_client_cannot_write_marks_that_stand_for_turns():
    """Marks are drawn anew for each prompt."""
    talk = three_turns()
    first, second = (talk.text(talk.prompt()) for _ in range(2))
    assert first == second and "turn0x" not in first

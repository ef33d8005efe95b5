"""The ledger's bounds, erasure, and what another tenant can learn: nothing."""

from array import array
from typing import Any

import pytest

from ostinato.core.identity import derive_salt
from ostinato.engine.ledger.meaning import canonical_arguments, digest, meaning_of, places
from ostinato.engine.ledger.seal import PREFIX, TurnName, TurnSeal
from ostinato.engine.ledger.turns import (
    MAX_TURNS_PER_PLACE,
    OpenTurn,
    TurnLedger,
    TurnScope,
    WrittenTurn,
)
from ostinato.engine.prompts.chat import WrittenAnswer
from tests.support.ledger_talks import LedgerTalk, drops_reasoning
from tests.support.models.chat_families import FAMILIES, Call

PLACE = digest("a place")


def begun(salt: str = "ann", place: bytes = PLACE, model: str = "") -> OpenTurn:
    return OpenTurn(TurnScope(salt.encode(), model), place, "", array("I"))


def turn(number: int = 0, num_tokens: int = 4) -> WrittenTurn:
    name = number.to_bytes(16, "little")
    return WrittenTurn(name, b"", b"", (), array("I", [7] * num_tokens), array("I"), "")


def noted(ledger: TurnLedger, number: int = 0, num_tokens: int = 4, **where: Any) -> bool:
    is_kept = ledger.note(ledger.begin(begun(**where)), turn(number, num_tokens))
    ledger.check()
    return is_kept


def numbers(ledger: TurnLedger, salt: str = "ann", model: str = "") -> list[int]:
    found = ledger.at(TurnScope(salt.encode(), model), PLACE)
    return [int.from_bytes(turn.number, "little") for turn in found]


def test_turns_of_a_place_come_newest_first_and_only_the_newest_are_kept():
    ledger = TurnLedger(2**20)
    for number in range(MAX_TURNS_PER_PLACE + 2):
        noted(ledger, number)
    assert numbers(ledger) == [*range(MAX_TURNS_PER_PLACE + 1, 1, -1)]
    assert ledger.counts.evicted == 2


def test_the_tenant_with_the_most_loses_its_oldest_turn_and_no_other_does():
    """What a small tenant has does not tell how much others send."""
    size = turn(num_tokens=100).num_bytes
    ledger = TurnLedger(10 * size)
    noted(ledger, 0, 100, salt="small")
    for number in range(30):
        noted(ledger, number, 100, salt="large", place=digest(str(number)))
    assert numbers(ledger, "small") == [0]
    assert ledger.num_bytes_by_tenant() == {b"small": size, b"large": 9 * size}


def test_a_turn_that_is_used_is_evicted_last():
    ledger = TurnLedger(2 * turn().num_bytes)
    noted(ledger, 0)
    noted(ledger, 1, place=digest("another"))
    assert numbers(ledger) == [0]
    noted(ledger, 2, place=digest("a third"))
    assert numbers(ledger) == [0]


def test_a_turn_above_the_bound_is_not_kept():
    ledger = TurnLedger(1000)
    assert not noted(ledger, 0, 1000) and numbers(ledger) == []
    assert not TurnLedger(0).is_on


@pytest.mark.parametrize(
    ("salt", "model"), [("bob", ""), ("ann/own", ""), ("", ""), ("ann", "adapter")]
)
def test_a_turn_is_found_under_its_own_salt_and_model_alone(salt: str, model: str):
    ledger = TurnLedger(2**20)
    noted(ledger, 5)
    assert numbers(ledger, salt, model) == [] and numbers(ledger) == [5]


def test_a_tenant_is_erased_with_its_narrower_salts_and_with_turns_that_are_being_written():
    ledger = TurnLedger(2**20)
    narrow = derive_salt("ann", "client")
    noted(ledger, 1)
    noted(ledger, 2, salt=narrow)
    noted(ledger, 3, salt="bob")
    running = [ledger.begin(begun(salt)) for salt in ("ann", narrow, "bob")]
    assert ledger.erase(b"ann") == 2
    assert [ledger.note(place, turn(9)) for place in running] == [False, False, True]
    assert numbers(ledger) == numbers(ledger, narrow) == []
    assert numbers(ledger, "bob") == [9, 3]
    ledger.check()


def test_one_narrow_salt_is_erased_alone():
    ledger = TurnLedger(2**20)
    narrow = derive_salt("ann", "client")
    noted(ledger, 1)
    noted(ledger, 2, salt=narrow)
    assert ledger.erase(narrow.encode()) == 1
    assert numbers(ledger) == [1]


def test_a_reset_forgets_everything_that_is_being_written_too():
    ledger = TurnLedger(2**20)
    noted(ledger, 1)
    running = ledger.begin(begun())
    assert ledger.clear() == 1 and not ledger.note(running, turn(2))
    assert numbers(ledger) == []
    ledger.check()


# --- sealed names --------------------------------------------------------------------------------


def test_a_sealed_name_opens_for_its_namespace_and_process_alone():
    seal, name = TurnSeal(), TurnName(PLACE, b"n" * 16)
    text = seal.seal(b"ann", name)
    assert seal.open(b"ann", text) == name
    assert seal.open(b"bob", text) is None
    assert TurnSeal().open(b"ann", text) is None
    assert seal.seal(b"ann", name) != text, "no two are alike, so none tells a place"


@pytest.mark.parametrize("text", ["", PREFIX, PREFIX + "!", PREFIX + "AAAA", "x" * 10_000, "ä"])
def test_what_is_no_sealed_name_opens_as_none(text: str):
    assert TurnSeal().open(b"ann", text) is None


def test_a_changed_letter_of_a_sealed_name_is_noticed():
    seal = TurnSeal()
    text = seal.seal(b"ann", TurnName(PLACE, b"n" * 16))
    for place in range(len(PREFIX), len(text) - 1):
        changed = "A" if text[place] != "A" else "B"
        assert seal.open(b"ann", text[:place] + changed + text[place + 1 :]) is None


# --- meaning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":[1, 2]}', '{ "b": [1,2], "a": 1.0 }'),
        ('{"s":"\\u00e9"}', '{"s": "é"}'),
        ("", "{}"),
        ('{"a": 1e2}', '{"a": 100}'),
        ('{"a": {"a": 1}}', {"a": {"a": 1}}),
    ],
)
def test_arguments_that_are_equal_json_are_equal(one: Any, other: Any):
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992.0}'),
        ('{"a": "x"}', '{"a": "x "}'),
        ('{"a": "e\\u0301"}', '{"a": "\\u00e9"}'),
        ('{"a": NaN}', '{"a": null}'),
        ('{"a": 1', '{"a":1'),
        ("[" * 100_000, "[" * 99_999),
    ],
)
def test_arguments_that_differ_are_unequal(one: str, other: str):
    assert canonical_arguments(one) != canonical_arguments(other)


def test_fields_of_a_message_cannot_be_shifted_into_each_other():
    """What a text says is no call, and what one message says is not the next one's."""
    said = {"role": "assistant", "content": "x", "tool_calls": []}
    called = {**said, "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}
    assert meaning_of(said) != meaning_of(called) != meaning_of({**said, "content": "xjson {}"})
    one = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    other = [{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}]
    assert [*places(PLACE, one)][-1] != [*places(PLACE, other)][-1]
    assert [*places(PLACE, one)][-1] != [*places(digest("b"), one)][-1]


# --- attacks on one engine -----------------------------------------------------------------------


def secret_talk() -> LedgerTalk:
    talk = LedgerTalk(FAMILIES["qwen"], cache_salt="ann")
    talk.say("user", "Which files?")
    talk.answer("The secret of Ann.", "", [Call("list", "{}")], drops_reasoning)
    talk.say("tool", "none")
    return talk


def test_another_tenant_s_messages_ids_and_names_bring_nothing():
    """Word for word the same conversation: its prompt is that of an engine without a ledger."""
    talk = secret_talk()
    chat = talk.prompt()
    assert "The secret of Ann." in talk.text(chat) and chat.begun is not None
    name = talk.turns.name(chat.begun)
    thief = LedgerTalk(FAMILIES["qwen"], talk.turns, cache_salt="bob")
    stolen = [*talk.messages]
    stolen[1] = {**stolen[1], "ostinato": {"seals": [name]}}
    on, off = thief.prompt(stolen), thief.prompt(stolen, is_on=False)
    assert list(on.tokens) == list(off.tokens)
    assert (on.report.num_turns, on.report.num_ignored_seals) == (0, 1)


def test_a_name_moved_to_another_message_chooses_nothing():
    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("user", "Which files?")
    first = talk.answer("One.", "", [Call("list", "{}")], drops_reasoning)
    talk.say("tool", "none")
    talk.answer("Another.", "", [Call("list", "{}")], drops_reasoning)
    assert first.begun is not None
    name = talk.turns.name(first.begun)
    talk.messages[-1] = {**talk.messages[-1], "ostinato": {"seals": [name]}}
    talk.say("tool", "none")
    chat = talk.prompt()
    assert chat.report.num_ignored_seals == 1 and "Another." in talk.text(chat)


def test_a_special_token_in_the_middle_is_never_put_back():
    """A model that writes the end of its turn, and then a system's, forges no frame."""
    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("user", "Hi.")
    chat = talk.prompt()
    assert chat.begun is not None
    tokens = [*talk.spelled("ok"), talk.tokenizer.eos_token_id, *talk.spelled("more")]
    message = {"role": "assistant", "content": "okmore"}
    assert not talk.turns.note(chat.begun, WrittenAnswer(message, tokens))
    marks = {talk.tokenizer.eos_token_id}
    assert talk.turns.note(chat.begun, WrittenAnswer(message, tokens, marks))

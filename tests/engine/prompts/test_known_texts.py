"""Texts and their tokens are kept within a bound, apart by tenant. One letter is one token."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.text.known_texts import MAX_ANSWERS, KnownTexts, Places, TokenizedText

ANN, BOB = b"ann", b"bob"
SIZE = 1024 + 4 * 5
"""Bytes of a text of four letters: its own, and those of what is around it."""


def row(letters: str) -> "array[int]":
    return array("I", list(letters.encode()))


def text(letters: str) -> TokenizedText:
    return TokenizedText(letters.encode(), row(letters), Places())


def with_answer(prompt: TokenizedText, answer: "array[int]") -> TokenizedText:
    return text(prompt.text.decode() + "".join(map(chr, answer)))


def memory(num_texts: int = 8) -> KnownTexts:
    """Room for so many texts of four letters."""
    return KnownTexts(num_texts * SIZE, with_answer)


def longest(known: KnownTexts, namespace: bytes, letters: str) -> str:
    """Return as much of a text as is known."""
    known.check()
    alike = [num_alike for _, num_alike in known.nearest(namespace, letters.encode())]
    return letters[: max(alike, default=0)]


def test_the_text_that_agrees_longest_is_found():
    known = memory()
    for letters in ("ABCD", "ABXY", "QRST"):
        known.note(ANN, text(letters))
    assert longest(known, ANN, "ABCXY") == "ABC"
    assert longest(known, ANN, "ABXYZ") == "ABXY"
    assert longest(known, ANN, "Z") == ""


def test_a_text_takes_the_place_of_those_that_it_goes_on_with():
    known = memory()
    for letters in ("AB", "ABCD", "AB", "ABCDEF"):
        known.note(ANN, text(letters))
    assert (len(known), longest(known, ANN, "ABCDEFGH")) == (1, "ABCDEF")


def test_an_answer_is_worked_out_when_its_prompt_is_continued():
    known = memory()
    known.note(ANN, text("AB"))
    known.note_answer(ANN, text("AB"), row("CD"))
    known.note_answer(ANN, text("AB"), row("XY"))
    assert len(known) == 1 and longest(known, ANN, "ABXYZ") == "ABXY"
    assert len(known) == 2 and longest(known, ANN, "ABCDE") == "ABCD"


def test_of_many_answers_to_one_prompt_the_newest_are_known():
    known = memory(64)
    for number in range(MAX_ANSWERS + 1):
        known.note_answer(ANN, text("AB"), row(chr(ord("a") + number)))
    assert longest(known, ANN, "ABb") == "ABb" and longest(known, ANN, "ABa") == "AB"


def test_what_was_used_least_recently_is_dropped_first():
    known = memory(2)
    known.note(ANN, text("ABCD"))
    known.note(BOB, text("EFGH"))
    assert longest(known, ANN, "ABCD") == "ABCD"
    known.note(BOB, text("IJKL"))
    assert [longest(known, BOB, letters) for letters in ("EFGH", "IJKL")] == ["", "IJKL"]
    assert longest(known, ANN, "ABCD") == "ABCD"
    known.note(ANN, text("M" * 4000))
    assert len(known) == 2, "what can never fit drops nothing"


def test_tenants_find_their_own_texts_and_are_forgotten_alone():
    narrow = b"ann\x1fvault"
    known = memory()
    for namespace in (ANN, narrow, BOB):
        known.note(namespace, text("ABCD"))
    assert longest(known, b"", "ABCD") == ""
    assert known.num_bytes_by_tenant() == {ANN: 2 * SIZE, BOB: SIZE}
    assert known.erase(narrow) == 1 and longest(known, narrow, "ABCD") == ""
    known.note(narrow, text("ABCD"))
    assert known.erase(ANN) == 2
    assert (longest(known, ANN, "ABCD"), longest(known, BOB, "ABCD")) == ("", "ABCD")
    assert known.clear() == 1 and known.num_bytes == 0


def test_without_room_nothing_is_kept():
    known = memory(0)
    known.note(ANN, text("ABCD"))
    known.note_answer(ANN, text("ABCD"), row("E"))
    assert len(known) == 0 and longest(known, ANN, "ABCD") == ""


_letters = st.text("AB", max_size=6)
_moves = st.lists(st.tuples(st.sampled_from([ANN, BOB]), _letters, _letters | st.none()))


@given(_moves, _letters)
@settings(max_examples=200, deadline=None)
def test_as_much_is_known_as_of_a_list_of_all_texts(moves, asked):
    """The oracle keeps every text, and compares with each."""
    known, oracle = memory(1000), {ANN: [""], BOB: [""]}
    for namespace, prompt, answer in moves:
        known.note(namespace, text(prompt))
        if answer:
            known.note_answer(namespace, text(prompt), row(answer))
        oracle[namespace].append(prompt + (answer or ""))
    for namespace, texts in oracle.items():
        best = max(sum(asked[:n] == other[:n] for n in range(1, 1 + min(len(asked), len(other))))
                   for other in texts)  # fmt: skip
        assert longest(known, namespace, asked) == asked[:best]

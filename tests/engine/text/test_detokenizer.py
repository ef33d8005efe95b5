"""Detokenizing token by token gives the text of all tokens at once.

The oracle decodes everything at once: the output's text is what it adds to the prompt's.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato.engine.text.detokenizer import Detokenizer, TokenTable
from tests.engine.text.small_tokenizers import ALL, FAST, TEXTS, JoinMarks, word_pieces

BYTE_PIECE = re.compile(r"<0x(..)>")
STAND_IN = "\ue000"
REPLACEMENT = "\ufffd"


def whole_text(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> str:
    """Decode everything at once, as the tokenizer does."""
    decoder = tokenizer.backend_tokenizer.decoder
    if "ByteFallback" in str(decoder):
        return with_sound_bytes(decoder, shown_tokens(tokenizer, ids, skip))
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def with_sound_bytes(decoder: Any, shown: Sequence[str]) -> str:
    """Decode as the library does, but each run of byte pieces that is not UTF-8 apart from it.

    The library would replace each byte of such a run, those of good characters included.
    """
    tokens: list[str] = []
    texts: list[str] = []
    for is_bytes, group in groupby(shown, lambda token: BYTE_PIECE.fullmatch(token) is not None):
        run = list(group)
        data = bytes(int(token[3:5], 16) for token in run) if is_bytes else b""
        if data.decode("utf-8", "ignore").encode() == data:
            tokens += run
        else:
            num_ascii = len(data) - len(data.lstrip(bytes(range(128))))
            tokens += [*run[:num_ascii], STAND_IN]
            texts.append(data[num_ascii:].decode("utf-8", "replace"))
    parts = decoder.decode(tokens).split(STAND_IN)
    texts.append("")
    return "".join(part + text for part, text in zip(parts, texts, strict=True))


def shown_tokens(tokenizer: Any, ids: Sequence[int], skip: bool) -> list[str]:
    """The tokens that the tokenizer knows and does not skip."""
    added = tokenizer.added_tokens_decoder
    tokens = {i: tokenizer.convert_ids_to_tokens(i) for i in ids}
    return [
        tokens[i]
        for i in ids
        if tokens[i] is not None and not (skip and i in added and added[i].special)
    ]


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Each token's text, then the rest."""
    return [*(detokenizer.append([token]) for token in ids), detokenizer.finish()]


def some_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Words, single bytes, special tokens, and ids that the tokenizer does not know."""
    tokenizer = FAST[name]()
    any_id = st.integers(0, len(tokenizer) + 3).map(lambda token: [token])
    words = st.sampled_from(["hello world", " so", "é你", "  ", "😀"]).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    parts = st.lists(any_id | words | st.just([tokenizer.eos_token_id]), max_size=8)
    return parts.map(lambda lists: [token for ids in lists for token in ids])


@given(st.data(), st.sampled_from(sorted(FAST)), st.booleans())
def test_any_ids_become_the_text_that_they_add_to_the_prompt(data, name, skip):
    """Garbage, special tokens and half characters included; the prompt ends in a whole one."""
    tokenizer = FAST[name]()
    prompt, output = data.draw(some_ids(name)), data.draw(some_ids(name))
    before = whole_text(tokenizer, prompt, skip)
    assume(not before.endswith(REPLACEMENT))
    everything = whole_text(tokenizer, [*prompt, *output], skip)
    assume(everything.startswith(before))

    texts = stream(Detokenizer(tokenizer, skip, prompt), output)

    assert before + "".join(texts) == everything


@given(st.data(), st.sampled_from(["byte_level", "llama", "gemma"]))
def test_runs_of_bytes_become_what_utf8_makes_of_them(data: st.DataObject, name: str):
    """Overlong forms, surrogates, lone and missing continuation bytes, amid good characters."""
    tokenizer = FAST[name]()
    pieces = st.sampled_from([b"\xed\xa0", b"\xc0", b"\xf4\x90", b"\xe4\xbd", b"\xf0\x9f", b"\x80"])
    good = st.sampled_from(["é", "你", "😀", "ཀ"]).map(str.encode)
    text = b"".join(data.draw(st.lists(pieces | good, max_size=12)))
    ids = byte_ids(tokenizer, text)

    texts = stream(Detokenizer(tokenizer, prompt=tokenizer.encode("hello")), ids)

    assert "".join(texts) == text.decode("utf-8", "replace")


def byte_ids(tokenizer: Any, text: bytes) -> list[int]:
    """One token for each byte."""
    if not tokenizer.is_fast:
        return list(text)
    table = TokenTable(tokenizer)
    of_byte = {table.entry(i).data: i for i in reversed(range(len(tokenizer)))}
    return [of_byte[bytes([byte])] for byte in text]


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("text", TEXTS)
def test_written_text_comes_back_as_the_tokenizer_decodes_it(name: str, text: str):
    """Equal to the library's own decode where the bytes are sound; no character comes in half."""
    tokenizer = ALL[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)

    texts = stream(Detokenizer(tokenizer, skip_special_tokens=False), ids)

    assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert REPLACEMENT not in "".join(texts)


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "hidden_bytes"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_shown_with_its_last_token(name: str, text: str):
    """Nothing waits longer than it must, also in a long run of byte pieces."""
    tokenizer = ALL[name]()
    ids = tokenizer.encode("a " + text, add_special_tokens=False)
    detokenizer, shown = Detokenizer(tokenizer), ""

    for end, token in enumerate(ids, start=1):
        shown += detokenizer.append([token])
        so_far = whole_text(tokenizer, ids[:end]) if name in FAST else tokenizer.decode(ids[:end])
        assert shown == so_far.rstrip(REPLACEMENT)


@pytest.mark.parametrize("name", sorted(ALL))
def test_tokens_may_come_in_any_portions(name: str):
    tokenizer = ALL[name]()
    ids = tokenizer.encode("".join(TEXTS), add_special_tokens=False)
    one_by_one = "".join(stream(Detokenizer(tokenizer), ids))

    for size in (2, 3, 7, len(ids)):
        detokenizer = Detokenizer(tokenizer)
        portions = [ids[start : start + size] for start in range(0, len(ids), size)]
        assert "".join(map(detokenizer.append, portions)) + detokenizer.finish() == one_by_one


@pytest.mark.parametrize(("name", "text"), [("llama", " world"), ("word_pieces", " world")])
def test_a_continuation_keeps_its_leading_space_and_a_beginning_has_none(name: str, text: str):
    """Special tokens in between count for neither."""
    tokenizer = ALL[name]()
    hello, world = (tokenizer.encode(word)[-1] for word in ("hello", "hello world"))
    special = tokenizer.bos_token_id

    assert Detokenizer(tokenizer, prompt=[hello]).append([world]) == text
    assert Detokenizer(tokenizer, prompt=[hello] + [special] * 9).append([world]) == text
    assert Detokenizer(tokenizer, prompt=[special]).append([special, world]) == text.lstrip()
    assert Detokenizer(tokenizer).append([world]) == text.lstrip()


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
@pytest.mark.parametrize("name", ["byte_level", "llama", "hidden_bytes"])
def test_a_character_that_begins_in_the_prompt_belongs_to_the_output(name: str, num_bytes: int):
    """A prompt given as token ids may end anywhere."""
    tokenizer = ALL[name]()
    ids = [*tokenizer.encode("a", add_special_tokens=False), *byte_ids(tokenizer, "😀".encode())]
    split = num_bytes - 4

    assert "".join(stream(Detokenizer(tokenizer, prompt=ids[:split]), ids[split:])) == "😀"


@pytest.mark.parametrize("name", ["byte_level", "llama", "hidden_bytes"])
def test_a_character_cut_off_at_the_end_is_one_replacement(name: str):
    """And the good ones before it stay, though byte fallback would replace them too."""
    tokenizer = ALL[name]()
    ids = tokenizer.encode("a😀😀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)

    assert detokenizer.append(ids) == "a😀"
    assert detokenizer.finish() == REPLACEMENT


@pytest.mark.parametrize("name", sorted(ALL))
def test_ids_that_the_tokenizer_does_not_know_have_no_text(name: str):
    """Models are often padded to more ids than their tokenizer has."""
    tokenizer = ALL[name]()
    word = tokenizer.encode("so", add_special_tokens=False)

    texts = stream(Detokenizer(tokenizer), [100_000, *word, 2**32 - 1])

    assert "".join(texts) == "so"


def test_a_space_spelled_as_a_byte_is_stripped_off_the_start_like_any_other():
    """Llama's decoder takes one space off the start of a text, however it was written."""
    tokenizer = FAST["llama"]()
    ids = [*byte_ids(tokenizer, b" "), *tokenizer.encode("hello", add_special_tokens=False)]

    assert "".join(stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids) == "hello"
    assert "".join(stream(Detokenizer(tokenizer, prompt=ids), ids)) == " hello"


def test_a_byte_piece_without_byte_fallback_is_ordinary_text():
    """A tokenizer may have such a token and spell it out."""
    tokenizer = word_pieces()
    tokenizer.add_tokens(["<0x41>"])
    token = tokenizer.convert_tokens_to_ids("<0x41>")

    assert Detokenizer(tokenizer, prompt=[token]).append([token]) == " <0x41>"


def test_whole_characters_of_a_token_that_ends_in_half_of_one_come_at_once():
    """Bytes of a slow tokenizer: "so", " " and half a smile, half a smile and "!"."""
    tokenizer = ALL["hidden_bytes"]()

    texts = stream(Detokenizer(tokenizer), [256, 257, 258, 260, 259, 0xBD, 0xA0])

    assert texts == ["so", " ", "😀!", "a", "你 ", "", "你", ""]
    prompt = [256, 257]
    assert Detokenizer(tokenizer, prompt=prompt).append([258]) == "😀!"


def test_a_decoder_that_takes_back_its_end_loses_no_new_text():
    """What is out stays out; the mark of "@@" should have gone, the "ld" must not."""
    tokenizer = JoinMarks()

    assert stream(Detokenizer(tokenizer), [0, 1, 2, 3]) == ["hello", " wor@@", "ld", " so", ""]


class Counted:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_ids = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_ids += len(ids)
        return str(self._tokenizer.decode(ids, **options))


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("kind", ["text", "special", "garbage"])
def test_the_thousandth_token_costs_no_more_than_the_tenth(name: str, kind: str):
    """Also where the model goes on with special tokens or with bytes that mean nothing."""
    tokenizer = Counted(ALL[name]())
    if kind == "text":
        ids = tokenizer.encode("hello world " * 500, add_special_tokens=False)
    elif kind == "special":
        ids = [tokenizer.eos_token_id] * 1000
    else:
        ids = list(range(tokenizer.vocab_size))[-60:] * 16
    detokenizer = Detokenizer(tokenizer, prompt=ids)

    used = []
    for start in range(0, 900, 300):
        tokenizer.num_ids = 0
        detokenizer.append(ids[start : start + 300])
        used.append(tokenizer.num_ids)

    assert max(used[1:]) <= 300 * 40
    assert used[2] <= used[1] * 1.1 + 1


def test_bytes_hidden_in_a_slow_tokenizer_are_not_waited_for_for_ever():
    """A thousand bytes that mean nothing, then a word: it must come."""
    tokenizer = ALL["hidden_bytes"]()
    detokenizer = Detokenizer(tokenizer)

    garbage = detokenizer.append([0xFF] * 1000)
    rest = detokenizer.append(b"word") + detokenizer.finish()

    assert garbage + rest == REPLACEMENT * 1000 + "word"


def test_one_table_serves_many_requests():
    """Tokens are looked up once, so a second request asks the tokenizer for nothing."""
    tokenizer = Counted(ALL["byte_level"]())
    table = TokenTable(tokenizer)
    ids = tokenizer.encode("hello world")
    first = stream(Detokenizer(table), ids)
    tokenizer.num_ids = 0

    assert stream(Detokenizer(table), ids) == first
    assert tokenizer.num_ids <= 2  # the first token of a text is decoded


@pytest.mark.parametrize("name", sorted(FAST))
def test_the_texts_of_single_tokens_make_up_the_whole(name: str):
    """As lists of log-probabilities show them: with their spaces, unlike decode([id])."""
    tokenizer = FAST[name]()
    table = TokenTable(tokenizer)
    hello, *rest = tokenizer.encode("hello hello world", add_special_tokens=False)

    text = table.text(hello) + "".join(map(table.text, rest))

    assert text.strip() == "hello hello world"
    assert table.text(100_000) == ""


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_a_token_that_is_part_of_a_character_shows_as_a_replacement(name: str):
    tokenizer = FAST[name]()
    [token] = byte_ids(tokenizer, b"\xf0")

    assert TokenTable(tokenizer).text(token) == REPLACEMENT

"""A text that is put together of known parts has the tokens of the whole."""

from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ostinato.engine.prompts.text_tokenizer import TextBoundaries, TextTokenizer
from ostinato.engine.text.detokenizer import Detokenizer
from tests.engine.text.small_tokenizers import ALL

OURS = (b"ours",)
END = AddedToken("<|end|>", special=True, normalized=False)
_ODD = (
    END,
    AddedToken("<|left|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|right|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|word|>", special=True, normalized=False, single_word=True),
    AddedToken("<|both|>", special=True, normalized=False),
    AddedToken("<|both|>x", special=False, normalized=False),
    AddedToken("|><|cross", special=False, normalized=False),
    AddedToken("<think>", special=False, normalized=True),
    AddedToken("two words", special=False, normalized=True),
)
"""Tokens that take white space, stand alone, begin like others, cross others, or are no markup."""


def _changed(name: str, **parts: Any) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with odd tokens, and with other parts."""
    backend = Tokenizer.from_str(ALL[name]().backend_tokenizer.to_str())
    for part, value in parts.items():
        setattr(backend, part, value)
    backend.add_tokens(list(_ODD))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def _metaspace(scheme: str) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme)


_TEMPLATE = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": lambda: _changed("byte_level", post_processor=_TEMPLATE),
    "byte-level, a space first": lambda: _changed(
        "byte_level", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "prefix space, old": lambda: _changed(
        "llama",
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]  # before each piece
        ),
        pre_tokenizer=None,
    ),
    "prefix space, first piece": lambda: _changed(
        "llama", normalizer=None, pre_tokenizer=_metaspace("first")
    ),
    "unigram": lambda: _changed("unigram", pre_tokenizer=_metaspace("first")),
    "unigram, compatibility forms": lambda: _changed("unigram", normalizer=normalizers.NFKC()),
    "word pieces": lambda: _changed(
        "word_pieces",
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    ),
    "word ends": lambda: _changed("word_ends", normalizer=normalizers.Strip()),
    "characters": lambda: _changed("characters"),
}
TOKENIZERS = {name: cache(make) for name, make in TOKENIZERS.items()}

_PARTS = [
    *(token.content for token in _ODD),
    *("<s>", "</s>", "<|end|", "|>", "<|", "＜|end|＞", "x", "|><|crossing"),
    *(" ", "  ", "\n\n", "\t", "hello", "Hello, world", "ld", "'s", "3.14", "é", "e\u0301"),
    *("你好", "👍", "\u200f", "▁", "Ġ", "\x00"),
]
texts = st.lists(st.sampled_from(_PARTS), max_size=8).map("".join)


def plainly(tokenizer: Any, text: str) -> list[int]:
    """The oracle: all of a text at once."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(rows=st.lists(st.tuples(texts, st.integers(0, 60)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_tokens_are_those_of_the_whole_text_whatever_is_known(name, rows):
    """Each text begins with a piece of the one before, or of itself."""
    tokenizer = TOKENIZERS[name]()
    once = TextTokenizer(tokenizer, max_bytes=1 << 20)
    before = ""
    for new, num_kept in rows:
        text = before[:num_kept] + new
        known = once.finish(once.begin(text, OURS))
        assert known.tokens.tolist() == plainly(tokenizer, text), text
        assert once.with_special_tokens(known).tolist() == tokenizer(text)["input_ids"]
        once.known.note(OURS[0], known)
        once.known.check()
        before = text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_only_tokens_whose_letters_are_always_theirs_are_boundaries(name: str):
    """Not those that take white space behind them, stand alone, overlap, or come after changes."""
    letters = set(TextBoundaries.of(TOKENIZERS[name]()).ids)
    own = {b"<|end|>", b"<|left|>"}
    assert own <= letters and not letters & {
        t.content.encode() for t in _ODD if t.content.encode() not in own
    }


@pytest.mark.parametrize("name", ["byte-level", "prefix space, first piece", "unigram"])
@given(answer=st.lists(st.integers(3, 60), min_size=1, max_size=8), cut=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_what_was_generated_keeps_its_tokens_as_far_as_its_text_is_repeated(name, answer, cut):
    """Other letters than the generated ones have the tokens of tokenizing them plainly."""
    tokenizer = TOKENIZERS[name]()
    once = TextTokenizer(tokenizer, max_bytes=1 << 20)
    prompt = once.finish(once.begin("<s>hello<|end|>", OURS))
    once.known.note_answer(OURS[0], prompt, array("I", answer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, prompt=prompt.tokens)
    shown = prompt.text.decode() + detokenizer.append(answer) + detokenizer.finish()
    known = once.finish(once.begin(shown + "<|end|>hello", OURS))
    assert known.tokens.tolist() == [*prompt, *answer, *plainly(tokenizer, "<|end|>hello")]
    assert known.num_generated_tokens == len(answer)
    other = shown[: len(prompt.text) + cut] + "Q<|end|>"
    plain = once.finish(once.begin(other, OURS))
    assert plain.tokens.tolist() == plainly(tokenizer, other)
    once.known.check()

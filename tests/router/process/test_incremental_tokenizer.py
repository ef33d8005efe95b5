"""Texts that go on: only their new end is tokenized, and the tokens are those of the whole."""

import random

import pytest
from tokenizers import Tokenizer

from ostinato.router.process.incremental_tokenizer import IncrementalTokenizer
from tests.support.models.checkpoints import byte_level_bpe

WORDS = [
    "thou", "art", "Romeo,", "wherefore", "banished;", "naïve", "x=1", "\n", "  ", "🌹", "1597",
    "<end>",
]  # fmt: skip
"""One of them is a special token."""


def tokenizer() -> Tokenizer:
    return byte_level_bpe([" ".join(WORDS * 20)], 400, ["<end>"])


@pytest.mark.parametrize("seed", range(5))
def test_a_text_that_goes_on_has_the_tokens_of_the_whole_for_the_price_of_its_end(seed: int):
    chance, whole = random.Random(seed), tokenizer()
    known, text, num_characters = IncrementalTokenizer(whole), "", 0
    for _ in range(12):
        text += chance.choice(["", " "]).join(chance.choices(WORDS, k=200))
        assert list(known.finish(known.begin(text, False))) == whole.encode(text).ids
        num_characters += len(text)
    assert known.num_characters < num_characters / 2


def test_a_tokenizer_whose_tokens_depend_on_what_follows_far_behind_is_asked_for_the_whole():
    """One long word: no token of the window begins where a known one does."""
    whole = tokenizer()
    known = IncrementalTokenizer(whole)
    for end in ("a", "b"):
        text = "thouart" * 400 + end
        assert list(known.finish(known.begin(text, False))) == whole.encode(text).ids

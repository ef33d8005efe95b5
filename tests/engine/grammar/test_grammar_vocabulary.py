"""Grammars over every kind of vocabulary, and those that cost too much to be tried."""

import json
import re
import sys
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from ostinato.engine.grammar.grammar_check import GrammarChecker
from ostinato.engine.grammar.grammar_vocabulary import grammar_vocabulary
from ostinato.engine.text.detokenizer import TokenTable
from tests.engine.text.small_tokenizers import ALL
from tests.support.models.checkpoints import make_tokenizer


@pytest.mark.parametrize("name", ALL)
def test_each_id_stands_for_the_bytes_of_its_text(name: str):
    """Described by the library or by us, the vocabulary is that of the detokenizer."""
    tokenizer = ALL[name]()
    table = TokenTable(tokenizer)
    vocabulary = grammar_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id or 0])

    for token in range(len(tokenizer)):
        entry = table.entry(token)
        if entry.known and not entry.special and entry.data != b"\xff":
            text = table.text(token).encode() if entry.data is None else entry.data
            assert vocabulary.decode_bytes([token]) == text


@pytest.mark.parametrize("name", [name for name in ALL if name != "word_ends"])
def test_forms_can_be_followed_in_every_kind_of_vocabulary(name: str):
    """Take the highest id that is allowed, step by step: the text has the form at its end."""
    tokenizer = ALL[name]()
    vocabulary = grammar_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id or 0])
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_regex("[a-z ]{5,9}"), log_level=0)
    ids: list[int] = []
    while not matcher.is_stopped():
        bits = "".join(f"{byte:08b}"[::-1] for byte in matcher.compute_bitmask())
        ids.append(bits.rindex("1"))
        assert matcher.consume_token(ids[-1]), matcher.get_error()

    assert re.fullmatch(b"[a-z ]{5,9}", vocabulary.decode_bytes(ids[:9]).split(b"<")[0])


@pytest.mark.parametrize("grammar", ['start: "<tool_call>" /[a-z]+/', "start: /[^}]*/"])
def test_a_mark_that_is_not_special_is_text(grammar: str):
    """Qwen's tokenizer has one token for it; a grammar that begins with it, or any text, takes it.

    By its number it is taken as well: so calls are written as the model was trained to.
    """
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    vocabulary = grammar_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    [mark, *rest] = tokenizer("<tool_call>ab")["input_ids"]
    assert len(rest) == 2 and vocabulary.decode_bytes([mark]) == b"<tool_call>"
    for each in (grammar, f"start: <[{mark}]> /[a-z]+/"):
        matcher = LLMatcher(vocabulary, each, log_level=0)
        assert all(matcher.consume_token(token) for token in (mark, *rest)), matcher.get_error()


BOMB = {"type": "string", "allOf": [{"pattern": f"[a-z]*a[a-z]{{{i}}}x"} for i in range(25)]}
"""Whether these patterns have a common text takes time and memory that double with each."""


@pytest.mark.parametrize("limit", ["CPU_LIMIT_S = 0.1", "MEMORY_LIMIT_BYTES = 2**22"])
def test_a_grammar_that_explodes_is_refused_and_its_worker_replaced(limit: str):
    """The limits are the worker's own; the next grammar gets a new worker."""
    program = f"from ostinato.engine.grammar import grammar_worker as w; w.{limit}; w.main()"
    checker = GrammarChecker([sys.executable, "-c", program])
    options: Any = {}
    bomb = str(LLMatcher.grammar_from_json_schema(json.dumps(BOMB), overrides=options))
    assert "make it simpler" in checker.check(bomb)
    assert checker.check(str(LLMatcher.grammar_from_lark("start: /[ab]/"))) == ""

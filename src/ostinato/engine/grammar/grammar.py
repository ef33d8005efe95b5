"""Compiles grammars to token constraints.

``llguidance`` (https://github.com/guidance-ai/llguidance) does the work: an Earley parser over
lexemes that are derivatives of regular expressions, walking a trie of the vocabulary's bytes. The
mask of the next token is computed as the text grows; nothing is precomputed for a grammar.

A thousand requests with one schema compile it once; each continuation works on a copy, which
shares what does not change.

Between the parts of a JSON text, one space or one line break with its indentation is allowed: weak
models would emit white space forever. So bounded strings and arrays bound the length of the text.

Each new grammar is first compiled in a process that can be killed (``grammar_check``). Compiled
grammars are cached per tenant: with a shared cache, the time of a request would reveal that another
tenant has used its schema.

Source: Willard and Louf, arXiv 2307.09702, for masks from regular expressions; Koo et al., arXiv
2407.08103, for the walk over bytes.
"""

import json
import re
import threading
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ostinato.core.identity import is_salt_of
from ostinato.core.plan import TokenConstraint
from ostinato.engine.grammar.grammar_check import GrammarChecker
from ostinato.engine.grammar.grammar_constraints import (
    DelayedConstraint,
    GrammarBudget,
    GrammarConstraint,
    brief,
)
from ostinato.engine.grammar.grammar_vocabulary import grammar_vocabulary
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.errors import InvalidSamplingParams, MissingTokenizer
from ostinato.runner.loaded_model import LoadedModel

JSON_WHITE_SPACE = r"[ ]?|\n[ ]{0,12}"
"""Between the parts of a JSON text."""

_MAX_COMPILED = 64
"""Compiled grammars that are remembered of each tenant; the least recently used goes first."""

_MAX_TENANTS = 256
"""Tenants whose grammars are remembered; the least recently served goes first."""

_TOKEN_ID = re.compile(r"<\[\d+\]>")
"""A token by its number: the process that checks grammars has another vocabulary."""

_JSON_PARTS = '{}[]":,'


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, read when first needed. Thread-safe."""

    def __init__(
        self, loaded: LoadedModel, checker: GrammarChecker | None = None, max_ms: int = 2
    ) -> None:
        """Allow requests ``max_ms`` of processor time a token for their grammars."""
        self._loaded, self._max_ms = loaded, max_ms
        self._checker = checker or GrammarChecker()
        self._guard = threading.RLock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, OrderedDict[tuple[str, str], GrammarConstraint | str]]
        self._compiled = OrderedDict()

    def compile(self, form: StructuredOutputs, tenant: str) -> TokenConstraint:
        """Return a constraint in its first state.

        Args:
            form: What to compile.
            tenant: Only requests of one tenant share what was compiled.

        Raises:
            MissingTokenizer: The model has none, so its ids have no text.
            InvalidSamplingParams: The schema, regex or grammar is invalid, uses what is not
                supported, takes too long to compile, or cannot be written with this vocabulary.

        Cost: an engine's first grammar starts a process (0.1 s) and reads the vocabulary, about
        10 microseconds per id; a new grammar takes a millisecond or so, a known one microseconds,
        and so does one that was refused before.
        """
        key = form.kind, form.source
        with self._guard:
            known = self._compiled.setdefault(tenant, OrderedDict())
            self._compiled.move_to_end(tenant)
            if len(self._compiled) > _MAX_TENANTS:
                self._compiled.popitem(last=False)
            constraint = known.get(key)
        if constraint is None:
            try:
                constraint = self._compile(form)
            except InvalidSamplingParams as error:
                constraint = str(error)
        with self._guard:
            known[key] = constraint
            known.move_to_end(key)
            if len(known) > _MAX_COMPILED:
                known.popitem(last=False)
        if isinstance(constraint, str):
            raise InvalidSamplingParams(constraint)
        budget = GrammarBudget(self._max_ms)
        begun = constraint.begin(budget)
        return begun if form.after is None else DelayedConstraint(begun, form, self._tokens, budget)

    @cached_property
    def _tokens(self) -> TokenTable:
        return TokenTable(self._loaded.require_tokenizer())

    def erase(self, tenant: str) -> None:
        """Remove what was compiled for a tenant, including under narrower salts."""
        with self._guard:
            for salt in [salt for salt in self._compiled if is_salt_of(salt, tenant)]:
                del self._compiled[salt]

    def _compile(self, form: StructuredOutputs) -> GrammarConstraint:
        with self._guard:
            vocabulary = self._read_vocabulary(form.kind)
        try:
            grammar = _grammar(form)
        except ValueError as error:
            raise _refusal(form, str(error)) from error
        if reason := self._checker.check(_TOKEN_ID.sub(r"<[1]>", grammar)):
            raise _refusal(form, reason)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(form, matcher.get_error())
        self._check_vocabulary(form, vocabulary)
        num_bytes = 4 * -(-vocabulary.vocab_size // 32)
        constraint = GrammarConstraint(matcher, num_bytes, GrammarBudget(self._max_ms))
        first = np.unpackbits(constraint.copy().mask(), bitorder="little")
        if not first[: self._loaded.vocab_size].any():
            raise _refusal(form, "no token of this model's vocabulary can begin it")
        return constraint

    def _read_vocabulary(self, kind: str) -> LLTokenizer:
        if self._vocabulary is None:
            if self._loaded.tokenizer is None:
                raise MissingTokenizer(
                    "this model has no tokenizer, so its ids have no text: "
                    f"structured_outputs.{kind} cannot be kept; leave it out"
                )
            eos = sorted(self._loaded.eos_token_ids)
            self._vocabulary = grammar_vocabulary(
                self._loaded.tokenizer, self._loaded.vocab_size, eos
            )
        return self._vocabulary

    def _check_vocabulary(self, form: StructuredOutputs, vocabulary: LLTokenizer) -> None:
        """Refuse texts that this model's vocabulary cannot write."""
        texts = tuple(form.choice or ())
        if form.json is not None or form.json_object:
            texts = (_JSON_PARTS,)
        for text in texts:
            ids = vocabulary.greedy_tokenize(text)
            written = vocabulary.decode_bytes(ids)
            if written != text.encode() or max(ids) >= self._loaded.vocab_size:
                raise _refusal(
                    form,
                    f"this model's vocabulary cannot write {text!r:.80}: it lacks characters",
                )


def _grammar(form: StructuredOutputs) -> str:
    """Return a grammar in the library's own notation."""
    if form.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in form.choice)
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(texts)))
    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    schema = '{"type": "object"}' if form.json_object else form.source
    options: Any = {"whitespace_pattern": JSON_WHITE_SPACE}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def _refusal(form: StructuredOutputs, reason: str) -> InvalidSamplingParams:
    given = f"={form.source!r:.80}" if form.source else ""
    return InvalidSamplingParams(f"structured_outputs.{form.kind}{given}: {brief(reason)}")

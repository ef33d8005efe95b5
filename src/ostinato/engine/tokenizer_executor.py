"""Tokenizes, renders templates and compiles grammars in threads, off the event loop.

Tenants take turns. Long texts have their own thread and copy of the tokenizer, so that short ones
do not wait for them; so have new grammars. A short row of ids is checked on the event loop
itself, since a change of threads costs more than the check.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ostinato.core.identity import tenant_of
from ostinato.core.plan import TokenConstraint
from ostinato.engine.chat import Message, render_chat
from ostinato.engine.engine import Engine
from ostinato.engine.grammar_check import NUM_WORKERS
from ostinato.engine.prompts import Prompt
from ostinato.engine.request_validation import (
    PreparedRequest,
    kept_prompt_tokens,
    refuse_long_text,
    spell_bad_words,
    tokenize,
)
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.structured_outputs import StructuredOutputs
from ostinato.engine.tenant_queue import TenantQueue
from ostinato.engine.thread_bridge import AnswerT
from ostinato.engine.token_table import TokenTable

SHORT_TOKENS = 8192
"""Ids that are checked on the event loop: within half a millisecond."""

LONG_CHARACTERS = 32768
"""Texts from here on are tokenized apart from shorter ones, which take 10 ms at most."""


class TokenizerExecutor:
    """Makes requests, ids and texts for one engine."""

    def __init__(self, engine: Engine) -> None:
        """Serve an engine, whose thread may run at the same time."""
        self._engine = engine
        self._making = threading.Lock()
        self._texts = TenantQueue("tokenizer")
        self._long_texts = TenantQueue("long-tokenizer")
        self._grammars = TenantQueue("grammar", NUM_WORKERS)

    async def request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int
    ) -> PreparedRequest:
        """Make and check a request.

        Raises:
            RequestError: It can never be served.
        """
        if getattr(params, "bad_words", ()):  # uses the tokenizer
            loaded, words = self._engine.loaded, params
            params = await self.do(lambda: spell_bad_words(words, loaded), prompt.cache_salt)
        wanted = getattr(params, "structured_outputs", None)
        constraint = None if wanted is None else await self._constraint(wanted, prompt.cache_salt)

        def make(known: Prompt) -> PreparedRequest:
            with self._making:
                return self._engine.make_request(known, params, request_id, priority, constraint)

        if prompt.text is None:
            if _num_ids(prompt) <= SHORT_TOKENS:
                return make(prompt)
            return await self._texts.run(_tenant(prompt.cache_salt), lambda: make(prompt))

        def tokenize_and_make(tokenizer: PreTrainedTokenizerBase | None) -> PreparedRequest:
            most = self._engine.max_model_len
            keep = kept_prompt_tokens(params, most) if isinstance(params, SamplingParams) else None
            ids = tokenize(prompt, self._engine.loaded, most, tokenizer, keep)
            return make(replace(prompt, token_ids=ids))

        return await self._with_tokenizer(prompt.cache_salt, len(prompt.text), tokenize_and_make)

    async def do(self, work: Callable[[], AnswerT], cache_salt: str = "") -> AnswerT:
        """Do something short with the tokenizer, off the event loop.

        Raises:
            ForkedProcess: This is a fork of the engine's process; the threads stayed there.
        """
        self._engine.owner.check()
        return await self._texts.run(_tenant(cache_salt), work)

    async def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids."""
        loaded, text = self._engine.loaded, prompt.text or ""

        def work(own: PreTrainedTokenizerBase | None) -> list[int]:
            if add_special_tokens:
                return tokenize(prompt, loaded, None, own).tolist()
            tokenizer = own or loaded.require_tokenizer()
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        return await self._with_tokenizer(prompt.cache_salt, len(text), work)

    async def decode(self, prompt: Prompt) -> str:
        """Return the text of token ids, special ones included."""
        tokens, table = self._ids_and_table(prompt)
        return await self.do(lambda: table.decode(tokens), prompt.cache_salt)

    async def decode_each(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the texts of several rows of the model's own ids; numbers without a tokenizer."""
        tokenizer = self._engine.loaded.tokenizer
        if tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        table = TokenTable(tokenizer)
        return await self.do(lambda: list(map(table.decode, rows)))

    async def pieces(self, prompt: Prompt) -> list[str]:
        """Return the text of each token by itself."""
        tokens, table = self._ids_and_table(prompt)
        return await self.do(lambda: list(map(table.text, tokens)), prompt.cache_salt)

    async def render(
        self,
        messages: Sequence[Message],
        chat_template: str | None,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        cache_salt: str,
    ) -> list[int]:
        """Return a conversation's token ids."""
        self._engine.loaded.require_tokenizer()
        contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
        text = "".join(content for content in contents if isinstance(content, str))

        def work(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
            if tokenizer is not None:
                refuse_long_text(text, self._engine.max_model_len, tokenizer)
            return render_chat(
                tokenizer, messages, chat_template, add_generation_prompt, tools, **options
            )

        return await self._with_tokenizer(cache_salt, len(text), work)

    async def _constraint(self, wanted: StructuredOutputs, cache_salt: str) -> TokenConstraint:
        return await self._grammars.run(
            _tenant(cache_salt), lambda: self._engine.grammars.compile(wanted, cache_salt)
        )

    async def _with_tokenizer(
        self,
        cache_salt: str,
        num_characters: int,
        work: Callable[[PreTrainedTokenizerBase | None], AnswerT],
    ) -> AnswerT:
        """Do work with a tokenizer that no other thread uses at the same time; as ``do``."""
        self._engine.owner.check()
        tokenizer = self._engine.loaded.tokenizer
        if num_characters < LONG_CHARACTERS or tokenizer is None or not tokenizer.is_fast:
            return await self._texts.run(_tenant(cache_salt), lambda: work(tokenizer))
        return await self._long_texts.run(
            _tenant(cache_salt), lambda: work(self._tokenizer_of_long_texts)
        )

    @cached_property
    def _tokenizer_of_long_texts(self) -> PreTrainedTokenizerBase:
        return copy.deepcopy(self._engine.loaded.require_tokenizer())

    def _ids_and_table(self, prompt: Prompt) -> tuple[list[int], TokenTable]:
        """Check token ids, and find out how they are spelled."""
        loaded = self._engine.loaded
        return tokenize(prompt, loaded).tolist(), TokenTable(loaded.require_tokenizer())


def _tenant(cache_salt: str) -> str:
    """Return the tenant that takes a turn, without what its client added to the salt."""
    return tenant_of(cache_salt.encode()).decode()


def _num_ids(prompt: Prompt) -> int:
    ids = prompt.token_ids
    assert ids is not None, "a prompt is a text or a row of ids"
    return ids.size if isinstance(ids, np.ndarray) else len(ids)

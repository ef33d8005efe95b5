"""How are requests and texts made without holding up the event loop?

Tokenizers and templates take a while, and are not made for many threads at once: they are used in
threads beside the event loop, one at a time. What takes no while, a short row of ids, is made on
the spot: going to another thread and back costs more than the work.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ostinato.core.sampling_params import SamplingParams
from ostinato.engine.chat import Message, render_chat
from ostinato.engine.crossing import AnswerT
from ostinato.engine.engine import Engine
from ostinato.engine.prompts import Prompt
from ostinato.engine.requests import EngineRequest, tokenize
from ostinato.engine.token_table import TokenTable

SHORT_TOKENS = 8192
"""Ids that are checked on the event loop: within half a millisecond."""


class Workroom:
    """Makes requests, ids and texts for one engine."""

    def __init__(self, engine: Engine) -> None:
        """Work for an engine; its loop may run meanwhile."""
        self._engine = engine
        self._one_at_a_time = threading.Lock()

    async def request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int
    ) -> EngineRequest:
        """Make a request and check everything about it.

        Raises:
            RequestError: It can never be served.
        """

        def make() -> EngineRequest:
            return self._engine.make_request(prompt, params, request_id, priority)

        if _is_quick(prompt, params) and self._one_at_a_time.acquire(blocking=False):
            try:
                return make()
            finally:
                self._one_at_a_time.release()
        return await self.do(make)

    async def do(self, work: Callable[[], AnswerT]) -> AnswerT:
        """Do something with the tokenizer, beside the event loop."""
        return await asyncio.to_thread(self._locked, work)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Return a text's token ids."""
        return await self.do(lambda: tokenize(prompt, self._engine.loaded).tolist())

    async def decode(self, prompt: Prompt) -> str:
        """Return the text of token ids, special ones included."""
        tokens, table = self._ids_and_table(prompt)
        return await self.do(lambda: table.decode(tokens))

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
        return await self.do(lambda: list(map(table.text, tokens)))

    async def render(
        self,
        messages: Sequence[Message],
        chat_template: str | None,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        """Write a conversation as token ids."""
        tokenizer = self._engine.loaded.require_tokenizer()
        return await self.do(
            lambda: render_chat(tokenizer, messages, chat_template, add_generation_prompt, tools)
        )

    def _ids_and_table(self, prompt: Prompt) -> tuple[list[int], TokenTable]:
        """Check token ids, and find out how they are spelled."""
        loaded = self._engine.loaded
        return tokenize(prompt, loaded).tolist(), TokenTable(loaded.require_tokenizer())

    def _locked(self, work: Callable[[], AnswerT]) -> AnswerT:
        with self._one_at_a_time:
            return work()


def _is_quick(prompt: Prompt, params: Any) -> bool:
    """Whether making a request takes less than going to another thread for it."""
    ids = prompt.token_ids
    if ids is None or getattr(params, "structured_outputs", None) is not None:
        return False
    return (ids.size if isinstance(ids, np.ndarray) else len(ids)) <= SHORT_TOKENS

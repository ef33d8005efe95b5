"""Tokenizes, renders templates and compiles grammars in threads, off the event loop.

Tenants take turns. Texts with a long unknown part have their own thread and copy of the tokenizer,
so that others do not wait for them; so have new grammars. A short row of ids is checked on the
event loop itself, since a change of threads costs more than the check.
"""

import copy
import threading
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ostinato.core.plan import TokenConstraint
from ostinato.engine.api.engine_thread import AnswerT
from ostinato.engine.grammar.grammar_check import NUM_WORKERS
from ostinato.engine.ledger.continuation import Continuation
from ostinato.engine.ledger.meaning import Message
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.chat import RenderedChat
from ostinato.engine.prompts.image_decoder import ImageDecoder
from ostinato.engine.prompts.image_prompts import decode_prompt
from ostinato.engine.prompts.text_tokenizer import PartialText
from ostinato.engine.requests.prompts import Prompt, TokenIds, parse_prompt
from ostinato.engine.requests.request_validation import (
    PreparedRequest,
    kept_prompt_tokens,
    tokenize,
)
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.requests.tenant_queue import TenantQueue
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.images.parts import images_in
from ostinato.images.picture import Picture

SHORT_TOKENS = 8192
"""Most ids that are checked on the event loop, within half a millisecond."""

LONG_CHARACTERS = 32768
"""Texts of this length or more are tokenized apart from others, which take 10 ms at most."""


class TokenizerExecutor:
    """Makes requests, ids and texts for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._making = threading.Lock()
        self._texts = TenantQueue("tokenizer")
        self._long_texts = TenantQueue("long-tokenizer")
        self._grammars = TenantQueue("grammar", NUM_WORKERS)
        self._images = ImageDecoder(engine.config.max_image_pixels)

    async def request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int
    ) -> PreparedRequest:
        """Make and check a request.

        Raises:
            RequestError: It can never be served.
        """
        if getattr(params, "bad_words", ()) or getattr(params, "thinking_budget", None) is not None:
            # They use the tokenizer.
            await self.run(lambda: self._engine.params.prepare(params), prompt.cache_salt)
        structure = getattr(params, "structured_outputs", None)
        constraint: TokenConstraint | None = None
        if structure is not None:
            compile_grammar, salt = self._engine.grammars.compile, prompt.cache_salt
            constraint = await self._grammars.run(salt, lambda: compile_grammar(structure, salt))

        def make(known: Prompt) -> PreparedRequest:
            with self._making:
                return self._engine.make_request(known, params, request_id, priority, constraint)

        if prompt.token_ids is not None:
            if _num_ids(prompt) <= SHORT_TOKENS and not prompt.images:
                return make(prompt)
            return await self._texts.run(prompt.cache_salt, lambda: make(prompt))

        prompt = self._engine.prompts.with_placeholders(prompt)
        max_tokens, keep = self._engine.max_model_len, None
        if isinstance(params, SamplingParams):
            keep = kept_prompt_tokens(params, max_tokens)
        return await self._with_ids(prompt, max_tokens, keep, make)

    async def load_images(
        self, messages: Sequence[Message], cache_salt: str = ""
    ) -> tuple[Sequence[Any], tuple[Picture, ...]]:
        """Fetch and decode the images of a conversation; tenants take turns at decoding.

        Returns:
            The conversation as ``render`` takes it beside its images, and these.

        Raises:
            RequestError: The model takes none or not as many, or one cannot be loaded.
        """
        if not images_in(messages):
            return messages, ()
        self._engine.owner.check()
        return await self._engine.image_prompts.load(
            messages, self._images.of_tenant(cache_salt), self._engine.max_model_len
        )

    async def with_images(self, tokens: TokenizedText, images: Sequence[Picture]) -> list[int]:
        """Return a rendered conversation's token ids, with all placeholders of its images."""
        place = self._engine.image_prompts.place
        if not images:
            return tokens.tokens.tolist()
        return await self.run(lambda: place(images, tokens.tokens, b"")[0].tolist())

    def num_tokens(self, images: Sequence[Picture], tokens: "array[int]") -> int:
        """Return how many tokens the beginning of a rendered conversation has with its images."""
        return self._engine.image_prompts.num_tokens(images, tokens)

    async def run(self, work: Callable[[], AnswerT], cache_salt: str = "") -> AnswerT:
        """Run short work with the tokenizer, off the event loop.

        Raises:
            ForkedProcess: This is a fork of the engine's process; the threads stayed there.
        """
        self._engine.owner.check()
        return await self._texts.run(cache_salt, work)

    async def run_long(self, work: Callable[[], AnswerT], cache_salt: str = "") -> AnswerT:
        """Run work of any length with a tokenizer of its own, beside that of ``run``.

        Raises:
            ForkedProcess: This is a fork of the engine's process; the threads stayed there.
        """
        self._engine.owner.check()
        return await self._long_texts.run(cache_salt, work)

    async def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids."""
        engine = self._engine
        if add_special_tokens or engine.texts is None:
            return await self._with_ids(prompt, None, None, lambda p: list(p.token_ids or ()))
        text = prompt.text or ""
        return await self._tokenized(
            prompt,
            lambda: engine.prompts.begin_text(text, prompt),
            None,
            lambda known: known.tokens.tolist(),
        )

    async def decode(self, token_ids: TokenIds) -> str:
        """Return the text of token ids; as ``AsyncLLM.decode``."""
        tokens, table = self._ids_and_table(token_ids)
        return await self.run(lambda: table.decode(tokens))

    async def decode_each(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the texts of several rows of the model's own ids; numbers without a tokenizer.

        An image is shown as one, with its number of tokens.
        """
        texts, vision = self._engine.texts, self._engine.loaded.vision
        if texts is None:
            return [" ".join(map(str, row)) for row in rows]
        decode = texts.table.decode
        return await self.run(lambda: [decode_prompt(row, decode, vision) for row in rows])

    async def pieces(self, token_ids: TokenIds) -> list[str]:
        """Return the text of each token by itself; part of a character shows as U+FFFD.

        Raises:
            MissingTokenizer: The checkpoint has none.
            TokenOutOfRange: The model does not have such an id.
        """
        tokens, table = self._ids_and_table(token_ids)
        return await self.run(lambda: list(map(table.text, tokens)))

    def render(
        self,
        prompt_context: Prompt,
        messages: Sequence[Message],
        chat_template: str | None = None,
        history: Sequence[Message] | None = None,
        **settings: Any,
    ) -> Awaitable[RenderedChat]:
        """Return a conversation's token ids, which may be passed on as ``prompt_token_ids``.

        Args:
            prompt_context: A prompt of its sender: whose texts and turns are known, and whether
                they are used.
            messages: In order.
            chat_template: Jinja; None is the tokenizer's own.
            history: The messages as the client sent them; None if they are the same.
            **settings: As of ``render_text``.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: There is no message or no template, or the template refuses.
        """
        self._engine.loaded.require_tokenizer()
        prompts, turns = self._engine.prompts, self._engine.prompts.turns
        assert turns is not None, "there is a tokenizer"
        written: list[Continuation] = []

        def begin() -> PartialText:
            continuation = prompts.continued(
                prompt_context, messages, chat_template, history, **settings
            )
            partly, continuation = prompts.begin_chat(continuation, prompt_context)
            written.append(continuation)
            return partly

        return self._tokenized(
            prompt_context,
            begin,
            self._engine.max_model_len,
            lambda known: turns.finished(written[0], known),
        )

    async def _with_ids(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        keep: int | None,
        use: Callable[[Prompt], AnswerT],
    ) -> AnswerT:
        """Tokenize a prompt that is a text, and use it in the same thread."""
        engine, text = self._engine, prompt.text or ""
        if keep is None and engine.texts is not None and engine.texts.takes_prompts:
            return await self._tokenized(
                prompt,
                lambda: engine.prompts.begin_text(text, prompt),
                max_tokens,
                lambda known: use(engine.prompts.with_ids(prompt, known)),
            )

        engine.owner.check()
        is_long = self._is_long(len(text))

        def whole() -> AnswerT:
            tokenizer = self._tokenizer_of_long_texts if is_long else engine.loaded.tokenizer
            return use(
                replace(
                    prompt, token_ids=tokenize(prompt, engine.loaded, max_tokens, tokenizer, keep)
                )
            )

        queue = self._long_texts if is_long else self._texts
        return await queue.run(prompt.cache_salt, whole)

    async def _tokenized(
        self,
        prompt_context: Prompt,
        begin_text: Callable[[], PartialText],
        max_tokens: int | None,
        use: Callable[[TokenizedText], AnswerT],
    ) -> AnswerT:
        """Tokenize the unknown part of a text; among the long texts only if that part is long."""
        engine, texts, salt = self._engine, self._engine.texts, prompt_context.cache_salt
        assert texts is not None, "there is a tokenizer"
        engine.owner.check()

        def begin() -> tuple[PartialText, AnswerT | None]:
            partly = begin_text()
            is_long = self._is_long(partly.num_left)
            return partly, None if is_long else use(texts.finish(partly, max_tokens=max_tokens))

        partly, answer = await self._texts.run(salt, begin)
        if answer is not None:
            return answer
        return await self._long_texts.run(
            salt, lambda: use(texts.finish(partly, self._tokenizer_of_long_texts, max_tokens))
        )

    def _is_long(self, num_characters: int) -> bool:
        """Whether a text goes to the thread of long ones; slow tokenizers hold Python's lock."""
        tokenizer = self._engine.loaded.tokenizer
        return num_characters >= LONG_CHARACTERS and tokenizer is not None and tokenizer.is_fast

    @cached_property
    def _tokenizer_of_long_texts(self) -> PreTrainedTokenizerBase:
        return copy.deepcopy(self._engine.loaded.require_tokenizer())

    def _ids_and_table(self, token_ids: TokenIds) -> tuple[list[int], TokenTable]:
        """Check token ids, and return them with the table of their texts."""
        loaded, texts = self._engine.loaded, self._engine.texts
        tokens = tokenize(parse_prompt(token_ids), loaded)
        loaded.require_tokenizer()
        assert texts is not None, "there is a tokenizer"
        return tokens.tolist(), texts.table


def _num_ids(prompt: Prompt) -> int:
    ids = prompt.token_ids
    assert ids is not None, "a prompt is a text or a row of ids"
    return ids.size if isinstance(ids, np.ndarray) else len(ids)

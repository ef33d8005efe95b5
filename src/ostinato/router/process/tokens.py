"""Tokenizes prompts as the workers do, outside the event loop.

With the configured tokenizer, else a worker's ``/tokenize``. Without either, prompts are compared
by characters, and KV events, which contain tokens, cannot be used.
"""

import logging
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp

from ostinato.core.errors import PromptTooLong
from ostinato.engine.requests.tenant_queue import TenantQueue
from ostinato.router.policy import RouteRequest
from ostinato.router.process.incremental_tokenizer import Beginning
from ostinato.router.process.routing_fields import (
    MAX_PROMPT_CHARACTERS,
    RoutingFields,
    check_length,
)
from ostinato.router.process.tokenizer import LocalTokenizer
from ostinato.router.process.worker import Worker

logger = logging.getLogger("ostinato")


_THREAD_BYTES = 65_536
"""Size from which a body is read outside the event loop."""

_LONG_CHARACTERS = 32_768
"""Unknown texts of this length or more are tokenized apart from others, which take 10 ms."""

_LONG_PROMPT_CHARACTERS = 262_144
"""Prompts of this length or more are also read and rendered apart from others."""


class RoutingTokenizer:
    """Turns prompts into the tokens that the router compares.

    Tenants take turns, and long texts have a thread of their own, so that short prompts of other
    tenants do not queue behind them.

    Args:
        workers: Workers by name, which may tokenize.
        tokenizer: Their tokenizer; None asks a worker.
        max_characters: Maximum characters or ids of a prompt.
        count: Called with the source of each prompt's tokens: ``ids``, ``local``, ``worker`` or
            ``characters``.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        tokenizer: LocalTokenizer | None,
        max_characters: int = MAX_PROMPT_CHARACTERS,
        count: Callable[[str], None] = lambda source: None,
    ) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._count = count
        self._short = TenantQueue("ostinato-tokenizer")
        self._long = TenantQueue("ostinato-long-tokenizer")
        self._has_warned = False

    async def read(self, path: str, body: bytes, tenant: str) -> RoutingFields:
        """Read the prompt of a request's body; see ``RoutingFields.of``."""
        if len(body) < _THREAD_BYTES:
            return RoutingFields.of(path, body)
        return await self._queue(len(body)).run(tenant, partial(RoutingFields.of, path, body))

    async def request(
        self, prompt: RoutingFields, salt: str, tenant: str, session: str, headers: dict[str, str]
    ) -> RouteRequest:
        """Return the router's view of a prompt; see ``RoutingFields.route_request``.

        ``headers`` are sent where a worker is asked for tokens.

        Raises:
            PromptTooLong: It has too many characters or ids.
        """
        check_length(prompt.num_characters, self._max_characters)
        how, tokens = await self._tokens(prompt, tenant, headers)
        self._count(how)
        adapter = self._adapter(prompt.model)
        view = partial(prompt.route_request, tokens, salt, tenant, session, adapter)
        if tokens is not None or prompt.num_characters < _LONG_CHARACTERS:
            return view()
        return await self._queue(prompt.num_characters).run(tenant, view)

    def _queue(self, num_characters: int) -> TenantQueue:
        return self._long if num_characters >= _LONG_PROMPT_CHARACTERS else self._short

    async def _tokens(
        self, prompt: RoutingFields, tenant: str, headers: dict[str, str]
    ) -> tuple[str, "array[int] | None"]:
        if prompt.token_ids is not None:
            return "ids", prompt.token_ids
        tokens, how = None, "local"
        try:
            if self._tokenizer is not None:
                tokens = await self._tokenize(self._tokenizer, prompt, tenant)
            else:
                how, tokens = "worker", await self._ask_worker(prompt, headers)
        except PromptTooLong:
            raise
        except Exception as error:  # a template may raise any exception; the worker reports it
            self._warn(error)
        return ("characters" if tokens is None else how), tokens

    async def _tokenize(
        self, tokenizer: LocalTokenizer, prompt: RoutingFields, tenant: str
    ) -> "array[int]":
        """Tokenize the unknown part of a prompt; in the thread of long ones if that is long."""

        def begin() -> "tuple[Beginning, array[int] | None]":
            beginning = tokenizer.begin(prompt)
            is_long = beginning.num_left >= _LONG_CHARACTERS
            return beginning, None if is_long else tokenizer.finish(beginning)

        beginning, tokens = await self._queue(prompt.num_characters).run(tenant, begin)
        if tokens is not None:
            return tokens
        return await self._long.run(tenant, partial(tokenizer.finish, beginning))

    async def _ask_worker(
        self, prompt: RoutingFields, headers: dict[str, str]
    ) -> "array[int] | None":
        """Ask a worker that can tokenize."""
        able = [w for w in self._workers.values() if w.can_tokenize and w.serves(prompt.model)]
        worker = min(able, key=lambda each: each.num_live, default=None)
        if worker is None:
            return None
        body: dict[str, Any] = {"model": prompt.model} if prompt.model else {}
        if prompt.messages is None:
            body["prompt"] = prompt.text or ""
        else:
            body |= {"messages": prompt.messages}
            body |= {"tools": prompt.tools} if prompt.tools else {}
            variables = dict(prompt.template)
            if "add_generation_prompt" in variables:
                body["add_generation_prompt"] = variables.pop("add_generation_prompt")
            body |= {"chat_template_kwargs": variables} if variables else {}
        return await worker.tokenize(body, headers)

    def _adapter(self, model: str) -> str:
        """Return the adapter of a model's name; empty without one."""
        adapters = (w.models[model] for w in self._workers.values() if model in w.models)
        return next(adapters, "")

    def _warn(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        if not isinstance(error, aiohttp.ClientError):
            self._has_warned = True
        logger.log(
            level, "a prompt could not be tokenized, and is compared by characters: %r", error
        )

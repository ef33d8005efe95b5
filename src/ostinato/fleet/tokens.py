"""Tokenizes prompts as the workers do, outside the event loop.

With the configured tokenizer, else a worker's ``/tokenize``. Without either, prompts are compared
by characters, and KV events, which contain tokens, cannot be used.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from ostinato.fleet.prompts import Prompt
from ostinato.fleet.tokenizer import LocalTokenizer
from ostinato.fleet.worker import Worker
from ostinato.router import RouteRequest

logger = logging.getLogger("ostinato")


class PromptTokens:
    """Turns prompts into the tokens that the router compares.

    Args:
        workers: Workers by name, which may tokenize.
        tokenizer: Their tokenizer; None asks a worker.
        count: Called with the source of each prompt's tokens: ``ids``, ``local``, ``worker`` or
            ``characters``.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        tokenizer: LocalTokenizer | None,
        count: Callable[[str], None] = lambda source: None,
    ) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._count = count
        self._thread = ThreadPoolExecutor(1, "ostinato-tokenizer")
        self._has_warned = False

    async def request(
        self, prompt: Prompt, salt: str, tenant: str, session: str, headers: dict[str, str]
    ) -> RouteRequest:
        """Return the router's view of a prompt; see ``Prompt.route_request``.

        ``headers`` are sent where a worker is asked for tokens.
        """
        how, tokens = await self._tokens(prompt, headers)
        self._count(how)
        return prompt.route_request(tokens, salt, tenant, session, self._adapter(prompt.model))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _tokens(
        self, prompt: Prompt, headers: dict[str, str]
    ) -> tuple[str, "array[int] | None"]:
        if prompt.token_ids is not None:
            return "ids", array("I", prompt.token_ids)
        tokens, how = None, "local"
        try:
            if self._tokenizer is not None:
                loop = asyncio.get_running_loop()
                tokens = await loop.run_in_executor(self._thread, self._tokenizer.encode, prompt)
            else:
                how, tokens = "worker", await self._ask_worker(prompt, headers)
        except Exception as error:  # a template may raise any exception; the worker reports it
            self._warn(error)
        return ("characters" if tokens is None else how), tokens

    async def _ask_worker(self, prompt: Prompt, headers: dict[str, str]) -> "array[int] | None":
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
            body |= {"chat_template_kwargs": prompt.template} if prompt.template else {}
        tokens = await worker.tokenize(body, headers)
        return None if tokens is None else array("I", tokens)

    def _adapter(self, model: str) -> str:
        """Return the adapter of a model's name; empty without one."""
        found = (w.models[model] for w in self._workers.values() if model in w.models)
        return next(found, "")

    def _warn(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        if not isinstance(error, aiohttp.ClientError):
            self._has_warned = True
        logger.log(
            level, "a prompt could not be tokenized, and is compared by characters: %r", error
        )

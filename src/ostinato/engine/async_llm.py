"""How is it used from an event loop?

The engine runs in a thread of its own; the caller's loop never waits for a forward pass::

    event loop                       engine thread
    generate ──► command queue ────► add ─► step ─► step ─► …
       ▲                                      │
       └──── mailbox ◄── call_soon_threadsafe ┘

Outputs are cumulative, so a mailbox keeps the newest alone: a slow reader misses no token
and holds up nobody.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ostinato.cache.stats import CacheStats
from ostinato.core.errors import EngineStopped, OstinatoError
from ostinato.core.explanation import Explanation
from ostinato.core.lease import PINNED, LeaseId, LeaseReceipt, LeaseTerms
from ostinato.core.sampling_params import SamplingParams
from ostinato.core.tenancy import EraseReceipt
from ostinato.engine.administration import Administration
from ostinato.engine.chat import Message, fields_of, render_chat
from ostinato.engine.config import DEFAULT_MODEL, EngineConfig
from ostinato.engine.crossing import AnswerT, CommandQueue, Mailbox
from ostinato.engine.engine import Engine, logger
from ostinato.engine.explaining import explain_request
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.prompts import Prompt, PromptInput, TokenIds, check_salt, parse_prompt
from ostinato.engine.public_prefixes import salt_of_public
from ostinato.engine.requests import EngineRequest, tokenize
from ostinato.engine.token_table import TokenTable
from ostinato.engine.weights import WeightSource, read_weights


class AsyncLLM:
    """A model with a prefix cache, for many callers at once, with streaming and cancel."""

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        """Load a model and start the engine's thread.

        Args:
            model: Embedded model, checkpoint directory or hub name.
            **settings: See ``EngineConfig``.

        Raises:
            ConfigError: A setting is out of range.
            ModelError: The model cannot be served.
        """
        self._engine = Engine(EngineConfig.of(model, settings))
        self._administration = Administration(self._engine)
        self._administration.start_recording_if_set()
        self._commands = CommandQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._making = threading.Lock()  # tokenizers are not made for many threads at once
        self._is_broken = False
        self._thread = threading.Thread(target=self._serve, name="ostinato-engine", daemon=True)
        self._thread.start()

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of the prefix cache since the start."""
        return self._engine.cache_stats

    @property
    def engine(self) -> Engine:
        """The loop underneath; while the thread runs, it is for reading counters alone."""
        return self._engine

    async def look(self, question: Callable[[Engine], AnswerT]) -> AnswerT:
        """Have the engine looked at between two steps.

        Args:
            question: Reads what it likes, and changes nothing.

        Returns:
            The answer, after the step that is under way.

        Raises:
            EngineStopped: The engine was shut down.
        """
        return await self._call(lambda: question(self._engine))

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: neither was it shut down, nor has its loop broken."""
        return self._commands.is_open

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._engine.scheduler.config.max_model_len

    async def encode(self, text: str) -> list[int]:
        """Return a text's token ids, as ``generate`` would compute them.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: It is no text.
        """
        prompt = parse_prompt(text)
        return await asyncio.to_thread(
            self._locked, lambda: tokenize(prompt, self._engine.loaded).tolist()
        )

    async def decode(self, token_ids: TokenIds) -> str:
        """Return the text of token ids, special ones included.

        Raises:
            MissingTokenizer: The checkpoint has none.
            TokenOutOfRange: The model does not have such an id.
        """
        loaded = self._engine.loaded
        tokens = tokenize(parse_prompt(token_ids), loaded)
        table = TokenTable(loaded.require_tokenizer())
        return await asyncio.to_thread(self._locked, lambda: table.decode(tokens.tolist()))

    async def decode_each(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the texts of several rows of the model's own ids; numbers without a tokenizer."""
        tokenizer = self._engine.loaded.tokenizer
        if tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        table = TokenTable(tokenizer)
        return await asyncio.to_thread(self._locked, lambda: list(map(table.decode, rows)))

    async def pieces(self, token_ids: TokenIds) -> list[str]:
        """Return the text of each token by itself; part of a character shows as U+FFFD.

        Raises:
            MissingTokenizer: The checkpoint has none.
            TokenOutOfRange: The model does not have such an id.
        """
        loaded = self._engine.loaded
        tokens = tokenize(parse_prompt(token_ids), loaded).tolist()
        table = TokenTable(loaded.require_tokenizer())
        return await asyncio.to_thread(self._locked, lambda: list(map(table.text, tokens)))

    async def render(
        self,
        messages: Sequence[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Write a conversation as token ids, as ``chat`` does, beside the event loop.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: There is no message or no template, or the template refuses.
        """
        tokenizer = self._engine.loaded.require_tokenizer()
        return await asyncio.to_thread(
            self._locked,
            lambda: render_chat(tokenizer, messages, chat_template, add_generation_prompt, tools),
        )

    def generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield everything so far whenever there is more.

        Args:
            prompt: A text, a row of token ids, or a dict (see ``PromptDict``).
            params: How to sample; None is ``SamplingParams()``.
            request_id: To cancel it by; None makes one up.
            priority: Lower goes first.

        Raises:
            RequestError: The request can never be served.
            EngineStopped: The engine was shut down.

        Effects: leaving the iteration early cancels the request and frees its blocks.
        """
        return self._stream(parse_prompt(prompt), params, request_id, priority)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a conversation; as ``generate``.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: As in ``generate``, or the chat template refuses.
        """
        tokenizer = self._engine.loaded.require_tokenizer()
        token_ids = render_chat(tokenizer, messages, chat_template, add_generation_prompt)
        prompt = Prompt(token_ids=token_ids, fields=fields_of(messages))
        return self._stream(prompt, params, request_id, priority)

    async def explain(
        self,
        request: RequestOutput | str,
        *,
        administrator: bool = False,
        cache_salt: str | None = None,
    ) -> Explanation:
        """Say why a request's prompt hit and missed what it did; as ``LLM.explain``.

        Args:
            request: Its output, or its ``request_id``; one of the last ``keep_explanations``.
            administrator: Whether other tenants may be mentioned; their content never is.
            cache_salt: Of the tenant that asks: others' requests are unknown to it; None asks
                of all.
        """
        return await self._call(
            lambda: explain_request(self._engine, request, administrator, cache_salt)
        )

    def abort(self, request_id: str) -> None:
        """Cancel a request; its reader gets what there is, with ``finish_reason="abort"``.

        Unknown ids are ignored: the request may just have ended.
        """
        self._tell(lambda: self._cancel(request_id))

    async def reset_prefix_cache(self, preempt_running: bool = False) -> None:
        """Forget every cached prefix.

        Args:
            preempt_running: Whether running requests give their blocks back and start again.

        Raises:
            CacheInUse: Requests run, and they were not to be preempted.
        """
        await self._call(lambda: self._engine.reset_cache(preempt_running))

    async def update_weights(self, source: WeightSource) -> int:
        """Put new weights in the place of the old ones; as ``LLM.update_weights``.

        Effects: it happens between two steps. Running requests go on, over the keys and values
        that they have, and publish nothing more.
        """
        update = await asyncio.to_thread(read_weights, source, self._engine.loaded)
        return await self._call(lambda: self._administration.update_weights(update))

    async def lease(self, prompt: PromptInput, terms: LeaseTerms = PINNED) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted; as ``LLM.lease``."""
        parsed = parse_prompt(prompt)
        return await self._call(lambda: self._administration.lease(parsed, terms))

    async def has_lease(self, lease_id: LeaseId) -> bool:
        """Whether a lease still runs: it has neither run out nor been ended."""
        return await self._call(lambda: self._engine.cache.custody.has_lease(lease_id))

    async def end_lease(self, lease_id: LeaseId) -> bool:
        """Let go of a lease; returns False if there is none of that number."""
        return await self._call(lambda: self._administration.end_lease(lease_id))

    async def erase(self, cache_salt: str, cancel_running: bool = False) -> EraseReceipt:
        """Leave nothing of a tenant in cache, statistics and KV store.

        Args:
            cache_salt: The tenant's.
            cancel_running: Whether its requests are cancelled; else they are waited for.

        Returns:
            What was erased, by place.

        Effects: until it is done, new requests of the tenant are refused (RequestError). Other
        tenants' requests go on.
        """
        check_salt(cache_salt)
        async with self._closed_to(cache_salt, cancel_running) as cancelled:
            return await self._call(lambda: self._administration.erase(cache_salt, cancelled))

    async def publish(self, name: str, prompt: PromptInput) -> LeaseReceipt:
        """Compute a prefix once for several tenants; as ``LLM.publish``."""
        asked = parse_prompt(prompt)
        made = await asyncio.to_thread(
            self._locked, lambda: self._administration.publishable(name, asked)
        )
        async for _ in self._stream(made, SamplingParams(max_tokens=1, detokenize=False), None, 0):
            pass  # a failure is told by the receipt: then it is not cached
        return await self._call(lambda: self._administration.publish(made))

    async def unpublish(self, name: str, cancel_running: bool = False) -> EraseReceipt:
        """Forget a public prefix, and what all tenants computed behind it; as ``erase``.

        Raises:
            RequestError: There is none of that name.
        """
        async with self._closed_to(salt_of_public(name), cancel_running) as cancelled:
            return await self._call(lambda: self._administration.unpublish(name, cancelled))

    async def start_recording(self, path: str | Path) -> Path:
        """Record what happens from now on; as ``LLM.start_recording``."""
        return await self._call(lambda: self._administration.start_recording(path))

    async def stop_recording(self) -> Path | None:
        """End the recording and return where it is; None if none runs."""
        return await self._call(self._administration.stop_recording)

    def shutdown(self) -> None:
        """End all requests and the engine's thread; a second call does nothing."""
        self._commands.close("the engine was shut down: make another AsyncLLM")
        self._thread.join()

    async def __aenter__(self) -> "AsyncLLM":
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down without blocking the event loop."""
        await asyncio.to_thread(self.shutdown)

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        made = await asyncio.to_thread(
            self._make,
            prompt,
            SamplingParams() if params is None else params,
            request_id,
            priority,
        )
        mailbox = Mailbox()
        self._commands.put(lambda: self._add(made, mailbox))
        finished = False
        try:
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        except OstinatoError:
            finished = True
            raise
        finally:
            if not finished:
                self._tell(lambda: self._leave(made.request.request_id, mailbox))

    def _make(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int
    ) -> EngineRequest:
        self._commands.check()
        with self._making:
            return self._engine.make_request(prompt, params, request_id, priority)

    def _locked(self, work: Callable[[], AnswerT]) -> AnswerT:
        """Use the tokenizer, which is not made for many threads at once."""
        with self._making:
            return work()

    @asynccontextmanager
    async def _closed_to(self, salt: str | bytes, cancel_running: bool) -> AsyncIterator[int]:
        """Refuse a tenant's requests for a while, and wait for the end of those there are.

        Yields:
            How many of them were cancelled.
        """
        # Not waited for: whoever gives up in between must leave the tenant open.
        self._commands.put(lambda: self._engine.close_tenant(salt))
        try:
            cancelled = 0
            if cancel_running:
                cancelled = await self._call(lambda: self._cancel_all(salt))
            while await self._call(lambda: self._engine.requests_of(salt)):
                await asyncio.sleep(0)  # the answer comes between steps: one question per step
            yield cancelled
        finally:
            self._tell(lambda: self._engine.open_tenant(salt))

    async def _call(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Run something in the engine's thread, between steps, and wait for it."""
        return await self._commands.ask(question)

    def _tell(self, command: Callable[[], None]) -> None:
        """Have something tidied up; an engine that has stopped has nothing to tidy."""
        with suppress(EngineStopped):
            self._commands.put(command)

    def _serve(self) -> None:
        """The engine's thread. A fault of ours ends the engine, and every reader learns of it."""
        try:
            while self._commands.is_open:
                self._go_round()
            for live in list(self._mailboxes):
                self._cancel(live)
        except Exception as fault:
            logger.exception("the engine's loop broke; all its requests end")
            self._break(f"the engine's loop broke: {fault!r}")
        self._commands.obey_the_last()
        self._engine.close()

    def _go_round(self) -> None:
        """Obey what has come, or wait for it if there is nothing else to do; then step."""
        self._commands.obey(wait=not self._engine.has_work and not self._engine.rest())
        for state in self._engine.step():
            name = state.request.request_id
            mailbox = self._mailboxes[name]
            if state.finished:
                del self._mailboxes[name]
            mailbox.post(state.output())

    def _break(self, reason: str) -> None:
        """Take no more requests, and tell everybody why."""
        self._is_broken = True
        self._commands.close(reason)
        for mailbox in self._mailboxes.values():
            mailbox.post(EngineStopped(reason))
        self._mailboxes.clear()

    def _add(self, made: EngineRequest, mailbox: Mailbox) -> None:
        """Take a request; a refusal goes to its reader."""
        try:
            self._commands.check()
            self._engine.add(made)
        except OstinatoError as error:
            mailbox.post(error)
        else:
            self._mailboxes[made.request.request_id] = mailbox

    def _leave(self, request_id: str, mailbox: Mailbox) -> None:
        """End a request that nobody reads any more; another of its name goes on."""
        if self._mailboxes.get(request_id) is mailbox:
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        """End a request; its reader gets what there is."""
        if self._is_broken:  # and all its readers know
            return
        output = self._engine.cancel(request_id)
        mailbox = self._mailboxes.pop(request_id, None)
        if output is not None and mailbox is not None:
            mailbox.post(output)

    def _cancel_all(self, salt: str | bytes) -> int:
        """End a tenant's requests; returns how many."""
        names = self._engine.requests_of(salt)
        for name in names:
            self._cancel(name)
        return len(names)

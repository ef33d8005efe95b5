"""``AsyncLLM``: many callers at once, from an event loop.

The engine runs in a thread of its own; the caller's loop never waits for a forward pass::

    event loop                             engine thread
    generate ─► tokenize ─► commands ────► add ─► step ─► step ─► …
       ▲                                            │
       └──────────── mailbox ◄── post_all ──────────┘

Outputs are cumulative, so a mailbox keeps only the newest: a slow reader misses no token and
delays no other. The reader's side takes the new part of it, if ``output_kind`` is ``DELTA``.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ostinato.core.errors import OstinatoError
from ostinato.engine.api.adapter_api import load_adapter_between, remove_adapter
from ostinato.engine.api.admin_api import AdminApi, AsyncAdminApi
from ostinato.engine.api.beam_api import BeamSearchParams
from ostinato.engine.api.engine_thread import AnswerT, EngineThread, run_in_new_thread
from ostinato.engine.api.explain_api import explain_request
from ostinato.engine.api.tokenizer_executor import TokenizerExecutor
from ostinato.engine.ledger.meaning import Message
from ostinato.engine.loop.adapters import LoRARequest
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.chat import RenderedChat, sections_of
from ostinato.engine.prompts.next_prompt import known_head
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import (
    Prompt,
    PromptInput,
    TokenIds,
    check_keep_reasoning,
    parse_prompt,
)
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.engine.requests.sampling_params import RequestOutputKind, SamplingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.engine.settings.vllm_keywords import refuse_arguments, refuse_call
from ostinato.engine.settings.weights import WeightSource, read_weights
from ostinato.observe.counters import CacheStats
from ostinato.observe.explanation import Explanation
from ostinato.tenants.terms import PINNED, EraseReceipt, LeaseId, LeaseReceipt, LeaseTerms

logger = logging.getLogger("ostinato")

_ANYONE = Prompt()


class AsyncLLM:
    """A model with a prefix cache, for many callers at once, with streaming and cancel.

    Attributes:
        engine: The engine; while its thread runs, only counters may be read.
        tokenizing: Tokenizes, renders conversations and loads images, off the event loop.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        """Load a model and start the engine's thread.

        Args:
            model: Embedded model, checkpoint directory or hub name.
            **settings: See ``EngineSettings``.

        Raises:
            ConfigError: A setting is out of range.
            ModelError: The model cannot be served.
        """
        self.engine = run_in_new_thread(Engine, EngineConfig.of(model, settings))
        self._admin = AdminApi(self.engine)
        self._admin.start_recording_if_set()
        self.tokenizing = TokenizerExecutor(self.engine)
        self._thread = EngineThread(self.engine)
        self._waiting_admin = AsyncAdminApi(self._admin, self._thread, self.tokenizing)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "AsyncLLM":
        """Load a model by settings such as ``AsyncEngineArgs``; raises as the constructor."""
        return cls(**engine_args.keywords)

    if not TYPE_CHECKING:  # hidden from type checkers, which report missing methods

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that says what to use instead of a method of vLLM."""
            refuse_call(self, name)

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of the prefix cache since the start."""
        return self.engine.cache_stats

    async def look(self, question: Callable[[Engine], AnswerT]) -> AnswerT:
        """Read from the engine between two steps.

        Args:
            question: Reads the engine, and changes nothing.

        Returns:
            Its answer, after the current step.

        Raises:
            EngineStopped: The engine was shut down.
        """
        return await self._thread.call(lambda: question(self.engine))

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted: it was not shut down, and its thread has not failed."""
        return self._thread.commands.is_open

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what requests without parameters sample with; as in ``LLM``."""
        return self.engine.defaults.params()

    async def encode(
        self, text: str, *, prompt_context: Prompt = _ANYONE, add_special_tokens: bool = True
    ) -> list[int]:
        """Return a text's token ids, as ``generate`` tokenizes it.

        Args:
            text: The text.
            prompt_context: A prompt of its sender: tokens that its tenant has kept are used.
            add_special_tokens: Whether the tokenizer adds its special tokens.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: It is no text.
        """
        prompt = replace(prompt_context, text=parse_prompt(text).text)
        return await self.tokenizing.encode(prompt, add_special_tokens)

    async def decode(self, token_ids: TokenIds) -> str:
        """Return the text of token ids, special ones included.

        Raises:
            MissingTokenizer: The checkpoint has none.
            TokenOutOfRange: The model does not have such an id.
        """
        return await self.tokenizing.decode(token_ids)

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **unsupported: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield an output of ``output_kind`` whenever there is more.

        Args:
            prompt: A text, a row of token ids, or a dict (see ``PromptDict``).
            sampling_params: How to sample; None is ``get_default_sampling_params()``.
            request_id: For ``abort``; None generates one.
            priority: Lower goes first.
            lora_request: A LoRA adapter, loaded if it is not; None is the base model, or the
                loaded adapter that the prompt's dict names.
            **unsupported: vLLM's arguments, at values that change nothing.

        Raises:
            RequestError: The request can never be served.
            EngineStopped: The engine was shut down, or this is a fork of its process.

        Effects: leaving the iteration early cancels the request and releases its blocks.
        """
        if unsupported:
            refuse_arguments(unsupported)
        parsed = parse_prompt(prompt)
        return self._stream(parsed, sampling_params, request_id, priority, lora_request)

    def beam_search(
        self,
        prompt: PromptInput,
        request_id: str | None,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search the most likely answers to a prompt; the last output has them, the best first.

        Raises:
            RequestError: As ``LLM.beam_search``.
            EngineStopped: As ``generate``.
        """
        return self.generate(
            prompt, params.sampling_params(), request_id, lora_request=lora_request
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        keep_tokens: bool = True,
        keep_reasoning: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a conversation; as ``generate``, and the last two as in ``LLM.chat``.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: As in ``generate``, or the chat template refuses.
        """
        self.engine.loaded.require_tokenizer()
        adapter = "" if lora_request is None else lora_request.lora_name
        prompt_context = Prompt(
            keep_tokens=keep_tokens,
            sections=sections_of(messages),
            adapter=adapter,
            keep_reasoning=check_keep_reasoning(keep_reasoning),
        )

        async def render(conversation: Sequence[Message], images: Any = ()) -> RenderedChat:
            return await self.tokenizing.render(
                replace(prompt_context, images=images),
                conversation,
                chat_template,
                add_generation_prompt=add_generation_prompt,
            )

        async def prompt() -> Prompt:
            loaded, images = await self.tokenizing.load_images(messages)
            context = replace(prompt_context, images=images)
            return (await render(loaded, images)).prompt(context)

        outputs = self._stream(prompt, sampling_params, request_id, priority, lora_request)
        kind = sampling_params.output_kind if sampling_params is not None else None
        if not self.prepares_next or kind is RequestOutputKind.DELTA or not add_generation_prompt:
            return outputs
        return self._then_prepare(
            outputs, lambda answer: known_head(render, messages, answer), prompt_context
        )

    @property
    def prepares_next(self) -> bool:
        """Whether prompts that follow an answer are computed in idle steps (``idle_rebase``)."""
        return self.engine.rebase.is_on

    async def offer_next(
        self, request_id: str, prompt_context: Prompt, tokens: "array[int]", in_loop: bool = False
    ) -> bool:
        """Compute what is known of the prompt after an answer in idle steps.

        Args:
            request_id: The request that was answered; each takes one offer.
            prompt_context: A prompt of its sender.
            tokens: The known beginning of the next prompt, from ``known_head``.
            in_loop: Whether it was answered by a call, whose result comes before a user's words.

        Returns:
            Whether there is something to compute.
        """
        return await self._thread.call(
            lambda: self.engine.offer_next(request_id, prompt_context, tokens, in_loop)
        )

    async def explain(
        self,
        request: RequestOutput | str,
        *,
        administrator: bool = False,
        cache_salt: str | None = None,
    ) -> Explanation:
        """Explain which tokens of a request's prompt hit; as ``LLM.explain``.

        With the ``cache_salt`` of the tenant that asks, its own requests only; None sees all.
        """
        return await self.look(
            lambda engine: explain_request(engine, request, administrator, cache_salt)
        )

    def abort(self, request_id: str) -> None:
        """Cancel a request; its reader gets the output so far, with ``finish_reason="abort"``.

        Unknown ids are ignored: the request may have ended.
        """
        self._thread.run_later(lambda: self._thread.cancel(request_id))

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Remove every cached prefix; running requests start again, if they are preempted.

        Returns:
            True, as in vLLM.

        Raises:
            CacheInUse: Requests run, and ``preempt_running`` is off.
        """
        await self._thread.call(lambda: self.engine.reset_cache(preempt_running))
        return True

    async def update_weights(self, source: WeightSource) -> int:
        """Replace the model's weights between two steps; as ``LLM.update_weights``.

        Effects: running requests continue with the keys and values that they have, and publish
        nothing more.
        """
        update = await asyncio.to_thread(read_weights, source, self.engine.loaded)
        return await self._thread.call(lambda: self._admin.update_weights(update))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, while requests run; as ``LLM.add_lora``."""
        return await load_adapter_between(self._thread, lora_request)

    async def remove_lora(self, lora_id: int | str) -> bool:
        """Unload a LoRA adapter, by its number or name; returns whether there was one.

        Effects: requests that have it finish, and publish nothing more.
        """
        return await self._thread.call(lambda: remove_adapter(self.engine, lora_id))

    async def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return await self.look(lambda engine: engine.adapters.numbers)

    async def lease(self, prompt: PromptInput, terms: LeaseTerms = PINNED) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted; as ``LLM.lease``."""
        parsed = parse_prompt(prompt)
        return await self._thread.call(lambda: self._admin.lease(parsed, terms))

    async def has_lease(self, lease_id: LeaseId) -> bool:
        """Whether a lease still runs: it has neither run out nor been ended."""
        return await self.look(lambda engine: engine.cache.admin.has_lease(lease_id))

    async def end_lease(self, lease_id: LeaseId) -> bool:
        """End a lease; returns False if there is none of that number."""
        return await self._thread.call(lambda: self._admin.end_lease(lease_id))

    async def erase(self, cache_salt: str, cancel_running: bool = False) -> EraseReceipt:
        """Remove everything of a tenant; as ``LLM.erase``, but waits for its running requests.

        Effects: until its blocks are removed, new requests of the tenant are refused
        (RequestError). Tiers are overwritten by a thread; requests of all tenants go on.
        """
        return await self._waiting_admin.erase(cache_salt, cancel_running)

    async def publish(self, name: str, prompt: PromptInput) -> LeaseReceipt:
        """Compute a prefix once for several tenants; as ``LLM.publish``."""
        return await self._waiting_admin.publish(name, parse_prompt(prompt))

    async def unpublish(self, name: str, cancel_running: bool = False) -> EraseReceipt:
        """Remove a public prefix, and what all tenants computed after it; as ``erase``.

        Raises:
            RequestError: There is none of that name.
        """
        return await self._waiting_admin.unpublish(name, cancel_running)

    async def start_recording(self, path: str | Path) -> Path:
        """Record a trace from now on; as ``LLM.start_recording``."""
        return await self._thread.call(lambda: self._admin.start_recording(path))

    async def stop_recording(self) -> Path | None:
        """End the recording and return its path; None if none runs."""
        return await self._thread.call(self._admin.stop_recording)

    def shutdown(self) -> None:
        """End all requests and the engine's thread; a second call does nothing."""
        self._thread.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shut down without blocking the event loop."""
        await asyncio.to_thread(self.shutdown)

    async def _then_prepare(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        head: "Callable[[dict[str, Any]], Awaitable[array[int]]]",
        prompt_context: Prompt,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a conversation's outputs, then offer the prompt that follows its answer."""
        output = None
        async with aclosing(outputs):
            async for output in outputs:
                yield output
        if output is None or [o.finish_reason for o in output.outputs] != ["stop"]:
            return
        answer = {"role": "assistant", "content": output.outputs[0].text}
        try:
            await self.offer_next(output.request_id, prompt_context, await head(answer))
        except OstinatoError as error:  # the template refuses, or the engine stops
            logger.debug("the prompt after %s is not prepared: %s", output.request_id, error)

    def _stream(
        self,
        prompt: Prompt | Callable[[], Awaitable[Prompt]],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = self.get_default_sampling_params() if params is None else params

        async def make() -> PreparedRequest:
            prepared = prompt if isinstance(prompt, Prompt) else await prompt()
            if lora_request is not None:
                await self.add_lora(lora_request)
                prepared = replace(prepared, adapter=lora_request.lora_name)
            return await self.tokenizing.request(prepared, params, request_id, priority)

        return self._thread.stream(make)

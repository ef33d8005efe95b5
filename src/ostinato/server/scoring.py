"""The common path of requests for embeddings, scores, classes and choices.

::

    answer ─► check_texts ─► hold_places ─► token ids (in a thread) ─► one call each ─► outputs
                  └── 400         └── 400, 429

A window of calls is in the engine at once: enough to fill its steps, and few enough to leave room
for others. All of them share their prefix, which is computed by the first. The places of the window
are held from before the first text is tokenized until the last one has ended, so that a request is
admitted as a whole or refused before any work.
"""

import asyncio
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt, whole_characters
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.engine.scoring.scorer import Scorer
from ostinato.errors import naming
from ostinato.protocol.chat import ChatMessage
from ostinato.protocol.dialects import ApiBody
from ostinato.protocol.sampling import CACHE_SALT, CacheUse, ShortText
from ostinato.server.access.callers import Caller
from ostinato.server.call import GenerateCall, sender
from ostinato.server.errors import ApiError
from ostinato.server.middleware import accept_fields
from ostinato.server.prompting import ChatFields, render_chat
from ostinato.server.serving import check_room, hold_places, last_output, serve
from ostinato.server.state import ServerState
from ostinato.server.streaming import until_gone
from ostinato.server.usage import Usage

MAX_WINDOW = 128
"""Calls of one request that are in the engine at once."""

ACTIVATION: Any = Field(default=True, description="False gives logits.")


class ScoringFields(ApiBody):
    """What all of these requests have; ranges are checked by ``PoolingParams``."""

    user: ShortText | None = Field(default=None, description="The client's end user, for records.")
    truncate_prompt_tokens: int | None = Field(
        default=None,
        description="Maximum tokens of each text, which loses its end; -1: what the model takes.",
    )
    cache_salt: ShortText = CACHE_SALT
    cache: CacheUse = CacheUse()
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Lower goes first.")

    @property
    @abstractmethod
    def texts_by_field(self) -> dict[str, Sequence[str | list[int]]]:
        """All texts, by the field that gave them."""

    @property
    def pooling_params(self) -> PoolingParams:
        """The parameters that the body has.

        Raises:
            InvalidSamplingParams: One is out of range.
        """
        names = [each.name for each in fields(PoolingParams) if hasattr(self, each.name)]
        return PoolingParams(**{name: getattr(self, name) for name in names})


BodyT = TypeVar("BodyT", bound=ScoringFields)
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """One request of a client, whose texts are calls of their own.

    Attributes:
        state: Server state.
        caller: Its sender.
        body: Its fields.
        params: Its parameters.
        endpoint: Path of its route.
        request_id: Its id; text number i is ``<id>-i`` in explanations and records.
        prompt_context: A prompt of its sender.
    """

    state: ServerState
    caller: Caller
    body: ScoringFields
    params: PoolingParams
    endpoint: str
    request_id: str
    prompt_context: Prompt

    @property
    def scorer(self) -> Scorer:
        """Turns texts into prompts."""
        return self.state.llm.engine.scorer

    async def conversation(self, body: ChatFields, messages: Sequence[ChatMessage]) -> Prompt:
        """Return the sender's prompt of a conversation, with its images.

        Raises:
            ApiError: There is no room (400, 429).
            RequestError: The template refuses it, or an image cannot be loaded.
        """
        check_room(self.state, self.caller, self._call(0, Prompt(), SamplingParams()))
        prompt_context = replace(
            self.prompt_context, keep_tokens=body.keep_tokens, keep_reasoning=body.keep_reasoning
        )
        rendered = [each.rendered() for each in messages]
        prompt, chat = await render_chat(self.state, prompt_context, body, rendered)
        return replace(self.prompt_context, token_ids=chat.tokens, images=prompt.images)

    async def run(
        self,
        make: Callable[[ItemT], tuple[Prompt, SamplingParams]],
        items: Sequence[ItemT],
        noun: str = "text",
        first: int = 0,
    ) -> list[RequestOutput]:
        """Serve items as requests; returns their outputs in order.

        Args:
            make: Turns an item into a prompt with its token ids, in the tokenizer's thread;
                tenants take turns item by item.
            items: Texts, pairs or choices.
            noun: What an item is called in the error that refuses it.
            first: Number of the first item that is called so; those before it are queries.

        Raises:
            ApiError: There is no room, they have too many tokens, or one failed; the others end.
            RequestError: An item can never be served; none was computed.
        """
        window = min(self._max_window, len(items))
        call = self._call(0, Prompt(), SamplingParams())
        with hold_places(self.state, self.caller, call, window):
            return await self._outputs(await self._calls(make, items, noun, first), window)

    def response(self, outputs: Sequence[RequestOutput], **own: Any) -> dict[str, Any]:
        """Return the body of a response with its token counts, cached ones included."""
        counts = Usage.of(outputs, self.body.cache.write).as_openai()
        return {
            "id": self.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.body.model,
            **own,
            "usage": {
                "prompt_tokens": counts["prompt_tokens"],
                "total_tokens": counts["prompt_tokens"],
                "completion_tokens": 0,
                "prompt_tokens_details": counts["prompt_tokens_details"],
            },
        }

    async def _calls(
        self,
        make: Callable[[ItemT], tuple[Prompt, SamplingParams]],
        items: Sequence[ItemT],
        noun: str,
        first: int,
    ) -> list[GenerateCall]:
        """Return the calls of items; one item more is tokenized than their tokens allow."""
        calls, num_tokens, limit = [], 0, self.state.config.max_text_tokens
        tokenizing, salt = self.state.llm.tokenizing, self.prompt_context.cache_salt
        check_length = self.state.llm.engine.scheduler.check_length

        def checked(number: int, item: ItemT) -> tuple[Prompt, SamplingParams]:
            is_query = number < first
            with naming("query" if is_query else noun, number - (0 if is_query else first)):
                prompt, params = make(item)
                check_length(len(prompt.token_ids or ()))
                return prompt, params

        for number, item in enumerate(items):
            prompt, params = await tokenizing.run_long(partial(checked, number, item), salt)
            num_tokens += len(prompt.token_ids or ())
            if num_tokens > limit:
                raise ApiError(
                    400,
                    f"the texts have {num_tokens} tokens and more, shared ones counted for each: "
                    f"at most {limit} in a request; send several, or raise --max-text-tokens",
                    code="too_many_tokens",
                )
            calls.append(self._call(number, prompt, params))
        return calls

    def _call(self, number: int, prompt: Prompt, params: SamplingParams) -> GenerateCall:
        return GenerateCall(
            endpoint=self.endpoint,
            params=params,
            prompt=prompt,
            priority=self.body.priority,
            user=self.body.user,
            request_id=f"{self.request_id}-{number}",
        )

    async def _outputs(self, calls: Sequence[GenerateCall], window: int) -> list[RequestOutput]:
        free = asyncio.Semaphore(window)

        async def run(call: GenerateCall) -> RequestOutput:
            async with free:
                return await last_output(serve(self.state, self.caller, call, is_held=True))

        tasks = [asyncio.create_task(run(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _max_window(self) -> int:
        """How many calls may be in the engine at once."""
        config, own_limit = self.state.config, self.caller.limits.max_requests
        share = config.max_requests
        if own_limit is not None:
            share = min(share, own_limit)
        elif self.caller.tenant:
            share = int(share * config.key_share)
        return max(1, min(MAX_WINDOW, share))


async def answer(
    request: Request,
    state: ServerState,
    caller: Caller,
    body: BodyT,
    work: Callable[[ScoringCall, BodyT], Coroutine[Any, Any, dict[str, Any] | str]],
) -> Response:
    """Check a request, do its work unless the client disconnects, and send what that returns.

    Work that returns a text has written its JSON itself.

    Raises:
        ApiError: It is refused (400, 404, 429), failed, or the client disconnected (499).
    """
    accept_fields(request, state, body)
    for name, texts in body.texts_by_field.items():
        check_texts(state, name, texts)
    call = ScoringCall(
        state,
        caller,
        body,
        body.pooling_params,
        request.scope["route"].path,
        f"{body.id_prefix}{uuid.uuid4().hex}",
        sender(
            caller,
            body.cache_salt,
            adapter=state.adapter_of(body.model),
            cache_read=body.cache.read,
            cache_write=body.cache.write,
        ),
    )
    content = await until_gone(request, work(call, body))
    if isinstance(content, str):
        return Response(content, media_type="application/json")
    return JSONResponse(content)


def check_texts(state: ServerState, param: str, texts: Sequence[str | list[int]]) -> None:
    """Refuse too many texts, none, or half of a character.

    Raises:
        ApiError: There are none, or too many (400).
        RequestError: One is no text.
    """
    if not texts:
        raise ApiError(400, f"{param} is empty: give a text at least", param=param)
    limit = state.config.max_texts
    if len(texts) > limit:
        raise ApiError(
            400,
            f"{param} has {len(texts)} texts: at most {limit} in a request; send several, or raise "
            "--max-texts",
            param=param,
            code="too_many_texts",
        )
    for text in texts:
        if isinstance(text, str):
            whole_characters(param, text)

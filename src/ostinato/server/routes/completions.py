"""``/v1/completions``."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.protocol.answers import Completion
from ostinato.protocol.completions import CompletionBody
from ostinato.protocol.dialects import COMPLETIONS
from ostinato.protocol.logprobs import (
    Positions,
    completion_logprobs,
    prompt_logprobs,
)
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.answers.call_grammar import sampling_params
from ostinato.server.call import GenerateCall
from ostinato.server.middleware.fields import DialectRoute, accept_fields
from ostinato.server.routes.models import adapter_of
from ostinato.server.serving import check_room, serve
from ostinato.server.state import ServerState, StateDep
from ostinato.server.streaming import DONE, Delta, Deltas, begin, event, until_gone
from ostinato.server.usage import Usage

ENDPOINT = "/v1/completions"

router = APIRouter(tags=["completions"], route_class=DialectRoute)


@router.post(ENDPOINT, response_model=Completion)
async def complete(
    body: CompletionBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Continue prompts, in one response or as a stream of server-sent events."""
    accept_fields(request, state, COMPLETIONS, body)
    adapter = adapter_of(state, body.model)
    answer = Answer(state, body, caller, adapter)
    check_room(state, caller, answer.calls)
    if body.stream:
        return await begin(request, answer.events())
    return JSONResponse(await until_gone(request, answer.whole()))


@dataclass(slots=True)
class Answer:
    """The response to one call, which may have many prompts.

    Continuation j of prompt i is choice ``i * n + j``.
    """

    state: ServerState
    body: CompletionBody
    caller: Caller
    adapter: str
    name: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    calls: list[GenerateCall] = field(init=False)
    _deltas: dict[int, Deltas] = field(default_factory=dict)
    _echoes: "dict[int, Echo]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make one engine call per prompt; none is started yet."""
        params = sampling_params(self.body)
        self.calls = [
            GenerateCall(
                endpoint=ENDPOINT,
                adapter=self.adapter,
                params=params,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else prompt,
                priority=self.body.priority,
                user=self.body.acts_for,
                request_id=f"{self.name}-{number}",
                **self.body.cache_settings(),
            )
            for number, prompt in enumerate(self.body.prompts)
        ]

    async def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        outputs = {number: output async for number, output in self._outputs()}
        choices = [
            choice for number in sorted(outputs) for choice in await self._added(number, outputs)
        ]
        return {**self._head(choices), "usage": self._usage(outputs)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Stream the response."""
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._outputs()) as stream:
            async for number, output in stream:
                outputs[number] = output
                choices = await self._added(number, outputs)
                usage = self.body.usage_so_far(lambda: self._usage(outputs))
                if choices:  # the output of one step is sent in one piece
                    yield b"".join([event(self._head([choice]) | usage) for choice in choices])
        end = DONE
        if self.body.include_usage:
            end = event({**self._head([]), "usage": self._usage(outputs)}) + DONE
        yield end

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return merge([serve(self.state, self.caller, call) for call in self.calls])

    async def _added(
        self, number: int, outputs: Mapping[int, RequestOutput]
    ) -> list[dict[str, Any]]:
        """Return the changed choices of a prompt, with the new part only."""
        output = outputs[number]
        if number not in self._echoes:
            is_alone = self.body.max_tokens == 0
            self._echoes[number] = (
                await Echo.of(self.state.llm, output, is_alone) if self.body.echo else Echo()
            )
        echo, deltas = self._echoes[number], self._deltas.setdefault(number, Deltas())
        first = number * self.body.n
        return [
            {**echo.choice(delta, first + delta.index), **self._more(output, delta)}
            for delta in deltas.take(output)
        ]

    def _more(self, output: RequestOutput, delta: Delta) -> dict[str, Any]:
        """Return the fields that vLLM adds to a choice on request."""
        more: dict[str, Any] = {}
        if self.body.return_token_ids:
            more["token_ids"] = delta.token_ids
            if not delta.is_later:
                more["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            more |= prompt_logprobs(output.prompt_logprobs)
        return more

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self.state.fingerprint,
            "choices": choices,
        }

    def _usage(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        usage = Usage.of(outputs.values())
        if self.body.max_tokens == 0:  # the generated token is dropped
            usage = replace(usage, num_completion_tokens=0)
        return usage.as_openai([kept for call in self.calls for kept in call.num_retained_tokens])


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is echoed at the beginning of its response.

    Attributes:
        text: The prompt's text; empty without ``echo``.
        first_token: Text of its first token, which has no log-probability.
        positions: Log-probabilities of its tokens; None unless requested.
        is_alone: Whether the prompt is only scored, and nothing follows.
    """

    text: str = ""
    first_token: str = ""
    positions: Positions | None = None
    is_alone: bool = False

    @classmethod
    async def of(cls, llm: AsyncLLM, output: RequestOutput, is_alone: bool) -> "Echo":
        """Return the beginning of a response.

        Raises:
            MissingTokenizer: There is no tokenizer, and so no text.
        """
        ids = output.prompt_token_ids
        text = await llm.decode(ids) if output.prompt is None else output.prompt
        scored = output.prompt_logprobs is not None
        first = await llm.decode(ids[:1]) if scored else ""
        return cls(text, first, output.prompt_logprobs, is_alone)

    def choice(self, delta: Delta, index: int) -> dict[str, Any]:
        """Return the new part of one choice, with the prompt before its first piece."""
        text = "" if self.is_alone else delta.text
        return {
            "index": index,
            "text": text if delta.is_later else self.text + text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        added: Positions = [] if self.is_alone else delta.logprobs
        if delta.is_later:
            return completion_logprobs(added, len(self.text) + delta.offset)
        return completion_logprobs([*(self.positions or ()), *added], 0, self.first_token)


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Merge streams: yield the newest output of each with its number.

    Raises:
        ApiError: Of the first stream that fails; the others are cancelled.

    Effects: closing it early closes all streams. A slow reader sees fewer outputs, and misses
    nothing, since outputs are cumulative.
    """
    if len(streams) == 1:  # the common case; saves a task
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    newest: dict[int, RequestOutput] = {}
    arrived = asyncio.Event()

    async def read(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    newest[number] = output
                    arrived.set()
        finally:
            arrived.set()

    readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(streams)]
    try:
        while newest or not all(reader.done() for reader in readers):
            await arrived.wait()
            arrived.clear()
            for reader in readers:
                if reader.done():
                    reader.result()  # raises what it raised
            while newest:
                yield newest.popitem()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

"""``/v1/completions``."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.protocol.answers import Completion, CompletionChoice, UsageBody
from ostinato.protocol.completions import CompletionBody
from ostinato.protocol.logprobs import Positions, completion_logprobs, prompt_logprobs
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.answers.call_grammar import sampling_params
from ostinato.server.call import GenerateCall, with_content
from ostinato.server.errors import ApiError
from ostinato.server.generation import open_call, respond
from ostinato.server.middleware import DialectRoute, accept_fields
from ostinato.server.serving import serve
from ostinato.server.state import ServerState, StateDep
from ostinato.server.streaming import DONE, Delta, Deltas, event
from ostinato.server.usage import Usage

router = APIRouter(tags=["completions"], route_class=DialectRoute)


@router.post(CompletionBody.dialect.path, response_model=Completion)
async def complete(
    body: CompletionBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Continue prompts, in one response or as a stream of server-sent events."""
    accept_fields(request, state, body)
    call = open_call(state, caller, body, sampling_params(body), len(body.prompts))
    return await respond(request, CompletionAnswer(state, caller, body, call), body.stream)


@dataclass(slots=True)
class CompletionAnswer:
    """The answer to one request, which may have many prompts.

    Continuation j of prompt i is choice ``i * n + j``.

    Attributes:
        call: The call to the engine, without a prompt.
        calls: One for each prompt.
        last: The newest output of each prompt, by its number.
    """

    state: ServerState
    caller: Caller
    body: CompletionBody
    call: GenerateCall
    created: int = field(default_factory=lambda: int(time.time()))
    calls: list[GenerateCall] = field(init=False)
    last: dict[int, RequestOutput] = field(default_factory=dict)
    _deltas: dict[int, Deltas] = field(default_factory=dict)
    _echoes: "dict[int, Echo]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make one engine call per prompt; none is started yet."""
        self.calls = [
            replace(
                self.call,
                prompt=with_content(self.call.prompt, prompt),
                request_id=f"{self.call.request_id}-{number}",
                num_retained_tokens=[],
            )
            for number, prompt in enumerate(self.body.prompts)
        ]

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs of all prompts, each with the prompt's number."""
        return merge([serve(self.state, self.caller, call) for call in self.calls])

    async def take(self, output: tuple[int, RequestOutput]) -> Sequence[bytes]:
        """Return the events of what an output adds."""
        number, self.last[output[0]] = output
        choices = await self._added(number)
        usage = self._usage() if self.body.has_running_usage and choices else None
        return [self._event([choice], usage) for choice in choices]

    def closing(self) -> bytes:
        """Return the token counts, if requested, and the end of the stream."""
        return self._event([], self._usage()) + DONE if self.body.include_usage else DONE

    async def whole(self) -> Completion:
        """Return the complete response."""
        async with aclosing(self.outputs()) as outputs:
            async for number, output in outputs:
                self.last[number] = output
        choices = [choice for number in sorted(self.last) for choice in await self._added(number)]
        completion = self._head(choices)
        completion["usage"] = self._usage()
        return completion

    async def _added(self, number: int) -> list[CompletionChoice]:
        """Return the changed choices of a prompt, with the new part only."""
        output = self.last[number]
        if number not in self._echoes:
            is_alone = self.body.max_tokens == 0
            self._echoes[number] = (
                await Echo.of(self.state.llm, output, is_alone) if self.body.echo else Echo()
            )
        echo, deltas = self._echoes[number], self._deltas.setdefault(number, Deltas())
        first = number * self.body.n
        return [self._choice(echo, first, output, delta) for delta in deltas.take(output)]

    def _choice(
        self, echo: "Echo", first: int, output: RequestOutput, delta: Delta
    ) -> CompletionChoice:
        """Return a choice, with the fields that vLLM adds on request."""
        choice = echo.choice(delta, first + delta.index)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if not delta.is_later:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _event(self, choices: list[CompletionChoice], usage: UsageBody | None) -> bytes:
        chunk = self._head(choices)
        if self.body.include_usage:
            chunk["usage"] = usage
        return event(chunk)

    def _head(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self.call.request_id,
            object="text_completion",
            created=self.created,
            model=self.body.model,
            system_fingerprint=self.state.fingerprint,
            choices=choices,
        )

    def _usage(self) -> UsageBody:
        usage = Usage.of(self.last.values(), self.body.cache.write)
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

    def choice(self, delta: Delta, index: int) -> CompletionChoice:
        """Return the new part of one choice, with the prompt before its first piece."""
        text = "" if self.is_alone else delta.text
        return CompletionChoice(
            index=index,
            text=text if delta.is_later else self.text + text,
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
        )

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
        except ApiError as error:
            error.message = f"prompt {number} (counted from 0): {error.message}"
            raise
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

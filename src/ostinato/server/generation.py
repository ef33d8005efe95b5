"""The common way of requests that generate, whatever their API.

::

    body ─► open_call ─► check_room ─► add_prompt ─► respond ─► Answer.whole    one body
                                                        └─────► Answer.take ... events
"""

import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, cast

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ostinato.core.errors import RequestError
from ostinato.engine.prompts.chat import sections_of
from ostinato.engine.prompts.chat_turns import WrittenAnswer
from ostinato.engine.requests.outputs import CompletionOutput, RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.protocol.conversation import Message
from ostinato.protocol.volatile import Settled
from ostinato.server.access.callers import Caller
from ostinato.server.answers.answer_parser import ParsedAnswer, parse_answer
from ostinato.server.breakpoints import measure
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.server.middleware.fields import show_report
from ostinato.server.next_prompts import offer_next
from ostinato.server.prompting import AnswerReader, ChatFields, read_with, render_chat
from ostinato.server.serving import serve
from ostinato.server.state import ServerState
from ostinato.server.streaming import Delta, Deltas, begin, until_gone

OutputT = TypeVar("OutputT")
BodyT = TypeVar("BodyT")


class CallFields(Protocol):
    """The fields of a body that its call to the engine depends on."""

    model: str

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that the client gave."""

    def call_settings(self) -> dict[str, Any]:
        """Return the keywords of ``GenerateCall`` that clients set."""


def open_call(
    state: ServerState, body: CallFields, endpoint: str, id_prefix: str, params: SamplingParams
) -> GenerateCall:
    """Return a call to the engine, without its prompt; what is not given is the model's default.

    Raises:
        ApiError: This server has no such model (404).
    """
    return GenerateCall(
        endpoint=endpoint,
        adapter=adapter_of(state, body.model),
        params=state.llm.engine.defaults.fill(params, body.model_fields_set),
        request_id=f"{id_prefix}{uuid.uuid4().hex}",
        **body.call_settings(),
    )


def adapter_of(state: ServerState, name: str) -> str:
    """Return the adapter of a model name; empty for the base model.

    Raises:
        ApiError: This server has no such model (404).
    """
    if name in state.config.model_names:
        return ""
    adapters = state.llm.engine.adapters.by_name
    if name not in adapters:
        known = ", ".join([*state.config.model_names, *adapters])
        raise ApiError(
            404,
            f"model={name!r:.200}: this server has {known}",
            param="model",
            code="model_not_found",
        )
    return name


@dataclass(frozen=True, slots=True)
class Conversation(Generic[BodyT]):
    """A conversation that is ready to be continued.

    Attributes:
        state: Server state.
        caller: Its sender.
        body: The body of its request.
        call: The call to the engine, with the prompt.
        reader: How its answer is parsed.
        prompt: Identifies the sender, and has the images.
        tokens: The prompt's token ids; an image is one placeholder.
        messages: What it was rendered from.
    """

    state: ServerState
    caller: Caller
    body: BodyT
    call: GenerateCall
    reader: AnswerReader
    prompt: Prompt
    tokens: TokenizedText
    messages: Sequence[Message]

    def sealed_name(self) -> str | None:
        """Return the name of the turn that is being written, for its client; None without one."""
        turns, begun = self.state.llm.engine.prompts.turns, self.call.begun
        return None if turns is None or begun is None else turns.name(begun)

    def note(self, output: CompletionOutput, answer: ParsedAnswer) -> None:
        """Note a complete continuation in the ledger of turns, before its client has all of it.

        Left out are answers that say less than what was written: those cut at a stop string, and
        those with more calls than the request allows.
        """
        engine, call, reader = self.state.llm.engine, self.call, self.reader
        turns, begun = engine.prompts.turns, call.begun
        if turns is None or begun is None or not (call.cache_write and call.keep_tokens):
            return
        if output.finish_reason not in ("stop", "length") or call.params.include_stop_str_in_output:
            return
        tokens = list(output.token_ids)
        if isinstance(output.stop_reason, int):
            tokens.pop()
        text, is_cut = output.text, isinstance(output.stop_reason, str)
        if is_cut:
            text = engine.loaded.require_tokenizer().decode(tokens)
        if is_cut or not reader.use.is_parallel:
            whole = parse_answer(text, reader.parser(is_limited=False))
            if whole.meaning != answer.meaning:
                return
        written = WrittenAnswer(
            answer.message(),
            tokens,
            reader.special_ids,
            reader.spoken(text),
            reader.num_reasoning_tokens(output.token_ids, answer),
        )
        turns.note(begun, written, output.index)


async def add_prompt(
    state: ServerState,
    caller: Caller,
    body: Any,
    call: GenerateCall,
    settled: Settled,
    opens_turn: bool = True,
) -> Conversation[Any]:
    """Render a settled conversation; choose how its answer is sampled and parsed.

    Raises:
        MissingTokenizer: The checkpoint has none.
        RequestError: The template refuses the conversation, or an image cannot be loaded.
    """
    prompt, tokens = await render_chat(state, caller, body, settled.messages, call.adapter)
    reader = await read_with(state, tokens, body.tool_use, opens_turn)
    call = replace(
        call,
        params=reader.settle(call.params),
        token_ids=tokens,
        images=prompt.images,
        sections=settled.named(sections_of(settled.messages)),
        begun=prompt.begun,
        report=prompt.report,
    )
    return Conversation(state, caller, body, call, reader, prompt, tokens, settled.messages)


async def lease_marks(chat: Conversation[Any], before: Sequence[Message] = ()) -> Conversation[Any]:
    """Return a conversation whose prompt is leased up to the marks of its body.

    OpenAI's marks only speed later requests up, so that a template that ends no turn at one of them
    refuses no request.

    Args:
        chat: The conversation.
        before: Messages that precede those of the body.
    """
    if not (marks := chat.body.breakpoints()):
        return chat
    try:
        kept = await measure(chat.state, chat.prompt, chat.body, marks, chat.tokens, before)
    except RequestError:
        return chat
    return replace(chat, call=replace(chat.call, kept=tuple(kept)))


class Answer(Protocol[OutputT]):
    """The response to a request, in the shape of its API."""

    def outputs(self) -> AsyncGenerator[OutputT, None]:
        """Yield the engine's outputs."""

    async def take(self, output: OutputT) -> Sequence[bytes]:
        """Return the events of what an output adds."""

    def closing(self) -> bytes:
        """Return the events behind the last output; may be empty."""

    async def whole(self) -> Mapping[str, Any]:
        """Return the complete response."""


def respond_to_chat(
    request: Request, answer: "ChatAnswer[Any]", is_streamed: bool
) -> Awaitable[Response]:
    """Run the answer to a conversation, and tell what the ledger of turns did; as ``respond``."""
    show_report(request, answer.chat.prompt.report)
    return respond(request, answer, is_streamed)


async def respond(request: Request, answer: Answer[Any], is_streamed: bool) -> Response:
    """Run an answer for its client, as one body or as a stream of server-sent events.

    Raises:
        ApiError: It failed before the first event, or the client disconnected (499).
    """
    if is_streamed:
        return await begin(request, _events(answer))
    return JSONResponse(await until_gone(request, answer.whole()))


async def _events(answer: Answer[Any]) -> AsyncGenerator[bytes, None]:
    """Stream an answer; what one output adds is sent in one piece."""
    async with aclosing(answer.outputs()) as outputs:
        async for output in outputs:
            if events := await answer.take(output):
                yield b"".join(events)
    if last := answer.closing():
        yield last


@dataclass(slots=True)
class ChatAnswer(Generic[BodyT]):
    """The answer to a conversation; each API gives its parts their shape."""

    chat: Conversation[BodyT]
    last: RequestOutput | None = field(init=False, default=None)
    _deltas: Deltas = field(init=False, default_factory=Deltas)

    def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs."""
        return serve(self.chat.state, self.chat.caller, self.chat.call)

    async def take(self, output: RequestOutput) -> Sequence[bytes]:
        """Return the events of what an output adds."""
        events = list[bytes]()
        if self.last is None:
            await self.computed(output)
            events += self.opening()
        self.last = output
        for delta in self._deltas.take(output):
            events += self.added(delta)
            if delta.is_last:  # noted before its client has all of it
                self.chat.note(output.outputs[delta.index], self.parsed(delta.index))
        if output.finished:
            self._prepare_next(output)
        return events

    async def whole(self) -> Mapping[str, Any]:
        """Return the complete response."""
        whole: Mapping[str, Any] | None = None
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                if self.last is None:
                    await self.computed(output)
                self.last = output
                if output.finished:  # noted before the next prompt is prepared
                    whole = self.body_of(self._deltas.take(output))
                    for part in output.outputs:
                        self.chat.note(part, self.parsed(part.index))
                    self._prepare_next(output)
        assert whole is not None, "a request ended without its last output"
        return whole

    def _prepare_next(self, last: RequestOutput) -> None:
        """Prepare the prompt that follows the answer, beside the response."""
        chat = self.chat
        if chat.state.llm.prepares_next:
            turn = chat.call, chat.reader, chat.prompt, chat.messages, last
            chat.state.run_beside(offer_next(chat.state, cast(ChatFields, chat.body), *turn))

    async def computed(self, first: RequestOutput) -> None:
        """Note that the prompt is computed: its first output is there."""

    def opening(self) -> Iterable[bytes]:
        """Return the events before all others."""
        return ()

    @abstractmethod
    def parsed(self, index: int) -> ParsedAnswer:
        """Return what was parsed of a continuation so far."""

    @abstractmethod
    def added(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of the new part of a continuation."""

    def closing(self) -> bytes:
        """Return the events behind the last output; may be empty."""
        return b""

    @abstractmethod
    def body_of(self, parts: Sequence[Delta]) -> Mapping[str, Any]:
        """Return the complete response, given all of each continuation."""

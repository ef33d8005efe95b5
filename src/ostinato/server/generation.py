"""The common way of requests that generate, whatever their API.

::

    body ─► accept_fields ─► open_call ─► set_aside ─► render_chat ─► respond ─► Answer.whole
                 └── 400         └── 400, 404, 429, 503                  └─────► Answer.take ...
            ─────────────── open_chat, of a conversation ────────────
"""

import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ostinato.core.errors import RequestError
from ostinato.core.tokens import num_common_tokens
from ostinato.engine.prompts.chat import RenderedChat, WrittenAnswer, sections_of
from ostinato.engine.requests.outputs import CompletionOutput, RequestOutput
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.images.parts import images_in, without_sources
from ostinato.protocol.conversation import Message
from ostinato.protocol.marks import Breakpoint
from ostinato.server.access.callers import Caller
from ostinato.server.answers.answer_parser import (
    AnswerParser,
    ParsedAnswer,
    Piece,
    parse_answer,
)
from ostinato.server.answers.call_grammar import ConversationBody, SampledBody, chat_params
from ostinato.server.call import Covered, GenerateCall, sender
from ostinato.server.middleware import accept_fields, set_aside, show_report
from ostinato.server.next_prompts import offer_next
from ostinato.server.prompting import AnswerReader, read_with, render_chat, render_prompt
from ostinato.server.serving import check_room, serve
from ostinato.server.state import ServerState
from ostinato.server.streaming import Delta, Deltas, begin, until_gone

OutputT = TypeVar("OutputT")
BodyT = TypeVar("BodyT", bound=ConversationBody)

_STAND_IN: Message = {"role": "user", "content": "?"}
"""Templates need a message; this one stands in where a mark has none before it."""

_HEAD_ONLY = {"add_generation_prompt": False, "continue_final_message": False}
"""Options of a template that ends where its messages end."""


def open_call(
    state: ServerState,
    caller: Caller,
    body: SampledBody,
    params: SamplingParams,
    num_prompts: int = 1,
) -> GenerateCall:
    """Return a call to the engine, before any work on its prompt.

    Args:
        state: Server state.
        caller: Its sender.
        body: The body of its request.
        params: Its sampling parameters; what the client did not give is the model's default.
        num_prompts: How many prompts the request has.

    Raises:
        ApiError: This server has no such model (404), or no room for as many calls (400, 429, 503).
    """
    call = GenerateCall(
        endpoint=body.dialect.path,
        params=state.llm.engine.defaults.fill(params, body.model_fields_set),
        prompt=sender(
            caller,
            body.cache_salt,
            adapter=state.adapter_of(body.model),
            cache_read=body.cache.read,
            cache_write=body.cache.write,
            keep_tokens=body.keep_tokens,
        ),
        request_id=f"{body.id_prefix}{uuid.uuid4().hex}",
        **body.call_settings(),
    )
    check_room(state, caller, call, num_prompts)
    return call


@dataclass(frozen=True, slots=True)
class PreparedChat(Generic[BodyT]):
    """A conversation that is ready to be continued.

    Attributes:
        state: Server state.
        caller: Its sender.
        body: The body of its request.
        call: The call to the engine, with the prompt.
        reader: How its answer is parsed.
        rendered: Its token ids, in which an image is one placeholder; where its answer is noted in
            the ledger of turns; and what the ledger did to it.
        messages: What it was rendered from.
    """

    state: ServerState
    caller: Caller
    body: BodyT
    call: GenerateCall
    reader: AnswerReader
    rendered: RenderedChat
    messages: Sequence[Message]

    def sealed_name(self) -> str | None:
        """Return the name of the turn that is being written, for its client; None without one."""
        turns, begun = self.state.llm.engine.prompts.turns, self.rendered.begun
        return None if turns is None or begun is None else turns.name(begun)

    async def measure(
        self, marks: Sequence[Breakpoint], before: Sequence[Message] = ()
    ) -> list[Covered]:
        """Return what each mark covers and for how long, in order.

        The conversation is rendered up to a mark and compared with the whole prompt, so no chat
        template needs to be understood.

        Args:
            marks: The marks of the body, in order.
            before: Messages that precede those of the body.

        Raises:
            RequestError: The template refuses a conversation that ends at a mark.
        """
        state, prompt, body = self.state, self.call.prompt, self.body
        tokens = self.rendered.tokens.tokens
        places = list[Covered]()
        for mark in marks:
            part = [*before, *body.conversation(mark.num_blocks)]
            settle = partial(state.stabiliser.settle, part)
            messages = (await state.llm.tokenizing.run(settle, prompt.cache_salt)).messages
            images = prompt.images[: len(images_in(messages))]
            messages = without_sources(messages)
            if not any(message["role"] == "user" for message in messages):
                messages = [*messages, _STAND_IN]
            options = {**body.template(), **_HEAD_ONLY}
            try:
                context = replace(prompt, images=images)
                head = await render_prompt(state, messages, body.tool_use, context, **options)
            except RequestError as error:
                raise RequestError(f"cache_control cannot be placed there: {error}") from error
            num_common = num_common_tokens(head.tokens.tokens.tobytes(), tokens.tobytes())
            num_tokens = state.llm.tokenizing.num_tokens(images, tokens[:num_common])
            places.append(Covered(num_tokens, len(images), mark.terms))
        return places

    def note(self, output: CompletionOutput, answer: ParsedAnswer) -> None:
        """Note a complete continuation in the ledger of turns, before its client has all of it.

        Left out are answers that say less than what was written: those cut at a stop string, and
        those with more calls than the request allows.
        """
        engine, call, reader = self.state.llm.engine, self.call, self.reader
        turns, begun, prompt = engine.prompts.turns, self.rendered.begun, call.prompt
        if turns is None or begun is None or not (prompt.cache_write and prompt.keep_tokens):
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


async def open_chat(
    request: Request,
    state: ServerState,
    caller: Caller,
    body: BodyT,
    before: Sequence[Message] = (),
) -> PreparedChat[BodyT]:
    """Render a conversation; choose how its answer is sampled and parsed.

    Args:
        request: The request; its response will name what was ignored and set aside.
        state: Server state.
        caller: Its sender.
        body: Its body.
        before: Messages that precede those of the body.

    Raises:
        ApiError: A field is refused (400), this server has no such model (404), or no room now
            (429, 503) or ever (400).
        MissingTokenizer: The checkpoint has none.
        RequestError: The template refuses the conversation, or an image cannot be loaded.
    """
    accept_fields(request, state, body)
    call = open_call(state, caller, body, chat_params(body, state.formats))
    messages = [*before, *body.conversation()]
    settled = await set_aside(request, state, call.prompt.cache_salt, messages)
    messages, prompt = settled.messages, replace(call.prompt, keep_reasoning=body.keep_reasoning)
    prompt, rendered = await render_chat(state, prompt, body, messages)
    tokens, sections = rendered.tokens, sections_of(messages)
    reader = await read_with(state, tokens, body.tool_use, body.add_generation_prompt)
    prompt = replace(
        prompt,
        token_ids=tokens,
        known=tokens,
        sections=settled.named(sections) if settled.changed else sections,
        report=rendered.report,
    )
    call = replace(call, params=reader.settle(call.params), prompt=prompt)
    show_report(request, rendered.report)
    return PreparedChat(state, caller, body, call, reader, rendered, messages)


async def lease_marks(
    chat: PreparedChat[BodyT], before: Sequence[Message] = ()
) -> PreparedChat[BodyT]:
    """Return a conversation whose prompt is leased up to the marks of its body.

    Args:
        chat: The conversation.
        before: Messages that precede those of the body.

    Raises:
        RequestError: The template refuses a conversation that ends at a mark.
    """
    if not (marks := chat.body.breakpoints()):
        return chat
    return replace(chat, call=replace(chat.call, kept=tuple(await chat.measure(marks, before))))


async def lease_possible_marks(
    chat: PreparedChat[BodyT], before: Sequence[Message] = ()
) -> PreparedChat[BodyT]:
    """Lease a prompt up to its marks, unless the template ends no turn at one of them.

    OpenAI's marks only speed later requests up, so that such a mark refuses no request.
    """
    try:
        return await lease_marks(chat, before)
    except RequestError:
        return chat


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
    """The answer to a conversation; each API gives its parts their shape.

    Attributes:
        chat: The conversation.
        last: The newest output; None before the first.
        answers: What was parsed of each continuation so far.
        created: When it was begun, in seconds since 1970.
    """

    chat: PreparedChat[BodyT]
    last: RequestOutput | None = field(init=False, default=None)
    answers: list[ParsedAnswer] = field(init=False, default_factory=list)
    created: int = field(init=False)
    _parsers: list[AnswerParser] = field(init=False, default_factory=list)
    _deltas: Deltas = field(init=False, default_factory=Deltas)

    def __post_init__(self) -> None:
        """Parse each continuation by itself."""
        self.created = int(time.time())
        for _ in range(self.chat.call.params.n):
            self._parsers.append(self.chat.reader.parser())
            self.answers.append(ParsedAnswer())

    def read(self, delta: Delta) -> list[Piece]:
        """Parse the new part of a continuation."""
        pieces = self._parsers[delta.index].feed(delta.text, delta.is_last)
        for piece in pieces:
            self.answers[delta.index].add(piece)
        return pieces

    def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs."""
        return serve(self.chat.state, self.chat.caller, self.chat.call)

    async def take(self, output: RequestOutput) -> Sequence[bytes]:
        """Return the events of what an output adds."""
        events = list[bytes]()
        is_first, self.last = self.last is None, output
        if is_first:
            events += self.opening()
        for delta in self._deltas.take(output):
            events += self.added(delta)
            if delta.is_last:  # noted before its client has all of it
                self.chat.note(output.outputs[delta.index], self.answers[delta.index])
        if output.finished:
            self._prepare_next(output)
        return events

    async def whole(self) -> Mapping[str, Any]:
        """Return the complete response."""
        whole: Mapping[str, Any] | None = None
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                self.last = output
                if output.finished:  # noted before the next prompt is prepared
                    whole = self.body_of(self._deltas.take(output))
                    for part in output.outputs:
                        self.chat.note(part, self.answers[part.index])
                    self._prepare_next(output)
        assert whole is not None, "a request ended without its last output"
        return whole

    def _prepare_next(self, last: RequestOutput) -> None:
        """Prepare the prompt that follows the answer, beside the response."""
        chat = self.chat
        if chat.state.llm.prepares_next:
            turn = chat.call, chat.messages, last, self.answers[0]
            chat.state.run_beside(offer_next(chat.state, chat.body, *turn))

    def opening(self) -> Iterable[bytes]:
        """Return the events before all others."""
        return ()

    @abstractmethod
    def added(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of the new part of a continuation."""

    def closing(self) -> bytes:
        """Return the events behind the last output; may be empty."""
        return b""

    @abstractmethod
    def body_of(self, parts: Sequence[Delta]) -> Mapping[str, Any]:
        """Return the complete response, given all of each continuation."""

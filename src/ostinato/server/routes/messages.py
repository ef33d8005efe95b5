"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``.

Events of a stream::

    message_start                      with the prompt's token counts
      content_block_start ─► content_block_delta ... ─► content_block_stop      text or a call
      ...
    message_delta                      stop reason, and all token counts
    message_stop
"""

import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ostinato.engine.prompts.chat import sections_of
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.answers.answer_parser import (
    AnswerParser,
    ArgumentsPiece,
    CallStart,
    ParsedAnswer,
    Piece,
    ReasoningPiece,
    TextPiece,
    parse_answer,
)
from ostinato.server.breakpoints import Covered, Kept, keep, measure
from ostinato.server.call import GenerateCall
from ostinato.server.middleware.fields import DialectRoute, accept_fields, show_report
from ostinato.server.prompting import AnswerReader, note_turn, read_with, render_chat, rendered
from ostinato.server.protocol.answers import Counted, MessageBody
from ostinato.server.protocol.dialects import MESSAGES
from ostinato.server.protocol.messages import CountBody, MessagesBody
from ostinato.server.routes.models import adapter_of
from ostinato.server.serving import check_room, serve
from ostinato.server.state import ServerState, StateDep
from ostinato.server.streaming import Delta, Deltas, begin, named_event, until_gone

ENDPOINT = "/v1/messages"

BodyT = TypeVar("BodyT", bound=CountBody)

router = APIRouter(tags=["messages"], route_class=DialectRoute)


@router.post(ENDPOINT, response_model=MessageBody)
async def create_message(
    body: MessagesBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Continue a conversation, in one response or as a stream of server-sent events."""
    body = accept_body(request, state, body)
    messages = body.conversation()
    call = GenerateCall(
        endpoint=ENDPOINT,
        adapter=adapter_of(state, body.model),
        params=body.params(state.formats),
        cache_salt=body.cache_salt,
        cache_read=body.cache.read,
        cache_write=body.cache.write,
        keep_tokens=body.keep_tokens,
        user=body.metadata.user_id,
        sections=sections_of(messages),
        request_id=f"msg_{uuid.uuid4().hex}",
    )
    check_room(state, caller, [call])
    whose, tokens = await render_chat(state, caller, body, messages, call.adapter)
    show_report(request, whose.report)
    reader = await read_with(state, tokens, body.tool_use())
    params = reader.settle(call.params)
    call = replace(call, params=params, **rendered(whose, tokens))
    places = await measure(state, whose, body, tokens)
    answer = MessageAnswer(state, body, caller, call, reader, places)
    if body.stream:
        return await begin(request, answer.events())
    return JSONResponse(await until_gone(request, answer.whole()))


@router.post(f"{ENDPOINT}/count_tokens", response_model=Counted)
async def count_tokens(
    body: CountBody, request: Request, state: StateDep, caller: CallerDep
) -> dict[str, int]:
    """Count the tokens of a prompt, without running it."""
    body = accept_body(request, state, body)
    adapter = adapter_of(state, body.model)
    whose, tokens = await render_chat(state, caller, body, body.conversation(), adapter)
    return {"input_tokens": state.llm.tokenizing.num_tokens(whose.images, tokens.tokens)}


def accept_body(request: Request, state: ServerState, body: BodyT) -> BodyT:
    """Return a body as it is rendered: without a checksum that changes in each conversation.

    Raises:
        ApiError: A field would change the answer, or is unknown and refused.
    """
    accept_fields(request, state, MESSAGES, body, body.left_out())
    if state.config.keep_checksums:
        return body
    settled = body.without_checksum()
    if settled is not body:
        request.state.set_aside = ["system[0]"]
    return settled


@dataclass(slots=True)
class MessageAnswer:
    """The response to one call."""

    state: ServerState
    body: MessagesBody
    caller: Caller
    call: GenerateCall
    reader: AnswerReader
    places: list[Covered]
    _num_blocks: int = 0
    _open: str | None = None  # kind of the open block

    async def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        last: RequestOutput | None = None
        kept: Kept | None = None
        async with aclosing(serve(self.state, self.caller, self.call)) as outputs:
            async for output in outputs:
                kept = kept or await self._keep(output)
                last = output
        assert last is not None and kept is not None, "a request ended without an output"
        [delta] = Deltas().take(last)
        answer = parse_answer(delta.text, self.reader.parser())
        note_turn(self.state, self.call, self.reader, last.outputs[0], answer)
        content = [self._thinking(answer.reasoning)] if answer.reasoning else []
        content += [{"type": "text", "text": answer.text}] if answer.text else []
        for call in answer.calls:
            given = _read(call.arguments)
            if given is not None:  # else it was truncated, and stop_reason says so
                content.append({**_tool_use(call.call_id, call.name), "input": given})
        usage = kept.usage(len(delta.token_ids))
        return {**self._message(content, usage), **self._end(delta, bool(answer.calls))}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Stream the response."""
        deltas, parser, answer = Deltas(), self.reader.parser(), ParsedAnswer()
        kept, num_output_tokens = None, 0
        async with aclosing(serve(self.state, self.caller, self.call)) as outputs:
            async for output in outputs:
                if kept is None:
                    kept = await self._keep(output)
                    yield _event("message_start", message=self._message([], kept.usage(0)))
                for delta in deltas.take(output):
                    num_output_tokens += len(delta.token_ids)
                    for event in self._pieces(delta, parser, answer):
                        yield event
                    if delta.finish_reason is not None:
                        note_turn(self.state, self.call, self.reader, output.outputs[0], answer)
                        usage = kept.usage(num_output_tokens)
                        end = self._end(delta, parser.num_calls > 0)
                        yield _event("message_delta", delta=end, usage=usage)
        yield _event("message_stop")

    async def _keep(self, output: RequestOutput) -> Kept:
        whose = self.call.sender(self.caller)
        return await keep(self.state.held_prefixes, whose, self.places, output)

    def _pieces(self, delta: Delta, parser: AnswerParser, answer: ParsedAnswer) -> Iterator[bytes]:
        """Add new pieces to the answer, and yield their events."""
        for piece in parser.feed(delta.text, delta.is_last):
            answer.add(piece)
            yield from self._piece(piece)
        if delta.is_last:
            yield from self._close()

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case TextPiece():
                if self._open != "text":
                    yield from self._begin("text", {"type": "text", "text": ""})
                yield self._added({"type": "text_delta", "text": piece.text})
            case ReasoningPiece():
                if self._open != "thinking":
                    yield from self._begin("thinking", self._thinking(""))
                if shown := self._thinking(piece.text)["thinking"]:
                    yield self._added({"type": "thinking_delta", "thinking": shown})
            case CallStart():
                block = {**_tool_use(piece.call_id, piece.name), "input": {}}
                yield from self._begin("tool_use", block)
            case ArgumentsPiece():
                yield self._added({"type": "input_json_delta", "partial_json": piece.text})

    def _thinking(self, text: str) -> dict[str, Any]:
        """Return a block of reasoning; its signature names the turn."""
        thinking = self.body.thinking
        is_omitted = thinking is not None and thinking.display == "omitted"
        shown = "" if is_omitted else text
        return {"type": "thinking", "thinking": shown, "signature": self._signature()}

    def _signature(self) -> str:
        turns, begun = self.state.llm.engine.prompts.turns, self.call.begun
        return "" if turns is None or begun is None else turns.name(begun)

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = kind
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _added(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            if self._open == "thinking":
                signature = self._signature()
                yield self._added({"type": "signature_delta", "signature": signature})
            yield _event("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = None

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.call.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _end(self, delta: Delta, has_calls: bool) -> dict[str, Any]:
        """Return Anthropic's stop reason."""
        matched = delta.stop_reason if delta.stop_reason in self.body.stop_sequences else None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif matched is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": matched}


def _tool_use(call_id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id.replace("call_", "toolu_", 1), "name": name}


def _read(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments; None if they are not a JSON object."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _event(kind: str, **content: Any) -> bytes:
    return named_event(kind, {"type": kind, **content})

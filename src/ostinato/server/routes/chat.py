"""``/v1/chat/completions``."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ostinato.engine.prompts.chat import sections_of
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.answers.answer_parser import (
    ArgumentsPiece,
    CallStart,
    ParsedAnswer,
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolCall,
    parse_answer,
)
from ostinato.server.call import GenerateCall
from ostinato.server.middleware.fields import DialectRoute, accept_fields, show_report
from ostinato.server.prompting import AnswerReader, note_turn, read_with, render_chat, rendered
from ostinato.server.protocol.answers import ChatCompletion, Usage
from ostinato.server.protocol.chat import ChatBody
from ostinato.server.protocol.dialects import CHAT
from ostinato.server.protocol.logprobs import chat_logprobs, prompt_logprobs
from ostinato.server.routes.models import adapter_of
from ostinato.server.serving import check_room, last_output, serve
from ostinato.server.state import ServerState, StateDep
from ostinato.server.streaming import DONE, Delta, Deltas, begin, event, until_gone

ENDPOINT = "/v1/chat/completions"

router = APIRouter(tags=["chat"], route_class=DialectRoute)


@router.post(ENDPOINT, response_model=ChatCompletion)
async def chat(body: ChatBody, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Continue a conversation, in one response or as a stream of server-sent events."""
    accept_fields(request, state, CHAT, body)
    messages = [message.rendered() for message in body.messages]
    call = GenerateCall(
        endpoint=ENDPOINT,
        adapter=adapter_of(state, body.model),
        params=body.params(state.formats),
        priority=body.priority,
        user=body.acts_for,
        sections=sections_of(messages),
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        **body.cache_settings(),
    )
    check_room(state, caller, [call])  # before any work on the prompt
    whose, tokens = await render_chat(state, caller, body, messages, call.adapter)
    show_report(request, whose.report)
    reader = await read_with(state, tokens, body.tool_use(), body.add_generation_prompt)
    params = reader.settle(call.params)
    call = replace(call, params=params, **rendered(whose, tokens))
    answer = Answer(state, body, caller, call, reader)
    if body.stream:
        return await begin(request, answer.events())
    return JSONResponse(await until_gone(request, answer.whole()))


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one call."""

    state: ServerState
    body: ChatBody
    caller: Caller
    call: GenerateCall
    reader: AnswerReader
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        last = await last_output(self.state, self.caller, self.call)
        deltas = list(Deltas().take(last))
        answers = [parse_answer(delta.text, self.reader.parser()) for delta in deltas]
        for pair in zip(last.outputs, answers, strict=True):
            note_turn(self.state, self.call, self.reader, *pair)
        choices = [self._choice(*pair) for pair in zip(deltas, answers, strict=True)]
        usage = self._usage(last, answers)
        ids = {"prompt_token_ids": last.prompt_token_ids} if self.body.return_token_ids else {}
        scored = prompt_logprobs(last.prompt_logprobs)
        return {**self._head("chat.completion", choices), **ids, **scored, "usage": usage}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Stream the response; each choice begins with its role."""
        deltas, last = Deltas(), None
        parsers = [self.reader.parser() for _ in range(self.body.n)]
        answers = [ParsedAnswer() for _ in range(self.body.n)]
        async with aclosing(serve(self.state, self.caller, self.call)) as outputs:
            async for output in outputs:
                last, chunks = output, list[dict[str, Any]]()
                for delta in deltas.take(output):
                    pieces = parsers[delta.index].feed(delta.text, delta.is_last)
                    for piece in pieces:
                        answers[delta.index].add(piece)
                    if delta.finish_reason is not None:
                        whole = output.outputs[delta.index]
                        note_turn(self.state, self.call, self.reader, whole, answers[delta.index])
                    if not delta.is_later:
                        opening = {"role": "assistant", "content": ""}
                        chunks.append(self._chunk(delta.index, opening))
                    chunks += self._chunks(delta, pieces, answers[delta.index].has_calls)
                usage = self._usage_so_far(output)
                if chunks:  # the output of one step is sent in one piece
                    yield b"".join([event(chunk | usage) for chunk in chunks])
        end = DONE
        if self.body.include_usage and last is not None:
            head = self._head("chat.completion.chunk", [])
            end = event({**head, "usage": self._usage(last, answers)}) + DONE
        yield end

    def _usage_so_far(self, output: RequestOutput) -> dict[str, Any]:
        return self.body.usage_so_far(lambda: Usage.of([output]).as_openai())

    def _usage(self, output: RequestOutput, answers: Sequence[ParsedAnswer]) -> dict[str, Any]:
        reasoning = None
        if self.reader.formats.reasoning is not None:
            pairs = zip(output.outputs, answers, strict=True)
            reasoning = sum(self.reader.num_reasoning_tokens(o.token_ids, a) for o, a in pairs)
        return Usage.of([output]).as_openai(self.call.num_retained_tokens, reasoning)

    def _choice(self, delta: Delta, answer: ParsedAnswer) -> dict[str, Any]:
        text, calls = answer.text, answer.calls
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
        if answer.reasoning and self.body.include_reasoning:
            message["reasoning"] = answer.reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": delta.index,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": _finish_reason(delta, bool(calls)),
            **({"token_ids": delta.token_ids} if self.body.return_token_ids else {}),
        }

    def _chunks(
        self, delta: Delta, pieces: Sequence[Piece], has_calls: bool
    ) -> list[dict[str, Any]]:
        """Return the chunks of new reasoning, text and calls, and the finish reason."""
        chunks, logprobs = [], self._logprobs(delta)
        if not self.body.include_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, ReasoningPiece)]
        if logprobs is not None and not pieces:
            pieces = [TextPiece("")]
        for piece in pieces:
            chunks.append(self._chunk(delta.index, _added(piece), logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            reason = _finish_reason(delta, has_calls)
            chunks.append(self._chunk(delta.index, {}, None, reason))
        if self.body.return_token_ids and chunks:
            chunks[0]["choices"][0]["token_ids"] = delta.token_ids
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._head("chat.completion.chunk", [choice])

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, self.body.top_logprobs or 0)

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.request_id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self.state.fingerprint,
            "choices": choices,
        }


def _finish_reason(delta: Delta, has_calls: bool) -> str | None:
    """Return OpenAI's finish reason: ``tool_calls`` in place of ``stop`` where there are calls."""
    return "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _added(piece: Piece) -> dict[str, Any]:
    """Return a piece of an answer as OpenAI's ``delta``."""
    match piece:
        case TextPiece():
            return {"content": piece.text}
        case ReasoningPiece():
            return {"reasoning": piece.text}
        case CallStart():
            call = {**_call(ToolCall(piece.call_id, piece.name, "")), "index": piece.index}
            return {"tool_calls": [call]}
        case ArgumentsPiece():
            call = {"index": piece.index, "function": {"arguments": piece.text}}
            return {"tool_calls": [call]}

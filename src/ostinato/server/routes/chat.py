"""``/v1/chat/completions``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostinato.engine.requests.outputs import RequestOutput
from ostinato.protocol.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChunkChoice,
    ToolCallBody,
    UsageBody,
)
from ostinato.protocol.chat import ChatBody
from ostinato.protocol.logprobs import chat_logprobs, prompt_logprobs
from ostinato.server.access.callers import CallerDep
from ostinato.server.answers.answer_parser import (
    ArgumentsPiece,
    CallStart,
    ParsedAnswer,
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolCall,
)
from ostinato.server.generation import ChatAnswer, lease_possible_marks, open_chat, respond
from ostinato.server.middleware import DialectRoute
from ostinato.server.state import StateDep
from ostinato.server.streaming import DONE, Delta, event
from ostinato.server.usage import Usage

router = APIRouter(tags=["chat"], route_class=DialectRoute)


@router.post(ChatBody.dialect.path, response_model=ChatCompletion)
async def chat(body: ChatBody, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Continue a conversation, in one response or as a stream of server-sent events."""
    chat = await lease_possible_marks(await open_chat(request, state, caller, body))
    return await respond(request, OpenAIAnswer(chat), body.stream)


@dataclass(slots=True)
class OpenAIAnswer(ChatAnswer[ChatBody]):
    """The answer as chat completions; each streamed choice begins with its role."""

    def body_of(self, parts: Sequence[Delta]) -> ChatCompletion:
        """Return the complete response."""
        body, last = self.chat.body, self.last
        assert last is not None
        for part in parts:
            self.read(part)
        whole = ChatCompletion(
            id=self.chat.call.request_id,
            object="chat.completion",
            created=self.created,
            model=body.model,
            system_fingerprint=self.chat.state.fingerprint,
            choices=[self._choice(*pair) for pair in zip(parts, self.answers, strict=True)],
            usage=self._usage(last),
        )
        if body.return_token_ids:
            whole["prompt_token_ids"] = last.prompt_token_ids
        if last.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(last.prompt_logprobs)
        return whole

    def added(self, delta: Delta) -> Iterable[bytes]:
        """Return the chunks of the new part of a choice."""
        chunks = [*self._chunks(delta, self.read(delta))]
        if self.chat.body.return_token_ids and chunks:
            chunks[0]["token_ids"] = delta.token_ids
        if not delta.is_later:
            opening = ChatDelta(role="assistant", content="")
            chunks.insert(0, _chunk(delta.index, opening))
        return [self._event([chunk]) for chunk in chunks]

    def closing(self) -> bytes:
        """Return the token counts, if requested, and the end of the stream."""
        if not self.chat.body.include_usage or self.last is None:
            return DONE
        return self._event([], self._usage(self.last)) + DONE

    def _event(self, choices: list[ChunkChoice], usage: UsageBody | None = None) -> bytes:
        body, last = self.chat.body, self.last
        chunk = ChatChunk(
            id=self.chat.call.request_id,
            object="chat.completion.chunk",
            created=self.created,
            model=body.model,
            system_fingerprint=self.chat.state.fingerprint,
            choices=choices,
        )
        if usage is None and body.has_running_usage and last is not None:
            usage = Usage.of([last], body.cache.write).as_openai()
        if body.include_usage:
            chunk["usage"] = usage
        return event(chunk)

    def _usage(self, output: RequestOutput) -> UsageBody:
        reader, reasoning = self.chat.reader, None
        if reader.formats.reasoning is not None:
            pairs = zip(output.outputs, self.answers, strict=True)
            reasoning = sum(reader.num_reasoning_tokens(o.token_ids, a) for o, a in pairs)
        usage = Usage.of([output], self.chat.body.cache.write)
        return usage.as_openai(self.chat.call.num_retained_tokens, reasoning)

    def _choice(self, part: Delta, answer: ParsedAnswer) -> ChatChoice:
        body, text, calls = self.chat.body, answer.text, answer.calls
        content = text or None if calls else text
        message = AnswerMessage(role="assistant", content=content, refusal=None)
        if answer.reasoning and body.include_reasoning:
            message["reasoning"] = answer.reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice = ChatChoice(
            index=part.index,
            message=message,
            logprobs=self._logprobs(part),
            finish_reason=_finish_reason(part, bool(calls)),
        )
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _chunks(self, delta: Delta, pieces: Sequence[Piece]) -> Iterator[ChunkChoice]:
        """Yield the chunks of new reasoning, text and calls, and of the finish reason."""
        logprobs = self._logprobs(delta)
        if not self.chat.body.include_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, ReasoningPiece)]
        if logprobs is not None and not pieces:
            pieces = [TextPiece("")]
        for piece in pieces:
            yield _chunk(delta.index, _added(piece), logprobs)
            logprobs = None
        if delta.is_last:
            has_calls = self.answers[delta.index].has_calls
            yield _chunk(delta.index, {}, None, _finish_reason(delta, has_calls))

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, self.chat.body.top_logprobs or 0)


def _chunk(
    index: int,
    delta: ChatDelta,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> ChunkChoice:
    return ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)


def _finish_reason(delta: Delta, has_calls: bool) -> str | None:
    """Return OpenAI's finish reason: ``tool_calls`` in place of ``stop`` where there are calls."""
    return "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason


def _call(call: ToolCall) -> ToolCallBody:
    return ToolCallBody(
        id=call.call_id,
        type="function",
        function={"name": call.name, "arguments": call.arguments},
    )


def _added(piece: Piece) -> ChatDelta:
    """Return a piece of an answer as OpenAI's ``delta``."""
    match piece:
        case TextPiece():
            return {"content": piece.text}
        case ReasoningPiece():
            return {"reasoning": piece.text}
        case CallStart():
            call = _call(ToolCall(piece.call_id, piece.name, ""))
            return {"tool_calls": [{**call, "index": piece.index}]}
        case ArgumentsPiece():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

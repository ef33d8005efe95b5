"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``.

Events of a stream::

    message_start                      with the prompt's token counts
      content_block_start ─► content_block_delta ... ─► content_block_stop      text or a call
      ...
    message_delta                      stop reason, and all token counts
    message_stop
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostinato.protocol.answers import Counted, MessageBody, MessageUsage, StopReason
from ostinato.protocol.messages import CountBody, MessagesBody
from ostinato.server.access.callers import CallerDep
from ostinato.server.answers.answer_parser import (
    ArgumentsPiece,
    CallStart,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from ostinato.server.generation import ChatAnswer, lease_marks, open_chat, respond
from ostinato.server.middleware import DialectRoute
from ostinato.server.prompting import count_prompt
from ostinato.server.state import StateDep
from ostinato.server.streaming import Delta, named_event
from ostinato.server.usage import Usage
from ostinato.tenants.terms import ANTHROPIC_1H

ENDPOINT = CountBody.dialect.path

router = APIRouter(tags=["messages"], route_class=DialectRoute)


@router.post(ENDPOINT, response_model=MessageBody)
async def create_message(
    body: MessagesBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Continue a conversation, in one response or as a stream of server-sent events."""
    chat = await lease_marks(await open_chat(request, state, caller, body))
    return await respond(request, AnthropicAnswer(chat), body.stream)


@router.post(f"{ENDPOINT}/count_tokens", response_model=Counted)
async def count_tokens(
    body: CountBody, request: Request, state: StateDep, caller: CallerDep
) -> dict[str, int]:
    """Count the tokens of a prompt, without running it."""
    return {"input_tokens": await count_prompt(request, state, caller, body, body.conversation())}


@dataclass(slots=True)
class AnthropicAnswer(ChatAnswer[MessagesBody]):
    """The answer as a message of blocks."""

    _num_output_tokens: int = 0
    _num_blocks: int = 0
    _open: str | None = None  # kind of the open block

    def body_of(self, parts: Sequence[Delta]) -> MessageBody:
        """Return the complete response."""
        [part] = parts
        self.read(part)
        [answer] = self.answers
        content = [self._thinking(answer.reasoning)] if answer.reasoning else []
        content += [{"type": "text", "text": answer.text}] if answer.text else []
        for call in answer.calls:
            given = _read(call.arguments)
            if given is not None:  # else it was truncated, and stop_reason says so
                content.append({**_tool_use(call.call_id, call.name), "input": given})
        return self._message(content, len(part.token_ids), self._end(part, bool(answer.calls)))

    def opening(self) -> Iterable[bytes]:
        """Return the beginning of the message, with the prompt's token counts."""
        yield _event("message_start", message=self._message([], 0, _RUNNING))

    def added(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events of new pieces, and of the end."""
        self._num_output_tokens += len(delta.token_ids)
        for piece in self.read(delta):
            yield from self._piece(piece)
        if delta.is_last:
            yield from self._close()
            end = self._end(delta, self.answers[0].has_calls)
            yield _event("message_delta", delta=end, usage=self._usage(self._num_output_tokens))

    def closing(self) -> bytes:
        """Return the end of the stream."""
        return _event("message_stop")

    def _usage(self, num_output_tokens: int) -> MessageUsage:
        """Return Anthropic's ``usage``; its three input counts add up to the prompt."""
        assert self.last is not None, "usage is sent from the first output on"
        prompt, written = Usage.of([self.last]), {True: 0, False: 0}  # kept for an hour, or not
        num_known = prompt.num_cached_tokens
        for place, num_tokens in self.chat.call.leased:
            written[place.terms == ANTHROPIC_1H] += max(0, num_tokens - num_known)
            num_known = max(num_known, num_tokens)
        usage = MessageUsage(
            input_tokens=prompt.num_prompt_tokens - num_known,
            cache_read_input_tokens=prompt.num_cached_tokens,
            cache_creation_input_tokens=num_known - prompt.num_cached_tokens,
            cache_creation={
                "ephemeral_5m_input_tokens": written[False],
                "ephemeral_1h_input_tokens": written[True],
            },
            output_tokens=num_output_tokens,
        )
        if prompt.num_kept_tokens:
            usage["kept_tokens"] = prompt.num_kept_tokens
        loaded: Any = {f"cache_read_{k}": n for k, n in prompt.loaded_tokens.items()}
        return {**usage, **loaded}

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
        thinking = self.chat.body.thinking
        is_omitted = thinking is not None and thinking.display == "omitted"
        shown = "" if is_omitted else text
        return {"type": "thinking", "thinking": shown, "signature": self.chat.sealed_name() or ""}

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = kind
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _added(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            if self._open == "thinking":
                signature = self.chat.sealed_name() or ""
                yield self._added({"type": "signature_delta", "signature": signature})
            yield _event("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = None

    def _message(
        self, content: list[dict[str, Any]], num_output_tokens: int, end: StopReason
    ) -> MessageBody:
        return MessageBody(
            id=self.chat.call.request_id,
            type="message",
            role="assistant",
            model=self.chat.body.model,
            content=content,
            **end,
            usage=self._usage(num_output_tokens),
        )

    def _end(self, delta: Delta, has_calls: bool) -> StopReason:
        """Return Anthropic's stop reason."""
        matched = delta.stop_reason if delta.stop_reason in self.chat.body.stop_sequences else None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif matched is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if has_calls else "end_turn"
        return StopReason(stop_reason=reason, stop_sequence=matched)


_RUNNING: StopReason = {"stop_reason": None, "stop_sequence": None}


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

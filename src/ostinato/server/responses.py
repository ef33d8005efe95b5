"""How is a conversation continued that the server may remember? ``/v1/responses``."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ostinato.engine.chat import fields_of
from ostinato.engine.outputs import RequestOutput
from ostinato.server.call import GenerateCall
from ostinato.server.callers import Caller, CallerOfRequest
from ostinato.server.deltas import Delta, Deltas
from ostinato.server.errors import ApiError
from ostinato.server.models import check_model
from ostinato.server.prompting import render_prompt, sender
from ostinato.server.protocol.responses import ResponsesBody
from ostinato.server.protocol.usage import Usage
from ostinato.server.response_items import Event, ItemWriter
from ostinato.server.response_store import StoredResponse
from ostinato.server.serving import serve
from ostinato.server.state import ServerState
from ostinato.server.streaming import begin, named_event, until_gone
from ostinato.server.tool_parser import ToolCallParser
from ostinato.server.tools import Message

ENDPOINT = "/v1/responses"

router = APIRouter(tags=["responses"])

_MISSING: dict[int | str, dict[str, Any]] = {404: {"description": "No such response."}}


@router.post(ENDPOINT)
async def create_response(
    body: ResponsesBody, request: Request, caller: CallerOfRequest
) -> Response:
    """Continue a conversation, all at once or as a stream of server-sent events."""
    state: ServerState = request.app.state.server
    check_model(state, body.model)
    params, use = body.params(), body.tool_use()
    state.check_room(1, 1)
    old: list[Message] = []
    if body.previous_response_id is not None:
        stored = _stored(state, caller, body.previous_response_id, "previous_response_id")
        old = list(stored.messages)
    new = body.conversation()
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    whose = sender(caller, body.cache_salt, body.keep_tokens)
    call = GenerateCall(
        endpoint=ENDPOINT,
        params=params,
        token_ids=await render_prompt(state, [*head, *old, *new], use, whose),
        user=body.user,
        fields=fields_of([*head, *old, *new]),
        request_id=f"resp_{uuid.uuid4().hex}",
        **body.cache_settings(),
    )
    answer = ResponseAnswer(state, body, caller, call, bool(use.tools), old, new)
    if body.stream:
        return await begin(request, answer.events())
    return JSONResponse(await until_gone(request, answer.whole()))


@router.get(f"{ENDPOINT}/{{response_id}}", responses=_MISSING)
async def get_response(
    response_id: str, request: Request, caller: CallerOfRequest
) -> dict[str, Any]:
    """Return a response that the server remembers."""
    return _stored(request.app.state.server, caller, response_id, "response_id").body


@router.delete(f"{ENDPOINT}/{{response_id}}", responses=_MISSING)
async def delete_response(
    response_id: str, request: Request, caller: CallerOfRequest
) -> dict[str, Any]:
    """Forget a response; those that continue it go on without it."""
    state: ServerState = request.app.state.server
    _stored(state, caller, response_id, "response_id")
    state.responses.delete(caller.salt, response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


@dataclass(slots=True)
class ResponseAnswer:
    """The answer to one call."""

    state: ServerState
    body: ResponsesBody
    caller: Caller
    call: GenerateCall
    has_tools: bool
    old: list[Message]
    new: list[Message]
    created: int = field(default_factory=lambda: int(time.time()))
    _writer: ItemWriter = field(default_factory=ItemWriter)
    _num_events: int = 0

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all of it is there."""
        last: RequestOutput | None = None
        async with aclosing(serve(self.state, self.caller, self.call)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None, "a request ended without an output"
        [delta] = Deltas().take(last)
        list(self._items(delta, ToolCallParser(self.has_tools)))
        return self._end(delta, last)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer piece by piece."""
        deltas, parser, is_first = Deltas(), ToolCallParser(self.has_tools), True
        async with aclosing(serve(self.state, self.caller, self.call)) as outputs:
            async for output in outputs:
                if is_first:
                    is_first = False
                    for kind in ("created", "in_progress"):
                        yield self._event(kind, response=self._response("in_progress"))
                for delta in deltas.take(output):
                    told = list(self._items(delta, parser))
                    if delta.finish_reason is not None:  # remembered before a slow reader has it
                        response = self._end(delta, output)
                        told.append((response["status"], {"response": response}))
                    for kind, content in told:
                        yield self._event(kind, **content)

    def _items(self, delta: Delta, parser: ToolCallParser) -> Iterator[Event]:
        """Write down what was added, and yield the events that tell of it."""
        for piece in parser.feed(delta.text):
            yield from self._writer.take(piece)
        if delta.finish_reason is not None:
            for piece in parser.finish():
                yield from self._writer.take(piece)
            yield from self._writer.finish(delta.finish_reason == "length")

    def _end(self, delta: Delta, output: RequestOutput) -> dict[str, Any]:
        """Return the whole response, and remember it if it shall be."""
        is_cut = delta.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["output"] = self._writer.items
        response["usage"] = _usage(Usage.of([output]), self.call.num_retained_tokens)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.body.is_stored:
            new = [*self.new, *self._writer.messages()]
            salt = self.caller.narrow(self.body.cache_salt)
            self.state.responses.put(self.caller.salt, salt, response, self.old, new)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.call.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "reasoning": {"effort": None, "summary": None},
            **self.body.echoed(),
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        name, number = f"response.{kind}", self._num_events
        self._num_events += 1
        return named_event(name, {"type": name, "sequence_number": number, **content})


def _stored(state: ServerState, caller: Caller, response_id: str, param: str) -> StoredResponse:
    """Return a caller's response.

    Raises:
        ApiError: The server does not remember it (404).
    """
    stored = state.responses.get(caller.salt, response_id)
    if stored is None:
        raise ApiError(
            404,
            f"{param}={response_id!r:.120}: no such response is remembered; the oldest are "
            "forgotten first, and so are all when the server ends: send the conversation along",
            param=param,
            code="response_not_found",
        )
    return stored


def _usage(usage: Usage, retained: Sequence[int]) -> dict[str, Any]:
    counts = usage.as_openai(retained)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }

"""``/v1/responses``."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from ostinato.engine.prompts.chat import sections_of
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.answers.answer_parser import AnswerParser, ParsedAnswer, TextPiece
from ostinato.server.answers.tools import Message
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.server.middleware.fields import DialectRoute, accept_fields, show_report
from ostinato.server.prompting import AnswerReader, note_turn, read_with, render_chat, rendered
from ostinato.server.protocol.answers import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseBody,
    Usage,
)
from ostinato.server.protocol.dialects import RESPONSES
from ostinato.server.protocol.logprobs import chat_logprobs
from ostinato.server.protocol.responses import ResponsesBody
from ostinato.server.response_store import StoredResponse
from ostinato.server.routes.models import adapter_of
from ostinato.server.routes.response_items import Event, ItemWriter
from ostinato.server.serving import check_room, last_output, serve
from ostinato.server.state import ServerState, StateDep
from ostinato.server.streaming import Delta, Deltas, begin, named_event, until_gone

ENDPOINT = "/v1/responses"

router = APIRouter(tags=["responses"], route_class=DialectRoute)


@router.post(ENDPOINT, response_model=ResponseBody)
async def create_response(
    body: ResponsesBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Continue a conversation, in one response or as a stream of server-sent events."""
    accept_fields(request, state, RESPONSES, body, body.left_out())
    call = GenerateCall(
        endpoint=ENDPOINT,
        adapter=adapter_of(state, body.model),
        params=body.params(state.formats),
        user=body.user,
        request_id=f"resp_{uuid.uuid4().hex}",
        **body.cache_settings(),
    )
    check_room(state, caller, [call])
    old, new = _earlier(state, caller, body), body.conversation()
    messages = [*body.head(), *old, *new]
    whose, tokens = await render_chat(state, caller, body, messages, call.adapter)
    show_report(request, whose.report)
    reader = await read_with(state, tokens, body.tool_use())
    call = replace(
        call,
        params=reader.settle(call.params),
        sections=sections_of(messages),
        **rendered(whose, tokens),
    )
    answer = ResponseAnswer(state, body, caller, call, reader, old, new)
    if body.stream:
        return await begin(request, answer.events())
    return JSONResponse(await until_gone(request, answer.whole()))


@router.post(f"{ENDPOINT}/input_tokens", response_model=InputTokens)
async def count_input_tokens(
    body: ResponsesBody, request: Request, state: StateDep, caller: CallerDep
) -> dict[str, Any]:
    """Count the tokens of a prompt, without running it."""
    accept_fields(request, state, RESPONSES, body, body.left_out())
    adapter = adapter_of(state, body.model)
    messages = [*body.head(), *_earlier(state, caller, body), *body.conversation()]
    prompt, tokens = await render_chat(state, caller, body, messages, adapter)
    count = state.llm.tokenizing.num_tokens(prompt.images, tokens.tokens)
    return {"object": "response.input_tokens", "input_tokens": count}


@router.api_route(f"{ENDPOINT}/compact", methods=["GET", "POST"], include_in_schema=False)
async def compact() -> None:
    """Refuse: nothing here shortens a conversation.

    Raises:
        ApiError: Always (404).
    """
    raise ApiError(
        404,
        f"{ENDPOINT}/compact is not served: send a shorter input instead",
        code="unknown_url",
    )


@router.get(f"{ENDPOINT}/{{response_id}}")
async def get_response(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Return a stored response."""
    return _stored(state, caller, response_id, "response_id").body


@router.delete(f"{ENDPOINT}/{{response_id}}", response_model=DeletedResponse)
async def delete_response(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Delete a response; later ones that continue it remain."""
    _stored(state, caller, response_id, "response_id")
    state.responses.delete(caller.salt, response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


@router.get(f"{ENDPOINT}/{{response_id}}/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    state: StateDep,
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """List the input items of a response, without those of earlier responses."""
    items = list(_stored(state, caller, response_id, "response_id").inputs)
    items = items if order == "asc" else items[::-1]
    places = [place for place, item in enumerate(items, 1) if item["id"] == after]
    left = items[places[0] if places else 0 :]
    shown = left[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(left) > limit,
    }


@router.post(f"{ENDPOINT}/{{response_id}}/cancel")
async def cancel_response(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Refuse: only background responses can be cancelled, and there are none.

    Raises:
        ApiError: It has ended (400), or is unknown (404).
    """
    _stored(state, caller, response_id, "response_id")
    raise ApiError(
        400,
        f"response_id={response_id!r:.120}: only a response created with background=true can be "
        "cancelled; close the connection of one that is running",
        param="response_id",
        code="invalid_value",
    )


@dataclass(slots=True)
class ResponseAnswer:
    """The response to one call."""

    state: ServerState
    body: ResponsesBody
    caller: Caller
    call: GenerateCall
    reader: AnswerReader
    old: list[Message]
    new: list[Message]
    created: int = field(default_factory=lambda: int(time.time()))
    _writer: ItemWriter = field(init=False)
    _answer: ParsedAnswer = field(default_factory=ParsedAnswer)
    _num_events: int = 0

    def __post_init__(self) -> None:
        """Send calls in the shape of their tools."""
        self._writer = ItemWriter(self.body.targets(), self._sealed_name)

    def _sealed_name(self) -> str | None:
        """Return the name of the turn as encrypted content; None if it is not wanted."""
        turns, begun = self.state.llm.engine.prompts.turns, self.call.begun
        if turns is None or begun is None or not self.body.includes_sealed_turns:
            return None
        return turns.name(begun)

    async def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        last = await last_output(self.state, self.caller, self.call)
        [delta] = Deltas().take(last)
        list(self._items(delta, self.reader.parser()))
        return self._end(delta, last)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Stream the response."""
        deltas, parser, is_first = Deltas(), self.reader.parser(), True
        async with aclosing(serve(self.state, self.caller, self.call)) as outputs:
            async for output in outputs:
                if is_first:
                    is_first = False
                    for kind in ("created", "in_progress"):
                        yield self._event(kind, response=self._response("in_progress"))
                for delta in deltas.take(output):
                    events = list(self._items(delta, parser))
                    if delta.finish_reason is not None:  # stored before a slow client has read it
                        response = self._end(delta, output)
                        events.append((response["status"], {"response": response}))
                    for kind, content in events:
                        yield self._event(kind, **content)

    def _items(self, delta: Delta, parser: AnswerParser) -> Iterator[Event]:
        """Add new pieces, and yield their events."""
        logprobs: list[dict[str, Any]] = []
        if delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs, self.body.top_logprobs or 0)["content"]
        for piece in parser.feed(delta.text, delta.is_last):
            self._answer.add(piece)
            is_text = isinstance(piece, TextPiece)
            yield from self._writer.take(piece, logprobs if is_text else ())
            logprobs = [] if is_text else logprobs
        if delta.finish_reason is not None:
            yield from self._writer.finish(delta.finish_reason == "length")

    def _end(self, delta: Delta, output: RequestOutput) -> dict[str, Any]:
        """Return the complete response, and store it if requested."""
        is_cut = delta.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["output"] = self._writer.items
        note_turn(self.state, self.call, self.reader, output.outputs[0], self._answer)
        ids = output.outputs[0].token_ids
        num_reasoning = self.reader.num_reasoning_tokens(ids, self._answer)
        usage = Usage.of([output]).as_openai(self.call.num_retained_tokens, num_reasoning)
        response["usage"] = _usage(usage)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.body.is_stored:
            self._store(response)
        return response

    def _store(self, response: dict[str, Any]) -> None:
        stored = StoredResponse(
            salt=self.caller.narrow(self.body.cache_salt),
            body=response,
            messages=(*self.old, *self.new, *self._writer.messages()),
            inputs=tuple(self.body.input_items()),
        )
        self.state.responses.put(self.caller.salt, stored)

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
            **self.body.echoed(),
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        name, number = f"response.{kind}", self._num_events
        self._num_events += 1
        return named_event(name, {"type": name, "sequence_number": number, **content})


def _earlier(state: ServerState, caller: Caller, body: ResponsesBody) -> list[Message]:
    """Return the conversation that a request continues.

    Raises:
        ApiError: It is not stored (404).
    """
    if body.previous_response_id is None:
        return []
    stored = _stored(state, caller, body.previous_response_id, "previous_response_id")
    return list(stored.messages)


def _stored(state: ServerState, caller: Caller, response_id: str, param: str) -> StoredResponse:
    """Return a caller's response.

    Raises:
        ApiError: It is not stored (404).
    """
    stored = state.responses.get(caller.salt, response_id)
    if stored is None:
        raise ApiError(
            404,
            f"{param}={response_id!r:.120}: response not found; responses are kept in memory, and "
            "the oldest are dropped: resend the conversation",
            param=param,
            code="response_not_found",
        )
    return stored


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }

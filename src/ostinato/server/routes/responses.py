"""``/v1/responses``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ostinato.core.errors import RequestError
from ostinato.protocol.answers import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseBody,
    ResponseUsage,
)
from ostinato.protocol.conversation import Message
from ostinato.protocol.logprobs import chat_logprobs
from ostinato.protocol.responses import ResponsesBody
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.answers.answer_parser import TextPiece
from ostinato.server.errors import ApiError, unknown_name
from ostinato.server.generation import ChatAnswer, lease_possible_marks, open_chat, respond
from ostinato.server.middleware import DialectRoute
from ostinato.server.prompting import count_prompt
from ostinato.server.response_store import StoredResponse
from ostinato.server.routes.response_items import Event, ItemWriter
from ostinato.server.state import ServerState, StateDep
from ostinato.server.streaming import Delta, named_event
from ostinato.server.usage import Usage

ENDPOINT = ResponsesBody.dialect.path

router = APIRouter(tags=["responses"], route_class=DialectRoute)


@router.post(ENDPOINT, response_model=ResponseBody)
async def create_response(
    body: ResponsesBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Continue a conversation, in one response or as a stream of server-sent events."""
    old = _earlier(state, caller, body)
    before = [*body.head(), *old]
    chat = await lease_possible_marks(await open_chat(request, state, caller, body, before), before)
    return await respond(request, ResponseAnswer(chat, old), body.stream)


@router.post(f"{ENDPOINT}/input_tokens", response_model=InputTokens)
async def count_input_tokens(
    body: ResponsesBody, request: Request, state: StateDep, caller: CallerDep
) -> dict[str, Any]:
    """Count the tokens of a prompt, without running it."""
    messages = [*body.head(), *_earlier(state, caller, body), *body.conversation()]
    count = await count_prompt(request, state, caller, body, messages)
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


@router.get(f"{ENDPOINT}/input_tokens", include_in_schema=False)
async def count_with_get() -> None:
    """Refuse: this is no response's id.

    Raises:
        ApiError: Always (405).
    """
    raise ApiError(
        405,
        f"GET {ENDPOINT}/input_tokens: send the body of a request with POST",
        code="method_not_allowed",
        headers={"Allow": "POST"},
    )


@router.get(f"{ENDPOINT}/{{response_id}}")
async def get_response(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Return a stored response."""
    return dict(_stored(state, caller, response_id, "response_id").body)


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
        RequestError: It has ended.
        ApiError: It is unknown (404).
    """
    _stored(state, caller, response_id, "response_id")
    raise RequestError(
        f"response_id={response_id!r:.120}: only a response created with background=true can be "
        "cancelled; close the connection of one that is running"
    )


@dataclass(slots=True)
class ResponseAnswer(ChatAnswer[ResponsesBody]):
    """The answer as a response of items.

    Attributes:
        earlier: The messages of the stored response that it continues.
    """

    earlier: list[Message]
    _writer: ItemWriter = field(init=False)
    _num_events: int = 0

    def __post_init__(self) -> None:
        """Send calls in the shape of their tools."""
        ChatAnswer.__post_init__(self)  # super() does not know a class with slots
        is_sealed = self.chat.body.includes_sealed_turns
        self._writer = ItemWriter(
            self.chat.body.targets(), self.chat.sealed_name if is_sealed else lambda: None
        )

    def body_of(self, parts: Sequence[Delta]) -> ResponseBody:
        """Return the complete response."""
        [part] = parts
        list(self._items(part))
        return self._end(part)

    def opening(self) -> Iterable[bytes]:
        """Return the events before the first item."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def added(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of new pieces, and of the end."""
        events = list(self._items(delta))
        if delta.is_last:  # stored before a slow client has read it
            response = self._end(delta)
            events.append((response["status"], {"response": response}))
        return [self._event(kind, **content) for kind, content in events]

    def _items(self, delta: Delta) -> Iterator[Event]:
        """Add new pieces, and yield their events."""
        logprobs: list[dict[str, Any]] = []
        if delta.logprobs is not None:
            top = self.chat.body.top_logprobs or 0
            logprobs = chat_logprobs(delta.logprobs, top)["content"]
        for piece in self.read(delta):
            is_text = isinstance(piece, TextPiece)
            yield from self._writer.take(piece, logprobs if is_text else ())
            logprobs = [] if is_text else logprobs
        if delta.is_last:
            yield from self._writer.finish(delta.finish_reason == "length")

    def _end(self, delta: Delta) -> ResponseBody:
        """Return the complete response, and store it if requested."""
        is_cut = delta.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["output"], response["usage"] = self._writer.items, self._usage()
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.chat.body.is_stored:
            self._store(response)
        return response

    def _usage(self) -> ResponseUsage:
        assert self.last is not None
        ids = self.last.outputs[0].token_ids
        num_reasoning = self.chat.reader.num_reasoning_tokens(ids, self.answers[0])
        usage = Usage.of([self.last], self.chat.body.cache.write)
        counts = usage.as_openai(self.chat.call.num_retained_tokens, num_reasoning)
        return ResponseUsage(
            input_tokens=counts["prompt_tokens"],
            input_tokens_details=counts["prompt_tokens_details"],
            output_tokens=counts["completion_tokens"],
            output_tokens_details=counts["completion_tokens_details"],
            total_tokens=counts["total_tokens"],
        )

    def _store(self, response: ResponseBody) -> None:
        caller, body = self.chat.caller, self.chat.body
        stored = StoredResponse(
            salt=self.chat.call.prompt.cache_salt,
            body=response,
            messages=(*self.earlier, *body.conversation(), *self._writer.turns.messages),
            inputs=tuple(body.input_items()),
        )
        self.chat.state.responses.put(caller.salt, stored)

    def _response(self, status: Literal["completed", "incomplete", "in_progress"]) -> ResponseBody:
        response = ResponseBody(
            id=self.chat.call.request_id,
            object="response",
            created_at=self.created,
            status=status,
            error=None,
            incomplete_details=None,
            output=[],
            usage=None,
        )
        params = self.chat.call.params  # with the model's defaults
        settings: Any = {"temperature": params.temperature, "top_p": params.top_p}
        response.update(self.chat.body.echoed() | settings)
        return response

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
        reason = (
            "response not found; responses are kept in memory, and the oldest are dropped: resend "
            "the conversation"
        )
        raise unknown_name(param, response_id, reason, "response_not_found")
    return stored

"""Server-sent events, client disconnects, and the new part of cumulative outputs.

A route waits for the first event before it responds, so that an early failure gets its own status;
later errors are sent as events.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ostinato.engine.requests.outputs import Logprob, RequestOutput
from ostinato.server.access.unread_output import Backlog
from ostinato.server.errors import ApiError, api_error, body_of

AnswerT = TypeVar("AnswerT")
Events = AsyncGenerator[bytes, None]

GONE = 499
"""nginx's status for the log: the client closed the connection before the response."""


def event(body: Any) -> bytes:
    """Format a server-sent event for OpenAI's clients."""
    return b"data: " + _to_json(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    """Format a named server-sent event, for Anthropic's clients and OpenAI's responses."""
    return f"event: {name}\n".encode() + event(body)


_to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


async def until_gone(request: Request, work: Coroutine[Any, Any, AnswerT]) -> AnswerT:
    """Await something for a client unless it disconnects.

    Raises:
        ApiError: The client disconnected (499), and the work was cancelled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE, "the client disconnected")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            await _end(task)


async def begin(request: Request, events: Events) -> "EventStream":
    """Wait for a stream's first event, and return the response that sends all of them.

    Raises:
        ApiError: It failed before, or the client disconnected (499).
    """
    try:
        first = await until_gone(request, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, request)


class EventStream(Response):
    """Streams events; cancels them when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: Events, request: Request) -> None:
        """Wrap a started stream; the request's path selects the shape of errors."""
        self._first, self._events, self._request = first, events, request
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        backlog = self._backlog(scope, send)
        writing = asyncio.create_task(self._write(backlog))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(writing, gone)
            await backlog.close()
            await self._events.aclose()
        if not writing.cancelled():
            writing.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _backlog(self, scope: Scope, send: Send) -> Backlog:
        state, headers = self._request.app.state.server, self._request.headers

        async def send_piece(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        return Backlog(
            scope, send_piece, state.unread, lambda: state.callers.identify(headers).tenant
        )

    async def _write(self, backlog: Backlog) -> None:
        await backlog.put(self._first)
        try:
            async for line in self._events:
                await backlog.put(line)
        except Exception as error:
            await backlog.put(self._error(api_error(error)))
        await backlog.drain()

    def _error(self, error: ApiError) -> bytes:
        """Format an error as an event, named for Anthropic's clients."""
        body = body_of(self._request.url.path, error)
        return named_event(body["type"], body) if "type" in body else event(body)


async def _next(events: Events) -> bytes:
    return await anext(events)


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of one continuation.

    Attributes:
        index: Index of the continuation.
        text: New text; may be empty, since uncertain text is held back.
        token_ids: New ids.
        logprobs: Log-probabilities of the new ids; None unless requested.
        offset: Characters of text before it.
        finish_reason: Why it ended; None while it continues.
        is_later: Whether an earlier part was sent.
        stop_reason: The stop string or stop id that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    offset: int
    finish_reason: str | None
    is_later: bool
    stop_reason: int | str | None = None

    @property
    def is_last(self) -> bool:
        """Whether it ends its continuation."""
        return self.finish_reason is not None


@dataclass(slots=True)
class Deltas:
    """Tracks how much of each continuation was sent."""

    _sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # index: characters, tokens
    _ended: set[int] = field(default_factory=set)

    def take(self, output: RequestOutput) -> list[Delta]:
        """Return what each continuation gained since the last call."""
        deltas = list[Delta]()
        for part in output.outputs:
            if part.index in self._ended:
                continue
            is_later = part.index in self._sent
            num_chars, num_tokens = self._sent.get(part.index, (0, 0))
            is_new = len(part.text) > num_chars or len(part.token_ids) > num_tokens
            if not is_new and part.finish_reason is None:
                continue
            self._sent[part.index] = (len(part.text), len(part.token_ids))
            if part.finish_reason is not None:
                self._ended.add(part.index)
            deltas += [
                Delta(
                    part.index,
                    part.text[num_chars:],
                    part.token_ids[num_tokens:],
                    None if part.logprobs is None else part.logprobs[num_tokens:],
                    num_chars,
                    part.finish_reason,
                    is_later,
                    part.stop_reason,
                )
            ]
        return deltas

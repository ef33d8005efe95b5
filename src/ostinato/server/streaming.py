"""Server-sent events, and client disconnects.

A route waits for the first event before it responds, so that an early failure gets its own status;
later errors are sent as events.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

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
        await _end(task, gone)


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
    return EventStream(first, events, request.url.path)


class EventStream(Response):
    """Streams events; cancels them when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: Events, path: str) -> None:
        """Wrap a started stream; the path selects the shape of errors."""
        self._first, self._events, self._path = first, events, path
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects."""
        writing = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(writing, gone)
            await self._events.aclose()
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send(_piece(self._first))
        try:
            async for line in self._events:
                await send(_piece(line))
        except Exception as error:
            await send(_piece(self._error(api_error(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error(self, error: ApiError) -> bytes:
        """Format an error as an event, named for Anthropic's clients."""
        body = body_of(self._path, error)
        name = body.get("type")
        head = f"event: {name}\n".encode() if isinstance(name, str) else b""
        return head + event(body)


def _piece(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


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

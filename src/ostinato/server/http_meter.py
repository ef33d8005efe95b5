"""Counts HTTP responses.

The outermost middleware, so that requests refused before any route are counted as well. Routes are
counted by their template, never by the client's path.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNROUTED = "(none)"
"""The label of responses without a route."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response.

    Attributes:
        method: HTTP method; ``OTHER`` for unknown ones.
        route: Template of its route, or ``UNROUTED``.
        status: HTTP status; 499 if the client disconnected first, as in nginx.
        seconds: Seconds from the request to the last byte.
    """

    method: str
    route: str
    status: int
    seconds: float


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class HttpMeter:
    """Counts the responses of an application."""

    def __init__(self, app: ASGIApp, count: Callable[[Answer], None]) -> None:
        """Wrap an application, and report each response."""
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin_s = 499, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            route = getattr(scope.get("route"), "path", UNROUTED)
            self._count(Answer(method, route, status, time.perf_counter() - begin_s))

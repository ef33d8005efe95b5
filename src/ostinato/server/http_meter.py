"""Counts the answers that left the server.

The outermost middleware, so that bodies which no route reads are counted as well. Routes are
counted by their template, never by what a stranger wrote into the address.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNROUTED = "(none)"
"""The route of answers that no route gave."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        method: Of HTTP; ``OTHER`` for unknown methods.
        route: Template of its route, or ``UNROUTED``.
        status: Of HTTP; 499 if the client went away before there was one, as nginx has it.
        seconds: From its request to its last byte.
    """

    method: str
    route: str
    status: int
    seconds: float


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class HttpMeter:
    """Counts the answers of an application."""

    def __init__(self, app: ASGIApp, count: Callable[[Answer], None]) -> None:
        """Stand before an application, and tell of each answer."""
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
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

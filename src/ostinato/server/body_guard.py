"""Which bodies are not even looked at?

Those that are too long, nested too deeply, or no UTF-8. They are refused before anything parses
them: a parser would need memory, or stack, in proportion to what a stranger sent.
"""

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.server.config import ServerConfig
from ostinato.server.errors import ApiError, response_of

_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A string, whose brackets do not count, or a bracket."""


class BodyGuard:
    """Reads each body, and hands it on in one piece if it is sound."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        """Stand before an application."""
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body is None:
                return  # whoever sent it has gone
            self._check(body)
        except ApiError as error:
            await response_of(scope["path"], error)(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return a whole body; None if its sender went away.

        Raises:
            ApiError: It is longer than allowed (413).
        """
        most = self._config.max_body_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > most:
            raise _too_long(int(announced[:20]), most)
        pieces, num_bytes, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > most:
                raise _too_long(num_bytes, most)
            more = message.get("more_body", False)
        return b"".join(pieces)

    def _check(self, body: bytes) -> None:
        """Refuse what no parser should see.

        Raises:
            ApiError: It is no UTF-8, or nested too deeply (400).
        """
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise ApiError(
                400,
                f"the body is not UTF-8: {error.reason} at byte {error.start}",
                code="invalid_utf8",
            ) from error
        most = self._config.max_json_depth
        if body.count(b"[") + body.count(b"{") > most and _depth_exceeds(body, most):
            raise ApiError(
                400, f"the body nests more than {most} brackets: flatten it", code="too_deep"
            )


def _depth_exceeds(body: bytes, most: int) -> bool:
    """Whether more brackets are open at once than allowed; strings do not count."""
    depth = 0
    for found in _BRACKET.finditer(body):
        first = found[0][:1]
        if first in b"[{":
            depth += 1
            if depth > most:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def _too_long(num_bytes: int, most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {num_bytes} bytes or more, and at most {most} are taken: send less, or "
        "raise --max-body",
        code="body_too_large",
    )

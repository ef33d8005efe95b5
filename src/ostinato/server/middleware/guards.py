"""Middleware that refuses requests before they are parsed.

Refused are requests of foreign web pages to a server without keys; and bodies that are sent without
a valid key, too long, too slow, nested too deeply, not UTF-8, or with more values than the model
could hold. A parser would spend memory, stack or time in proportion to such a body.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.server.config import is_loopback_address
from ostinato.server.errors import ApiError, body_too_long, body_too_slow, foreign_host, response_of
from ostinato.server.state import ServerState

MIN_ITEMS, ITEMS_PER_TOKEN = 262_144, 8
"""Minimum number of values allowed in a body, and values per token that the model can hold."""

_ESCAPE = re.compile(rb"\\.", re.DOTALL)


_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
"""Change in depth by a byte outside strings."""


class BodyGuard:
    """Reads each request's whole body, and passes it on if it is valid."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        """Wrap an application."""
        self._app = app
        self._callers = state.callers
        self._config = state.config
        items = max(MIN_ITEMS, ITEMS_PER_TOKEN * state.llm.max_model_len)
        self._max_items = state.config.max_json_items or items
        self._unfinished_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        body = _Body()
        try:
            # Without a valid key, the body is not even read.
            body.tenant = self._callers.identify(Headers(scope=scope)).tenant
            await self._read(scope, receive, body)
            self._check(body.data)
        except ApiError as refusal:
            await response_of(scope["path"], refusal)(scope, receive, send)
        else:
            if not body.is_gone:
                await self._app(scope, _replayed(body.data, receive), send)
        finally:
            self._release(body)

    async def _read(self, scope: Scope, receive: Receive, body: "_Body") -> None:
        """Read a whole body, unless its sender disconnects.

        Raises:
            ApiError: It is too long (413) or too slow (408), or its tenant has too many unfinished
                bytes (429).
        """
        limit = self._config.max_body_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise body_too_long(int(announced[:20]), limit)
        pieces: list[bytes] = []
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun_s + self._time_for(0)) as deadline:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        body.is_gone = True
                        return
                    pieces.append(message.get("body", b""))
                    self._charge(body, len(pieces[-1]))
                    if body.num_bytes > limit:
                        raise body_too_long(body.num_bytes, limit)
                    if not message.get("more_body", False):
                        break
                    deadline.reschedule(begun_s + self._time_for(body.num_bytes))
        except TimeoutError:
            config = self._config
            raise body_too_slow(config.body_timeout_s, config.min_body_rate) from None
        body.data = b"".join(pieces)

    def _time_for(self, num_bytes: int) -> float:
        """Return the seconds after which a body must have more than ``num_bytes`` bytes."""
        config = self._config
        time_at_rate_s = config.header_timeout_s + num_bytes / config.min_body_rate
        return min(config.body_timeout_s, time_at_rate_s)

    def _charge(self, body: "_Body", num_bytes: int) -> None:
        """Count the bytes of a tenant's unfinished requests.

        Raises:
            ApiError: There are too many (429).
        """
        body.num_bytes += num_bytes
        self._unfinished_bytes[body.tenant] += num_bytes
        limit = self._config.max_tenant_body_bytes
        if self._unfinished_bytes[body.tenant] > limit:
            raise ApiError(
                429,
                f"the bodies of this key's unfinished requests have more than {limit} bytes: wait "
                "until some of them have ended, or raise --max-tenant-body-bytes",
                kind="rate_limit_error",
                code="too_many_bytes",
                headers={"Retry-After": "1"},
            )

    def _release(self, body: "_Body") -> None:
        self._unfinished_bytes[body.tenant] -= body.num_bytes
        if not self._unfinished_bytes[body.tenant]:
            del self._unfinished_bytes[body.tenant]

    def _check(self, body: bytes) -> None:
        """Refuse a body that no parser should see.

        Raises:
            ApiError: It is not UTF-8, nested too deeply, or has too many values or objects (400).
        """
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise ApiError(
                400,
                f"the body is not UTF-8: {error.reason} at byte {error.start}",
                code="invalid_utf8",
            ) from error
        depth, num_items, num_objects = _shape(body)
        if depth > self._config.max_json_depth:
            raise ApiError(
                400,
                f"the body nests more than {self._config.max_json_depth} brackets: flatten it",
                code="too_deep",
            )
        if num_items > self._max_items:
            raise ApiError(
                400,
                f"the body has {num_items} values, and more than {self._max_items} are more than "
                "this model could hold: send less, or raise --max-json-items",
                code="too_many_values",
            )
        if num_objects > self._config.max_json_objects:
            raise ApiError(
                400,
                f"the body has {num_objects} objects, such as messages and their parts: at most "
                f"{self._config.max_json_objects} are validated; join texts, or raise "
                "--max-json-objects",
                code="too_many_values",
            )


@dataclass(slots=True)
class _Body:
    """One body, until its request has finished."""

    tenant: str = ""
    data: bytes = b""
    num_bytes: int = 0
    is_gone: bool = False


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that replays a body already read, then continues."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def _shape(body: bytes) -> tuple[int, int, int]:
    """Return the nesting depth of a body, and its numbers of values and objects.

    Cost: a few passes over the bytes, none of them in Python.
    """
    marks = np.frombuffer(_ESCAPE.sub(b"", body) if b"\\" in body else body, dtype=np.uint8)
    in_string = np.bitwise_xor.accumulate(marks == ord('"'))
    marks = marks[~in_string]
    steps = _STEPS[marks]
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    num_commas, num_objects = np.count_nonzero(marks == 0x2C), np.count_nonzero(marks == 0x7B)
    return depth, int(num_commas) + 1, int(num_objects)  # "," and "{"


class HostGuard:
    """Accepts only requests that address this machine by one of its own names.

    Without keys, being on this machine is the only proof of identity, and a browser on this machine
    runs foreign pages. Such a page can send requests to loopback under its own name (DNS
    rebinding), visible in the ``Host`` header; or across sites, visible in ``Origin``. Both are
    refused. With keys, the key is the proof.

    Source: Jackson et al., Protecting Browsers from DNS Rebinding Attacks (CCS 2007).
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str] = ()) -> None:
        """Wrap an application without keys; pages of allowed origins may call it."""
        self._app = app
        self._allowed = frozenset(allowed_origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            for name, prefix in ((b"host", "//"), (b"origin", "")):
                value = headers.get(name, b"").decode("latin-1")
                is_allowed = name == b"origin" and not self._allowed.isdisjoint((value, "*"))
                if value and not is_allowed and not is_loopback_address(prefix + value):
                    error = foreign_host(name.decode().capitalize(), value)
                    return response_of(scope["path"], error)(scope, receive, send)
        return self._app(scope, receive, send)

"""What every request passes: guards before it is parsed, and its fields that are not obeyed.

The guards refuse requests of foreign web pages to a server without keys; and bodies that are sent
without a valid key, too long, too slow, nested too deeply, not UTF-8, or with more values than the
model could hold. A parser would spend memory, stack or time in proportion to such a body.

A response names unknown fields, and tools that are left out of the prompt, in the header
``x-ostinato-ignored-fields``; ``/metrics`` counts them. The header ``x-ostinato-set-aside`` names
the rules by which texts of the prompt were replaced by constants, and ``x-ostinato-ledger`` counts
the earlier answers that stand in the prompt as they were written.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.engine.ledger.continuation import TurnReport
from ostinato.protocol import conversation
from ostinato.protocol.dialects import ApiBody, unused_fields
from ostinato.protocol.volatile import Settled
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
            caller = self._callers.identify(Headers(scope=scope))
            body.tenant, scope.setdefault("state", {})["caller"] = caller.tenant, caller
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


HEADERS = {
    "ignored_fields": "x-ostinato-ignored-fields",
    "set_aside": "x-ostinato-set-aside",
    "ledger": "x-ostinato-ledger",
}
"""Headers by the attribute of the request's state that has their parts."""

_MAX_NAME_CHARS = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def accept_fields(request: Request, state: ServerState, body: ApiBody) -> None:
    """Decide about the fields of a body that are not obeyed; the response will name those ignored.

    Raises:
        ApiError: A field would change the answer, or ``strict_fields`` is set and one is unknown.
    """
    left_out = body.left_out()
    unknown, refused = unused_fields(body, left_out)
    for place, instead in refused:
        raise ApiError(
            400,
            f"{_shown(place)}: not supported, and leaving it out would change the answer: "
            f"{instead}",
            param=_shown(place),
            code="unsupported_parameter",
        )
    if unknown and state.config.strict_fields:
        place = _shown(unknown[0])
        raise ApiError(
            400,
            f"{place}: unknown parameter; this server does not know it, and refuses such fields "
            "because it runs with --strict-fields",
            param=place,
            code="unknown_parameter",
        )
    ignored = [*map(_shown, unknown), *left_out]
    if ignored:
        request.app.state.metrics.ignored_fields(body.dialect.path, len(ignored))
        request.state.ignored_fields = ignored


def show_report(request: Request, report: TurnReport | None) -> None:
    """Have the response tell what the ledger of turns did to the prompt; zeros are left out."""
    if report is not None:
        counts = {
            "turns": report.num_turns,
            "restored": report.num_restored,
            "restored-tokens": report.num_restored_tokens,
            "restored-reasoning": report.num_reasoning,
            "listed-calls": report.num_listed,
            "dropped-reasoning": len(report.dropped),
            "unequal": report.num_unequal,
            "seals": report.num_seals,
            "ignored-seals": report.num_ignored_seals,
        }
        request.state.ledger = [f"{name}={count}" for name, count in counts.items() if count]


async def set_aside(
    request: Request, state: ServerState, salt: str, messages: Sequence[conversation.Message]
) -> Settled:
    """Replace what rules name in a conversation; the response will name the rules.

    Args:
        request: The request.
        state: Server state.
        salt: Of the tenant with whose turn the work is done.
        messages: For chat templates.
    """
    stabiliser = state.stabiliser
    if stabiliser.roles.isdisjoint([message["role"] for message in messages]):
        return Settled([*messages])  # no rule reads any of them
    settled = await state.llm.tokenizing.run(lambda: stabiliser.settle(messages), salt)
    request.app.state.metrics.set_aside(settled.counts, settled.late)
    request.state.set_aside = list(settled.counts)
    return settled


def _shown(place: str) -> str:
    """Return a place as it may stand in a header; an empty one would leave a space at its end."""
    return _UNSAFE.sub("?", place[:_MAX_NAME_CHARS]) or "?"


class DialectRoute(APIRoute):
    """A route whose responses name the fields that were ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which then adds the header."""
        handle = super().get_route_handler()

        async def handle_and_name(request: Request) -> Response:
            response = await handle(request)
            for name, header in HEADERS.items():
                if places := getattr(request.state, name, ()):
                    response.headers[header] = ", ".join(places)
            return response

        return handle_and_name

"""Output that is computed and that its client has not taken.

A stream runs as fast as the engine computes, however fast its client reads, so that its place in
the engine is free when the last token is computed. What the client leaves unread is counted; a
client that leaves more than its limit loses its connection, and its requests are cancelled::

    engine ─► events ─► connection            while the client reads
                 └────► backlog ─► connection once the connection holds 64 KiB
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Scope

logger = logging.getLogger("ostinato")

_PIECE_BYTES = 65536
"""Bytes of a backlog that are sent at once."""

CONNECTION = "ostinato.connection"
"""The extension of a request's scope by which streams see their connection."""


class StreamConnection(Protocol):
    """What a stream needs to know of its connection."""

    @property
    def is_congested(self) -> bool:
        """Whether the client has not taken what was written."""

    def abort(self) -> None:
        """Close it without a response."""


class UnreadOutput:
    """Unread bytes of all tenants."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        """Start without any; the limits are those of one connection and of one tenant."""
        self._max_bytes, self._max_tenant_bytes = max_bytes, max_tenant_bytes
        self._num_bytes: Counter[str] = Counter()

    def add(self, tenant: str, num_bytes: int, num_own_bytes: int) -> bool:
        """Count bytes of a connection that has ``num_own_bytes``; return whether there is room."""
        self._num_bytes[tenant] += num_bytes
        return (
            num_own_bytes <= self._max_bytes and self._num_bytes[tenant] <= self._max_tenant_bytes
        )

    def remove(self, tenant: str, num_bytes: int) -> None:
        """Count bytes no longer."""
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]


class Backlog:
    """The bytes of one stream that its connection has no room for."""

    def __init__(
        self,
        scope: Scope,
        send: Callable[[bytes], Awaitable[None]],
        unread: UnreadOutput,
        tenant_of: Callable[[], str],
    ) -> None:
        """Start empty; the tenant is looked up when the first byte waits."""
        self._connection: StreamConnection | None = scope.get("extensions", {}).get(CONNECTION)
        self._send, self._unread, self._tenant_of = send, unread, tenant_of
        self._tenant = ""
        self._waiting = bytearray()
        self._sending: asyncio.Task[None] | None = None

    async def put(self, data: bytes) -> None:
        """Send bytes, or keep them until the client reads on.

        Effects: the connection is closed if too much waits.
        """
        connection = self._connection
        if connection is None or not (self._waiting or connection.is_congested):
            await self._send(data)
            return
        if self._sending is None:
            self._tenant = self._tenant_of()
            self._sending = asyncio.create_task(self._send_waiting())
        elif self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting())
        self._waiting += data
        if not self._unread.add(self._tenant, len(data), len(self._waiting)):
            logger.info(
                "a connection was closed: its client left %d bytes unread", len(self._waiting)
            )
            connection.abort()

    async def drain(self) -> None:
        """Wait until all bytes are sent."""
        if self._sending is not None:
            await self._sending

    async def close(self) -> None:
        """Drop what waits."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
            self._unread.remove(self._tenant, len(self._waiting))
            self._waiting.clear()

    async def _send_waiting(self) -> None:
        while self._waiting:
            piece = bytes(self._waiting[:_PIECE_BYTES])
            await self._send(piece)
            del self._waiting[: len(piece)]
            self._unread.remove(self._tenant, len(piece))

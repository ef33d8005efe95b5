"""Limits and closes connections.

Opening a connection without completing a request costs a client nothing, and the server a file
descriptor. So a request's head has to arrive within ``header_timeout_s`` (its body within
``body_timeout_s``, see ``guards``), and where one address, or all together, have as many
connections as allowed, the oldest one without a complete request is closed in favour of the new
one::

    connect ─► waiting ──request head──► serving ──response──► waiting (keep-alive)
                  └── too slow, or the oldest of too many: closed
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ostinato.server.config import ServerConfig

_RESERVED_FILES = 128
"""File descriptors reserved for everything but connections."""

_MOST_FILES = 65536


class Connections:
    """All open connections of one server.

    Attributes:
        most_per_address: Maximum number of connections of one address.
        most: Maximum number of connections.
        header_timeout_s: Time limit for a request's head, from connecting or its first byte.
    """

    def __init__(self, config: ServerConfig, most: int) -> None:
        """Start without connections; file descriptors may lower ``most``."""
        self.most_per_address = config.max_connections_per_address
        self.most = min(config.max_connections, most)
        self.header_timeout_s = config.header_timeout_s
        self._waiting: dict[GuardedProtocol, None] = {}  # in order of waiting time, longest first
        self._open: Counter[str] = Counter()

    def protocol(self, **settings: Any) -> "GuardedProtocol":
        """Create the protocol of a new connection, for uvicorn."""
        return GuardedProtocol(self, **settings)

    def enter(self, connection: "GuardedProtocol") -> bool:
        """Register a new connection; return False if there is no room for it."""
        address = connection.address
        if self._open[address] >= self.most_per_address and not self._close_oldest(address):
            return False
        if self._open.total() >= self.most and not self._close_oldest(None):
            return False
        self._open[address] += 1
        self._waiting[connection] = None
        return True

    def leave(self, connection: "GuardedProtocol") -> None:
        """Remove a closed connection."""
        self._waiting.pop(connection, None)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]

    def note_request(self, connection: "GuardedProtocol") -> None:
        """Note that a request's head has arrived."""
        self._waiting.pop(connection, None)

    def note_idle(self, connection: "GuardedProtocol") -> None:
        """Note that a connection waits for its next request."""
        self._waiting[connection] = None

    def _close_oldest(self, address: str | None) -> bool:
        """Close the connection that has waited longest, of one address or of all."""
        for connection in self._waiting:
            if address is None or connection.address == address:
                connection.abort()
                return True
        return False


class GuardedProtocol(H11Protocol):
    """An HTTP/1.1 connection with a time limit for each request's head."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        """Create the protocol; the connection is not open yet."""
        super().__init__(**settings)
        self.address = ""
        self._connections = connections
        self._is_registered = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or close it at once."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._is_registered = self._connections.enter(self)
        if self._is_registered:
            self._await_head()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes, and start or stop the timer of the request's head."""
        super().data_received(data)
        if self._is_serving:
            self._end_wait()
            self._connections.note_request(self)
        elif self._deadline is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless a pipelined one is being served already."""
        super().on_response_complete()
        if self._is_registered and not self._is_serving:
            self._connections.note_idle(self)

    def abort(self) -> None:
        """Close the connection without a response."""
        self._leave()
        self.transport.abort()

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _leave(self) -> None:
        """Stop the timer, and count the connection no longer."""
        self._end_wait()
        if self._is_registered:
            self._is_registered = False
            self._connections.leave(self)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self._connections.header_timeout_s, self.abort)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def raise_file_limit() -> int:
    """Raise the limit of open files to its maximum; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = _MOST_FILES
    return max(1, soft - _RESERVED_FILES)


class LogLimit(logging.Filter):
    """Logs each message at most ten times a minute, so that clients cannot fill the disk."""

    MOST_PER_MINUTE = 10

    def __init__(self) -> None:
        """Start with nothing logged."""
        super().__init__()
        self._minute = 0
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; messages that differ only in values count as one."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        message = str(record.msg)[:200]
        self._counts[message] += 1
        if self._counts[message] == self.MOST_PER_MINUTE:
            record.msg = f"{record.msg} (this message is suppressed for the rest of the minute)"
        return self._counts[message] <= self.MOST_PER_MINUTE

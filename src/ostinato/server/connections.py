"""Limits and closes connections.

Opening a connection and never completing a request costs a client nothing and the server a file
descriptor. So a request's head has to arrive within ``header_timeout_s`` (its body within
``body_timeout_s``, see ``body_guard``), and where an address has as many connections as it may
have, or all addresses together, the oldest one without a complete request is closed in favour of
the new one::

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
"""Descriptors for everything that is not a connection."""

_MOST_FILES = 65536


class Connections:
    """Every open connection of one server.

    Attributes:
        most_per_address: Connections that one address may have.
        most: Connections of all addresses.
        header_timeout_s: Time for a request's head, from its connection or its first byte on.
    """

    def __init__(self, config: ServerConfig, most: int) -> None:
        """Begin without a connection; ``most`` is what the descriptors allow."""
        self.most_per_address = config.max_connections_per_address
        self.most = min(config.max_connections, most)
        self.header_timeout_s = config.header_timeout_s
        self._waiting: dict[GuardedProtocol, None] = {}  # in the order in which they began to
        self._open: Counter[str] = Counter()

    def protocol(self, **settings: Any) -> "GuardedProtocol":
        """Make the protocol of a new connection, as uvicorn asks for it."""
        return GuardedProtocol(self, **settings)

    def enter(self, connection: "GuardedProtocol") -> bool:
        """Let a new connection wait for its request; returns False if there is no room for it."""
        address = connection.address
        if self._open[address] >= self.most_per_address and not self._close_oldest(address):
            return False
        if self._open.total() >= self.most and not self._close_oldest(None):
            return False
        self._open[address] += 1
        self._waiting[connection] = None
        return True

    def leave(self, connection: "GuardedProtocol") -> None:
        """Forget a connection that is closed."""
        self._waiting.pop(connection, None)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]

    def serves(self, connection: "GuardedProtocol") -> None:
        """Note that a request's head has arrived."""
        self._waiting.pop(connection, None)

    def waits(self, connection: "GuardedProtocol") -> None:
        """Note that a connection waits for its next request."""
        self._waiting[connection] = None

    def _close_oldest(self, address: str | None) -> bool:
        """Close the connection that waits longest, of one address or of all."""
        for connection in self._waiting:
            if address is None or connection.address == address:
                connection.give_up()
                return True
        return False


class GuardedProtocol(H11Protocol):
    """An HTTP/1.1 connection whose client has to say what it wants in time."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        """Make the protocol of a connection that is not open yet."""
        super().__init__(**settings)
        self.address = ""
        self._book = connections
        self._is_in_book = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it at once."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._is_in_book = self._book.enter(self)
        if self._is_in_book:
            self._await_head()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._end_wait()
        if self._is_in_book:
            self._is_in_book = False
            self._book.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a request's head have to be complete in time."""
        super().data_received(data)
        if self._is_serving:
            self._end_wait()
            self._book.serves(self)
        elif self._deadline is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """Wait for the next request; one that was sent ahead is being served already."""
        super().on_response_complete()
        if self._is_in_book and not self._is_serving:
            self._book.waits(self)

    def give_up(self) -> None:
        """Close the connection without an answer."""
        self._end_wait()
        if self._is_in_book:
            self._is_in_book = False
            self._book.leave(self)
        self.transport.abort()

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self._book.header_timeout_s, self.give_up)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = _MOST_FILES
    return max(1, soft - _RESERVED_FILES)


class LogLimit(logging.Filter):
    """Lets each message of a logger through ten times a minute: clients must not fill the disk."""

    MOST_PER_MINUTE = 10

    def __init__(self) -> None:
        """Begin with nothing logged."""
        super().__init__()
        self._minute = 0
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is logged; messages that differ in their values are one message."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        message = str(record.msg)[:200]
        self._counts[message] += 1
        if self._counts[message] == self.MOST_PER_MINUTE:
            record.msg = f"{record.msg} (the same message is left out for the rest of the minute)"
        return self._counts[message] <= self.MOST_PER_MINUTE

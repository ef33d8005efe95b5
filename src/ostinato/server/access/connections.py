"""Limits and closes connections.

Opening a connection without completing a request costs a client nothing, and the server a file
descriptor. So a request's head has to arrive within ``header_timeout_s`` (its body within
``body_timeout_s``, see ``middleware``), both in pieces of a reasonable size, and where one address,
or all together, have as many connections as allowed, the oldest one without a complete request is
closed in favour of the new one::

    connect ─► waiting ──request head──► serving ──response──► waiting (keep-alive)
                  │                         │           └── part of the body is left: lingering
                  │                         └── client takes no output: closed
                  └── too slow, or the oldest of too many: closed

A lingering connection has been answered, and its client is still sending. What it sends is dropped
without being parsed: closing at once would reset the connection, and with it the response.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostinato.server.access.unread_output import CONNECTION
from ostinato.server.config import ListenerConfig
from ostinato.server.errors import ApiError, body_in_pieces, response_of

_FREE_PIECES, _MIN_PIECE_BYTES = 1024, 256
"""Pieces of a body that may be of any size, and the average size of further ones."""


class BodyInPieces(Exception):
    """A body came in too many pieces: each costs the event loop as much as a large one."""


class CountedParser(h11.Connection):
    """Parses HTTP/1.1, and counts the pieces of each request's body."""

    num_pieces = num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            BodyInPieces: A body came in too many.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_pieces = self.num_bytes = 0
        elif isinstance(event, h11.Data):
            self.num_pieces += 1
            self.num_bytes += len(event.data)
            if self.num_pieces > _FREE_PIECES + self.num_bytes // _MIN_PIECE_BYTES:
                raise BodyInPieces
        return event


class LingeringTransport:
    """A transport whose ``close`` asks the protocol how."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        """Wrap a transport."""
        self._transport = transport
        self.close, self.write = close, transport.write
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.is_lingering = False

    def is_closing(self) -> bool:
        """Whether nothing more is written."""
        return self.is_lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_RESERVED_FILES = 128
"""File descriptors reserved for everything but connections."""

_MAX_FILES, _OPEN_MAX = 65536, 10_240

_MAX_HEAD_READS = 1024
"""Reads in which a request's head must arrive; a head has at most 16 KiB."""

_LINGER_S, _LINGER_BYTES = 2.0, 8 * 2**20
"""How long, and how much, an answered client may go on sending."""

_MIN_SENT_BYTES = 16384
"""Bytes that a client must take in ``send_timeout_s``, where as many wait."""


class Connection(Protocol):
    """A client's connection."""

    address: str

    def abort(self) -> None:
        """Close it without a response."""


class Connections:
    """All open connections of one server.

    Attributes:
        max_per_address: Maximum number of connections of one address.
        limit: Maximum number of connections.
        header_timeout_s: Time limit for a request's head, from connecting or its first byte.
        send_timeout_s: Time limit for a client to take a part of its response.
    """

    def __init__(self, config: ListenerConfig, limit: int, send_timeout_s: float) -> None:
        """Start without connections; file descriptors may lower ``limit``."""
        self.max_per_address = config.max_connections_per_address
        self.limit = min(config.max_connections, limit)
        self.header_timeout_s, self.send_timeout_s = config.header_timeout_s, send_timeout_s
        self._waiting: dict[Connection, None] = {}  # in order of waiting time, longest first
        self._open: Counter[str] = Counter()

    def protocol(self, **settings: Any) -> "GuardedProtocol":
        """Create the protocol of a new connection, for uvicorn."""
        return GuardedProtocol(self, **settings)

    def enter(self, connection: Connection) -> bool:
        """Register a new connection; return False if there is no room for it."""
        address = connection.address
        if self._open[address] >= self.max_per_address and not self._close_oldest(address):
            return False
        if self._open.total() >= self.limit and not self._close_oldest(None):
            return False
        self._open[address] += 1
        self._waiting[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._waiting.pop(connection, None)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]

    def note_request(self, connection: Connection) -> None:
        """Note that a request's head has arrived."""
        self._waiting.pop(connection, None)

    def note_idle(self, connection: Connection) -> None:
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
    """An HTTP/1.1 connection with time limits for requests' heads and for taking responses."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        """Create the protocol; the connection is not open yet."""
        super().__init__(**settings)
        self.conn = self._parser = CountedParser(h11.SERVER)
        self.address = ""
        self._connections = connections
        self._is_registered = False
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._num_reads = 0  # of the current head, or bytes while it lingers
        self._served: Any = None  # the scope of the last request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or close it at once."""
        self._lingering = LingeringTransport(transport, partial(self._close, transport))
        super().connection_made(self._lingering)  # type: ignore[arg-type]
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
        if self._lingering.is_lingering:
            self._num_reads += len(data)
            if self._num_reads > _LINGER_BYTES:
                self.abort()
            return
        super().data_received(data)
        if self._is_serving:
            return
        self._num_reads += 1
        if self._num_reads > _MAX_HEAD_READS:
            self.abort()
        elif self._deadline is None:
            self._await_head()

    def handle_events(self) -> None:
        """Start the requests that have arrived; refuse a body in too many pieces."""
        try:
            super().handle_events()
        except BodyInPieces:
            self._refuse(body_in_pieces(self._parser.num_pieces, self._parser.num_bytes))
        if self.scope is not self._served and self._is_serving:  # a head has arrived
            self._served = self.scope
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[CONNECTION] = self
            self._end_wait()
            self._connections.note_request(self)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless a pipelined one is being served already."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()
        if self._is_registered and not self._is_serving:
            self._connections.note_idle(self)
        self._await_reader()

    def pause_writing(self) -> None:
        """Start the timer of a client that does not take what was written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop it, unless the rest is all that is left."""
        super().resume_writing()
        self._stop_send_timer()
        if not self._is_serving:
            self._await_reader()

    @property
    def is_congested(self) -> bool:
        """Whether the client has not taken what was written."""
        return self.flow.write_paused and not self.cycle.disconnected

    def abort(self) -> None:
        """Close the connection without a response."""
        self._leave()
        self.transport.abort()

    def _close(self, transport: asyncio.Transport) -> None:
        """Close the connection once its client has the response."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.SEND_BODY:
            transport.close()
            self._await_reader()
            return
        self._lingering.is_lingering, self._num_reads = True, 0
        self.flow.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._end_wait()
        self._deadline = self.loop.call_later(_LINGER_S, self.abort)

    def _refuse(self, error: ApiError) -> None:
        """Answer a request in place of the application, and close the connection."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if not self.cycle.response_started:
            response = response_of(self.scope["path"], error)
            headers = [*response.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_reader(self) -> None:
        """Close the connection unless its client takes a part of what waits in time."""
        self._stop_send_timer()
        num_bytes = self.transport.get_write_buffer_size()
        if not num_bytes:
            return

        def check() -> None:
            num_left = self.transport.get_write_buffer_size()
            if num_left and num_bytes - num_left < _MIN_SENT_BYTES:
                self.abort()
                return
            self._await_reader()

        self._send_deadline = self.loop.call_later(self._connections.send_timeout_s, check)

    def _stop_send_timer(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _leave(self) -> None:
        """Stop the timer, and count the connection no longer."""
        self._end_wait()
        self._stop_send_timer()
        if self._is_registered:
            self._is_registered = False
            self._connections.leave(self)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self._connections.header_timeout_s, self.abort)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._num_reads = 0


def raise_file_limit() -> int:
    """Raise the limit of open files to its maximum; return how many connections fit.

    macOS names no maximum and refuses more than its kernel's, of which ``OPEN_MAX`` is the default.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    for value in (limit, min(limit, _OPEN_MAX)):
        if soft != resource.RLIM_INFINITY and soft < value:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (value, hard))
                soft = value
    if soft == resource.RLIM_INFINITY:
        soft = _MAX_FILES
    return max(1, soft - _RESERVED_FILES)


class LogLimit(logging.Filter):
    """Logs each message at most ten times a minute, so that clients cannot fill the disk."""

    MAX_PER_MINUTE = 10

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
        if self._counts[message] == self.MAX_PER_MINUTE:
            record.msg = f"{record.msg} (this message is suppressed for the rest of the minute)"
        return self._counts[message] <= self.MAX_PER_MINUTE

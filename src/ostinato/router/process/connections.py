"""Clients' connections: limits, and a time limit for each request's head.

``ostinato.server.access.connections`` has the rules; here they are applied to aiohttp's protocol.
"""

import asyncio
import socket
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from ostinato.server.access.connections import Connections

KEEP_ALIVE_S = 75.0
"""Time limit from a response to the next request, and for a client to read a short response."""

_LISTEN_QUEUE = 2048
_MAX_ACCEPTS = 64
"""Connections accepted at once, before those of too many are closed: asyncio pauses for a second
when it runs out of file descriptors."""


class GuardedConnection(asyncio.Protocol):
    """Passes a connection on to aiohttp, unless there are too many or a head is too slow."""

    def __init__(self, connections: Connections, handler: web.RequestHandler) -> None:
        """Create the protocol; the connection is not open yet."""
        self.address = ""
        self._connections = connections
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._is_serving = False
        self._is_head_begun = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or close it at once."""
        transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._connections.enter(self):
            transport.abort()
            return
        self._transport = transport
        self._handler.connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        if self._transport is not None:
            self._leave()
        if self._handler.transport is not None:
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the first ones after a response begin the next head."""
        self._handler.data_received(data)
        if not self._is_serving and not self._is_head_begun:
            self._begin_head()

    def eof_received(self) -> None:
        """Pass on the end of the client's bytes."""
        self._handler.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads too slowly."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client reads again."""
        self._handler.resume_writing()

    def note_request(self) -> None:
        """Note that a request's head has arrived."""
        self._is_serving, self._is_head_begun = True, False
        self._connections.note_request(self)
        self._limit(None)

    def note_idle(self) -> None:
        """Note that a request was handled."""
        self._is_serving = False
        if self._transport is not None:
            self._connections.note_idle(self)
            self._limit(KEEP_ALIVE_S)

    def abort(self) -> None:
        """Close the connection without a response."""
        transport = self._transport
        if transport is not None:
            self._leave()
            transport.abort()

    def _begin_head(self) -> None:
        self._is_head_begun = True
        self._limit(self._connections.header_timeout_s)

    def _limit(self, timeout_s: float | None) -> None:
        """Close the connection after a time, in place of an earlier limit."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = None if timeout_s is None else loop.call_later(timeout_s, self.abort)

    def _leave(self) -> None:
        self._limit(None)
        self._transport = None
        self._connections.leave(self)


class GuardedSite(web.TCPSite):
    """Listens on an address, with limits for its connections."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, connections: Connections
    ) -> None:
        """Create a site that does not listen yet."""
        super().__init__(runner, host, port)
        self._address = host, port
        self._connections = connections

    async def start(self) -> None:
        """Start to accept connections."""
        await web.BaseSite.start(self)
        make_handler, connections = self._runner.server, self._connections
        assert make_handler is not None, "the runner is set up"
        server = await asyncio.get_running_loop().create_server(
            lambda: GuardedConnection(connections, make_handler()),
            *self._address,
            backlog=_MAX_ACCEPTS,
        )
        self._server = server
        for each in server.sockets:
            with socket.fromfd(each.fileno(), each.family, each.type) as listener:
                listener.listen(_LISTEN_QUEUE)


@web.middleware
async def note_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell a request's connection when its head has arrived, and when it was handled."""
    transport = request.transport
    connection = None if transport is None else transport.get_protocol()
    if not isinstance(connection, GuardedConnection):
        return await handler(request)
    connection.note_request()
    try:
        return await handler(request)
    finally:
        connection.note_idle()

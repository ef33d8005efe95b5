"""The parser and the transport of a connection: one counts, the other closes in good order."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11

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
        self.is_lingering = False

    def is_closing(self) -> bool:
        """Whether nothing more is written."""
        return self.is_lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""Reads usage and ids from responses as they pass."""

import re

_MAX_BYTES = 4096
_NUMBER = re.compile(rb'"id"\s*:\s*"([a-z]{3,8}[-_][\w-]{1,80})"')  # resp_1, rerank-2
_GENERATED = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})')


class UsageSniffer:
    """Reads a response without delaying it; keeps at most 8 KiB of it.

    Attributes:
        status: HTTP status; 0 before the response.
    """

    def __init__(self) -> None:
        self.status = 0
        self._num_events = 0
        self._head = b""
        self._tail = b""

    def see(self, piece: bytes) -> None:
        """Look at the next bytes."""
        self._num_events += piece.count(b"data:")
        if len(self._head) < _MAX_BYTES:
            self._head = (self._head + piece)[:_MAX_BYTES]
        self._tail = (self._tail + piece)[-_MAX_BYTES:] if len(piece) < _MAX_BYTES else piece

    @property
    def number(self) -> str:
        """Id of the response; empty without one."""
        match = _NUMBER.search(self._head)
        return match[1].decode() if match else ""

    @property
    def generated_tokens(self) -> int:
        """Generated tokens; of a stream without usage, its events, about one token each."""
        last = _GENERATED.findall(self._tail[-_MAX_BYTES:])
        return int(last[-1]) if last else self._num_events

    @property
    def cached_tokens(self) -> int | None:
        """Cached prompt tokens; None if the response does not say."""
        last = _CACHED.findall(self._tail[-_MAX_BYTES:]) or _CACHED.findall(self._head)
        return int(last[-1]) if last else None

"""Writes a trace in a thread of its own, so that the engine does not wait for the disk.

That thread also hashes the tokens; the engine's thread only queues events. A failed write ends the
recording and is logged once::

    engine thread                      writer thread
    put(make a line) ──► queue ──────► line ──► file
          ▲                              │
          └────────── failed ◄───────────┘     disk full, file gone, a line that cannot be made
"""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from ostinato.core.errors import ConfigError
from ostinato.traces.format import AnyEvent, TraceHeader, write_line

logger = logging.getLogger("ostinato")

MAX_PENDING_LINES = 100_000
"""Lines that may wait for the disk; more end the trace, as gaps would make it useless."""

Line = Callable[[], TraceHeader | AnyEvent]
"""Makes a line; called in the writer's thread, in the order of ``put``."""


class TraceWriter:
    """A file that grows by a line per event."""

    def __init__(self, path: Path) -> None:
        """Create the file; raises ``ConfigError`` if it exists or cannot be made."""
        self.path = path
        try:
            if path.is_file():
                raise FileExistsError("it exists already, and a trace never overwrites a file")
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"record_trace={str(path)!r}: {error.strerror or error}: choose another path"
            ) from error
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="ostinato-trace", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether writing has ended because of an error, which was logged."""
        return self._failed.is_set()

    def put(self, line: Line) -> None:
        """Queue a line to be written."""
        if self._lines.qsize() >= MAX_PENDING_LINES:
            self.give_up(f"the disk is {MAX_PENDING_LINES:,} lines behind")
        if not self.failed:
            self._lines.put(line)

    def give_up(self, reason: str) -> None:
        """End the recording; the lines so far stay."""
        if not self.failed:
            self._failed.set()
            logger.error("the recording to %s ends: %s; the engine continues", self.path, reason)

    def close(self) -> None:
        """Write pending lines and close the file; a second call does nothing."""
        self._lines.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        """The writer's thread."""
        try:
            with self._file:
                while (line := self._lines.get()) is not None:
                    if not self.failed:
                        self._file.write(write_line(line()))
                        if self._lines.empty():
                            self._file.flush()
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

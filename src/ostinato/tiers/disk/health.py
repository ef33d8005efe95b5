"""Whether a disk tier is on, read-only after a failed write, or off."""

import logging
import time

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""How long a tier stays read-only after a failed write."""
MAX_READ_ERRORS = 3
"""Consecutive failed reads that turn a tier off, unless all are of one segment among others."""


class DiskHealth:
    """The health of a medium, by the results of its reads and writes.

    Attributes:
        state: ``on``, ``read-only`` or ``off``.
        reason: Why it is not on.
    """

    def __init__(self, setting: str) -> None:
        self.state, self.reason = "on", ""
        self._setting = setting
        self._retry_at = 0.0
        self._read_errors = 0
        self._unreadable = set[str]()  # segments of these

    def may_write(self) -> bool:
        """Whether to try a write."""
        is_retry = self.state == "read-only" and time.monotonic() >= self._retry_at
        return is_retry or self.state == "on"

    def write_failed(self, error: OSError) -> None:
        """Become read-only until the next retry."""
        self._retry_at = time.monotonic() + RETRY_S
        self.reason = error.strerror or str(error)
        if self.state == "on":
            logger.warning(
                "%s is read-only: %s; serving continues, and stores are retried every %d seconds",
                self._setting, self.reason, RETRY_S,
            )  # fmt: skip
            self.state = "read-only"

    def write_succeeded(self) -> None:
        """Be on again."""
        if self.state == "read-only":
            logger.info("%s accepts writes again", self._setting)
            self.state, self.reason = "on", ""

    def read_failed(self, error: OSError, segment: str, num_segments: int) -> None:
        """Turn off after too many failed reads, of two segments or of the only one."""
        self._read_errors += 1
        self._unreadable.add(segment)
        is_everywhere = len(self._unreadable) >= min(2, num_segments)
        if self._read_errors >= MAX_READ_ERRORS and is_everywhere and self.state != "off":
            self.turn_off(error.strerror or str(error))
            logger.warning(
                "%s is off: %s; serving continues without it", self._setting, self.reason
            )

    def read_succeeded(self) -> None:
        """Reset the count of failed reads."""
        self._read_errors = 0
        self._unreadable.clear()

    def turn_off(self, reason: str) -> None:
        """Take no more reads or writes."""
        self.state, self.reason = "off", reason

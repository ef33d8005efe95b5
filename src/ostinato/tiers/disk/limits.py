"""Settings of a disk tier, and what it may write in a day."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from ostinato.core.errors import ConfigError

DAY_S = 86_400.0
FILE_BLOCK = 4096
"""File systems allocate files in blocks, mostly of this size."""

_MAX_SEGMENT_BYTES = 1 << 30
_MIN_SEGMENTS = 4
_NUM_SEGMENTS = 32


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Settings of a disk tier.

    Attributes:
        limit_bytes: Maximum size of all segments together.
        bytes_per_day: Maximum bytes written in a day, to spare the disk; 0 for no limit.
        sealed: Encrypt each tenant's records with a key of its own.
        secret: Mixed into the keys, at least 16 random bytes; empty uses a file in the folder.
        segment_bytes: Maximum size of a segment; 0 chooses a 32nd of the limit, at most 1 GiB.
    """

    limit_bytes: int
    bytes_per_day: int = 0
    sealed: bool = False
    secret: bytes = b""
    segment_bytes: int = 0

    @property
    def max_segment_bytes(self) -> int:
        """Size of a full segment."""
        num_bytes = self.segment_bytes or min(_MAX_SEGMENT_BYTES, self.limit_bytes // _NUM_SEGMENTS)
        return num_bytes // FILE_BLOCK * FILE_BLOCK

    def with_segments(self, min_bytes: int) -> "DiskOptions":
        """Return options whose segments have at least a size, in whole blocks of a file."""
        size = max(self.max_segment_bytes, allocated(min_bytes))
        return replace(self, segment_bytes=size)

    def check(self) -> None:
        """Raise ConfigError if the limit has no room for a few segments."""
        segment = self.max_segment_bytes
        if segment < FILE_BLOCK or self.limit_bytes < _MIN_SEGMENTS * segment:
            raise ConfigError(
                f"kv_disk_bytes={self.limit_bytes}: must hold {_MIN_SEGMENTS} segments of "
                f"{max(segment, FILE_BLOCK)} bytes: raise it, or leave kv_disk out"
            )


def allocated(size: int) -> int:
    """Return the bytes that a file system allocates for a file."""
    return -(-size // FILE_BLOCK) * FILE_BLOCK


class DailyBudget:
    """Bytes that may still be written; spent bytes become available again within a day."""

    def __init__(self, bytes_per_day: int, clock: Callable[[], float], spent: int = 0) -> None:
        self._limit, self._clock = bytes_per_day, clock
        self._left, self._at = float(bytes_per_day - spent), clock()

    def left(self) -> float:
        """Return how many bytes may be written now."""
        now = self._clock()
        earned = self._limit * max(0.0, now - self._at) / DAY_S
        self._left, self._at = min(float(self._limit), self._left + earned), now
        return self._left if self._limit else inf

    def allows(self, size: int) -> bool:
        """Whether this many bytes may be written now."""
        return size <= self.left()

    def spend(self, size: int) -> None:
        """Count bytes as written."""
        self._left -= size

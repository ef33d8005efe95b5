"""Shows how far the reading of weights is: a bar on a terminal, else a line now and then."""

import sys
import threading
import time

from tqdm import tqdm

SHOWN_BYTES = 2**28
"""Less is read in a moment, and nothing is shown."""

SECONDS_PER_LINE = 5.0


class LoadProgress:
    """Counts the bytes of weights that were read, by any thread."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """Begin to count up to a number of bytes."""
        self._name, self._total, self._read = name, num_bytes, 0
        self._lock = threading.Lock()
        self._start = self._last_line = time.monotonic()
        is_shown = num_bytes >= SHOWN_BYTES
        self._has_lines = is_shown and not sys.stderr.isatty()
        self._bar = tqdm(
            total=num_bytes,
            desc=f"Loading {name}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            disable=not is_shown or self._has_lines,
            leave=False,
        )

    def add(self, num_bytes: int) -> None:
        """Count bytes, and show them."""
        with self._lock:
            num_bytes = min(num_bytes, self._total - self._read)  # a tied embedding is read twice
            self._read += num_bytes
            self._bar.update(num_bytes)
            now = time.monotonic()
            if self._has_lines and now - self._last_line >= SECONDS_PER_LINE:
                self._last_line = now
                print(self.line(now - self._start), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """Return what was read after so long, the rate and the time left."""
        rate = self._read / max(seconds, 1e-9)
        left = (self._total - self._read) / max(rate, 1.0)
        return (
            f"loading {self._name}: {self._read / 2**30:.2f} of {self._total / 2**30:.2f} GiB, "
            f"{rate / 2**20:.0f} MiB/s, {left:.0f} s left"
        )

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

"""Calls to a server that may hang: a deadline for each, and a circuit breaker."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from ostinato.tiers.byte_store import StoreError

T = TypeVar("T")

MAX_FAILURES = 3
"""Consecutive failures that open the breaker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class CircuitBreaker:
    """Closed while a server answers; after failures open for a pause that doubles.

    After the pause one call is tried; it closes the breaker or opens it again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failures, self._pause, self._until = 0, FIRST_PAUSE_S, 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._failures >= MAX_FAILURES and self._clock() < self._until

    def allows(self) -> bool:
        """Whether a call may be made; after a pause only the first one."""
        with self._lock:
            if self._failures < MAX_FAILURES:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause
            return True

    def succeeded(self) -> None:
        """Close the breaker."""
        self._failures, self._pause = 0, FIRST_PAUSE_S

    def failed(self) -> bool:
        """Count a failure; returns whether this one opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < MAX_FAILURES:
                return False
            self._until = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
            return self._failures == MAX_FAILURES


class CallThreads:
    """Threads that make calls, so that every caller can have a deadline.

    Args:
        num_threads: Maximum concurrent calls.
        abort: Aborts the running calls, after one has timed out.
    """

    def __init__(self, num_threads: int, abort: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-remote")
        self._abort = abort

    def call(self, what: Callable[[], T], timeout_s: float) -> T:
        """Return the result of a call.

        Raises:
            TimeoutError: It took too long, and was aborted.
            StoreError: It failed, or the threads were closed.
        """
        try:
            future: Future[T] = self._threads.submit(what)
        except RuntimeError as error:
            raise StoreError("the tier is closed") from error
        try:
            return future.result(max(0.0, timeout_s))
        except CancelledError as error:
            raise StoreError("the tier is closed") from error
        except FutureTimeout as error:
            # The call itself may have raised a TimeoutError, or may have ended just now.
            if future.done() and future.exception() is error:
                raise StoreError("the server did not answer in time") from error
            future.cancel()
            self._abort()
            raise TimeoutError from error

    def close(self) -> None:
        """Start no more calls, and abort the running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._abort()

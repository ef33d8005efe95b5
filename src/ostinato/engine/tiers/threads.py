"""Daemon threads for calls of tiers: a call that hangs keeps no process from ending."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def fulfil(future: "Future[T]", work: Callable[[], T]) -> None:
    """Do the work of a future, unless that was cancelled; also an exit goes to who waits."""
    if future.set_running_or_notify_cancel():
        try:
            answer = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)


class TierThreads:
    """Threads that run calls in the order in which they come."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._pending = set[Future[Any]]()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{place}", daemon=True)
            for place in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *args: object) -> "Future[T]":
        """Queue a call; RuntimeError after ``close``."""
        if self._is_closed:
            raise RuntimeError("the threads of a tier are closed")
        future = Future[T]()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._calls.put(partial(fulfil, future, partial(call, *args)))
        return future

    def close(self, seconds: float) -> bool:
        """Cancel the calls that wait; returns whether the running ones ended in time."""
        self._is_closed, end_s = True, time.monotonic() + seconds
        for future in list(self._pending):
            future.cancel()
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
            del run  # and what it refers to

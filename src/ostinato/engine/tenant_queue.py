"""Threads that serve tenants in turns.

A queue holds each tenant at most once: a thread takes the first tenant, does one piece of its
work, and appends it again if there is more. So a tenant has one piece running at a time, and waits
for at most one piece of each other tenant, however much work those have queued.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

AnswerT = TypeVar("AnswerT")


class TenantQueue:
    """Runs work in its own threads, in turns by tenant."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        """Name the threads."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._guard = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    async def run(self, tenant: str, work: Callable[[], AnswerT]) -> AnswerT:
        """Do a piece of a tenant's work and return its answer; leaving early gives up its place."""
        future: Future[AnswerT] = Future()
        with self._guard:
            is_first = tenant not in self._waiting
            self._waiting.setdefault(tenant, deque()).append((future, work))
            if is_first:
                self._threads.submit(self._do_one, tenant)
        return await asyncio.wrap_future(future)

    def _do_one(self, tenant: str) -> None:
        future, work = self._waiting[tenant][0]
        if future.set_running_or_notify_cancel():
            try:
                answer = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(answer)
        with self._guard:
            queue = self._waiting[tenant]
            queue.popleft()
            if queue:
                self._threads.submit(self._do_one, tenant)
            else:
                del self._waiting[tenant]

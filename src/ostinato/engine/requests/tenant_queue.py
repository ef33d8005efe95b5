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

from ostinato.core.identity import tenant_of

AnswerT = TypeVar("AnswerT")


class TenantQueue:
    """Runs work in its own threads, in turns by tenant."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._guard = threading.Lock()
        self._waiting: dict[bytes, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    async def run(self, cache_salt: str, work: Callable[[], AnswerT]) -> AnswerT:
        """Run work for the tenant of a salt; a caller that is cancelled gives up its place."""
        tenant, future = tenant_of(cache_salt.encode()), Future[AnswerT]()
        with self._guard:
            is_first = tenant not in self._waiting
            self._waiting.setdefault(tenant, deque()).append((future, work))
            if is_first:
                self._threads.submit(self._do_one, tenant)
        return await asyncio.wrap_future(future)

    def _do_one(self, tenant: bytes) -> None:
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

"""Refuses calls from a second thread and from a forked process.

An ``LLM`` runs one call at a time, in the process that made it. Concurrent calls would corrupt the
cache; they are refused rather than queued, since a queue would silently lose the benefit of
batching.

A fork copies only the calling thread, and not the OpenMP threads of torch and the native library:
a forked child would wait for them forever.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ostinato.errors import ConcurrentCall, ForkedProcess

_SPAWN = "start workers with multiprocessing.get_context('spawn') and make the engine in the worker"


class ProcessGuard:
    """The process that made an engine."""

    def __init__(self) -> None:
        """Register a hook for processes that are forked from this one.

        Raises:
            ForkedProcess: This one was forked from one whose engine used several threads.
        """
        if _inherited_threads > 1 and torch.get_num_threads() > 1:
            raise ForkedProcess(
                f"process {os.getpid()} was forked from one where torch computes with "
                f"{_inherited_threads} threads, which it would wait for forever: {_SPAWN}; or call "
                "torch.set_num_threads(1) before"
            )
        _watch_forks()
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ``ForkedProcess`` in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this engine was made in process {self._pid}, and process {os.getpid()} is a fork "
                f"of it, without its threads: {_SPAWN}"
            )

    def only_here(self, cleanup: Callable[[], object]) -> Callable[[], object]:
        """Return a callable that cleans up in the owner's process and does nothing in a child."""
        return lambda: cleanup() if self.is_here else None


class CallGate:
    """Lets one call at a time into an engine; the next may come from another thread."""

    def __init__(self, owner: ProcessGuard) -> None:
        self._owner = owner
        self._is_free = threading.Lock()
        self._call = ""

    @contextmanager
    def enter(self, call: str) -> Iterator[None]:
        """Hold the gate during a call, which messages name.

        Raises:
            ConcurrentCall: Another call is running.
            ForkedProcess: This is a fork of the engine's process.
        """
        self._owner.check()
        if not self._is_free.acquire(blocking=False):
            raise ConcurrentCall(
                f"{call}() was called while {self._call} is running on the same LLM, which does "
                "one thing at a time: give all prompts to one generate() call, or use AsyncLLM, "
                "which batches the requests of many callers"
            )
        try:
            self._call = f"{call}() of thread {threading.current_thread().name!r}"
            yield
        finally:
            self._is_free.release()


_inherited_threads = 0  # of torch, in the process that this one was forked from; else 0


@functools.cache
def _watch_forks() -> None:
    """Record in children forked from now on that an engine has used torch's threads."""
    os.register_at_fork(after_in_child=_note_fork)


def _note_fork() -> None:
    global _inherited_threads
    _inherited_threads = max(_inherited_threads, torch.get_num_threads())

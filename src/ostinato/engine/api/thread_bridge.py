"""Passes commands from event loops to the engine's thread, and outputs back.

::

    event loop    ── CommandQueue ──►  engine thread, between steps
    one reader    ◄──── Mailbox ─────  newest output of its request

The queue is closed under a lock, and commands before that still run: each command is either refused
or run, so that no caller waits for a thread that has ended.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from ostinato.engine.loop.engine import logger
from ostinato.engine.requests.caller import Owner
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.errors import EngineStopped, OstinatoError

AnswerT = TypeVar("AnswerT")
Command = Callable[[], None]


class Mailbox:
    """Holds the newest output of one request for its reader."""

    def __init__(self) -> None:
        """Make a mailbox of the running event loop."""
        self.loop = asyncio.get_running_loop()  # the reader's
        self._newest: RequestOutput | OstinatoError | None = None
        self._reader: asyncio.Future[None] | None = None  # done as soon as there is something

    def put(self, content: RequestOutput | OstinatoError) -> None:
        """Replace the content; called from the reader's loop."""
        self._newest = content
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> RequestOutput:
        """Wait for the newest output; one reader at a time.

        Raises:
            OstinatoError: It was posted in place of an output.
        """
        if self._newest is None:
            self._reader = self.loop.create_future()
            await self._reader
        content, self._newest = self._newest, None
        if isinstance(content, OstinatoError):
            raise content
        assert content is not None
        return content


Letter = tuple[Mailbox, RequestOutput | OstinatoError]


def post_all(letters: Iterable[Letter]) -> None:
    """Replace the contents of several mailboxes; called from any thread.

    Effects: each event loop is woken once, however many of its readers get something.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Letter]] = {}
    for mailbox, content in letters:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, content))
    for loop, its_letters in by_loop.items():
        try:
            loop.call_soon_threadsafe(put_all, its_letters)
        except RuntimeError:  # the readers' loop is closed
            logger.debug("%d outputs came after their event loop was closed", len(its_letters))


def put_all(letters: list[Letter]) -> None:
    """Replace the contents of several mailboxes of the running loop."""
    for mailbox, content in letters:
        mailbox.put(content)


class CommandQueue:
    """Commands that the engine's thread runs between steps."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether commands are accepted."""
        return self._reason is None and self._owner.is_here

    def put(self, command: Command) -> None:
        """Queue a command without waiting for it, as ``check`` allows; called from any thread."""
        self.check()  # first: a fork may have copied a locked lock
        with self._closing:
            if self._reason is not None:
                raise EngineStopped(self._reason)
            self._commands.put(command)

    def check(self) -> None:
        """Raise ``EngineStopped`` if the queue was closed, or in a fork of the engine's process."""
        self._owner.check()
        if self._reason is not None:
            raise EngineStopped(self._reason)

    def close(self, reason: str) -> None:
        """Accept no more commands, and wake the engine's thread; only the first reason counts."""
        with self._closing:
            self._reason = self._reason or reason
            self._commands.put(lambda: None)

    async def ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Run a question in the engine's thread and return its answer.

        Raises:
            EngineStopped: The queue was closed, perhaps while the question was queued.
            Exception: What the question raised; other than an ``OstinatoError``, it is raised in
                the engine's thread as well.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AnswerT] = loop.create_future()

        def resolve(value: AnswerT | None, error: Exception | None) -> None:
            if answer.done():  # the caller was cancelled
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast(AnswerT, value))

        def command() -> None:
            value, problem = None, None
            try:
                self.check()
                value = question()
            except Exception as error:
                problem = error
            try:
                loop.call_soon_threadsafe(resolve, value, problem)
            except RuntimeError:  # the caller's loop is closed
                logger.debug("an answer came after its event loop was closed")
            if problem is not None and not isinstance(problem, OstinatoError):
                raise problem

        self.put(command)
        return await answer

    def run_pending(self, wait: bool) -> None:
        """Run the queued commands, or wait for the first; for the engine's thread."""
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def run_until(self, max_commands: int, deadline_s: float) -> int:
        """Run commands until a time of ``time.monotonic``; returns how many."""
        for number in range(max_commands):
            try:
                command = self._commands.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return number
            command()
        return max_commands

    def drain(self) -> None:
        """Run the commands that were queued before it was closed; errors are logged."""
        while not self._commands.empty():
            try:
                self.run_pending(wait=False)
            except Exception:
                logger.exception("a command to a stopped engine raised")

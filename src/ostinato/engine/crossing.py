"""How do an event loop and the engine's thread talk?

::

    event loop    ── CommandQueue ──►  engine thread, between steps
    one reader    ◄──── Mailbox ─────  newest output of its request

The queue is closed under a lock, and whatever came in before is still obeyed: so each command
is either refused to whoever gives it, or run. Nobody waits for a thread that is gone.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from ostinato.core.errors import EngineStopped, OstinatoError
from ostinato.engine.engine import logger
from ostinato.engine.outputs import RequestOutput

AnswerT = TypeVar("AnswerT")
Command = Callable[[], None]


class Mailbox:
    """Hands the newest output of one request from the engine's thread to its reader."""

    def __init__(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._newest: RequestOutput | OstinatoError | None = None

    def post(self, content: RequestOutput | OstinatoError) -> None:
        """Replace what is inside; called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._put, content)
        except RuntimeError:  # the reader's loop is closed, and the reader with it
            logger.debug("nobody reads the output of a request any more")

    def _put(self, content: RequestOutput | OstinatoError) -> None:
        self._newest = content
        self._arrived.set()

    async def take(self) -> RequestOutput:
        """Wait for the newest output.

        Raises:
            OstinatoError: What came instead of an output.
        """
        await self._arrived.wait()
        self._arrived.clear()
        content = self._newest
        if isinstance(content, OstinatoError):
            raise content
        assert content is not None
        return content


class CommandQueue:
    """What event loops want done in the engine's thread, between steps."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether commands are taken."""
        return self._reason is None

    def put(self, command: Command) -> None:
        """Have something done and do not wait for it; called from any thread.

        Raises:
            EngineStopped: The queue was closed.
        """
        with self._closing:
            self.check()
            self._commands.put(command)

    def check(self) -> None:
        """Refuse to go on if the queue was closed.

        Raises:
            EngineStopped: Saying why it was closed.
        """
        if self._reason is not None:
            raise EngineStopped(self._reason)

    def close(self, reason: str) -> None:
        """Take no more commands, and wake the engine's thread; only the first reason counts."""
        with self._closing:
            self._reason = self._reason or reason
            self._commands.put(lambda: None)

    async def ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Have something done and wait for what it returns.

        Raises:
            EngineStopped: The queue was closed, be it while the question waited in it.
            Exception: What the question raised; if that was not on purpose, the engine's
                thread gets it as well.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AnswerT] = loop.create_future()

        def settle(value: AnswerT | None, error: Exception | None) -> None:
            if answer.done():  # whoever asked was cancelled meanwhile
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
                loop.call_soon_threadsafe(settle, value, problem)
            except RuntimeError:  # the loop is closed, and whoever asked with it
                logger.debug("nobody waits for an answer any more")
            if problem is not None and not isinstance(problem, OstinatoError):
                raise problem

        self.put(command)
        return await answer

    def obey(self, wait: bool) -> None:
        """Run the commands that have come, or wait for the first; for the engine's thread."""
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def obey_the_last(self) -> None:
        """Run what came before the queue was closed, each whatever the others raise."""
        while not self._commands.empty():
            try:
                self.obey(wait=False)
            except Exception:
                logger.exception("a command to a stopped engine raised")

"""The engine's thread: runs the commands of event loops, then a step, and posts its outputs.

::

    commands ──► run_pending ─► step ─► post, one call per event loop ─┐
                      ▲                                                │
                      └──── a short wait for next turns ◄──────────────┘

A caller often sends its next request at once: the next turn of a conversation, the next call of
an agent. So where a request ended and others run, the thread waits briefly before it plans the next
step: a request that just missed it would wait for a whole step.

Commands of event loops are queued for the thread, and outputs are posted back::

    event loop    ── CommandQueue ──►  engine thread, between steps
    one reader    ◄──── Mailbox ─────  newest output of its request

The queue is closed under a lock, and commands before that still run: each command is either refused
or run, so that no caller waits for a thread that has ended.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from ostinato.engine.loop.engine import Engine, logger
from ostinato.engine.requests.caller import ProcessGuard
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.request_state import RequestState
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.engine.requests.sampling_params import RequestOutputKind
from ostinato.engine.tiers.threads import fulfil
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
    """Commands that the engine's thread runs between steps.

    Attributes:
        reason: Why no command is accepted any more; None while they are.
    """

    def __init__(self, owner: ProcessGuard) -> None:
        self._owner = owner
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self.reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether commands are accepted."""
        return self.reason is None and self._owner.is_here

    def put(self, command: Command) -> None:
        """Queue a command without waiting for it, as ``check`` allows; called from any thread."""
        self._owner.check()  # first: a fork may have copied a locked lock
        with self._closing:
            if self.reason is not None:
                raise EngineStopped(self.reason)
            self._commands.put(command)

    def check(self) -> None:
        """Raise ``EngineStopped`` if the queue was closed, or in a fork of the engine's process."""
        self._owner.check()
        if self.reason is not None:
            raise EngineStopped(self.reason)

    def close(self, reason: str) -> None:
        """Accept no more commands, and wake the engine's thread; only the first reason counts."""
        with self._closing:
            self.reason = self.reason or reason
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


ArgumentT = TypeVar("ArgumentT")

PATIENCE = 1 / 32
"""Share of the last step's time to wait for next turns; each that arrives saves a whole step."""

MAX_USELESS_WAITS = 8
"""After this many useless waits, one in as many is tried: these callers send no next turn."""


def run_in_new_thread(make: Callable[[ArgumentT], AnswerT], argument: ArgumentT) -> AnswerT:
    """Return what ``make`` returns, called in a thread that has ended by then.

    OpenMP keeps threads for every thread that has computed, until it ends, and where all of them
    together are more than the processors, those that wait for each other sleep at once: loading a
    model in the caller's thread cost every operation of the engine's thread a wake-up.
    """
    result: Future[AnswerT] = Future()
    work = partial(fulfil, result, partial(make, argument))
    thread = threading.Thread(target=work, name="ostinato-loader", daemon=True)
    thread.start()
    answer = result.result()
    thread.join()
    return answer


class EngineThread:
    """One engine, the thread that steps it, and the mailboxes of its readers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # while the thread runs, only its counters may be read
        self.commands = CommandQueue(engine.owner)  # run between steps
        self.call = self.commands.ask  # runs something between steps, and waits for it
        self._mailboxes: dict[str, Mailbox] = {}
        self._is_broken = False
        self._num_useless_waits = 0  # for a next turn, one after another
        self._thread = threading.Thread(target=self._serve, name="ostinato-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, make: Callable[[], Awaitable[PreparedRequest]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serve a request, and yield an output of its ``output_kind`` whenever there is more.

        Args:
            make: Called at the first iteration.

        Raises:
            EngineStopped: No requests are accepted any more.
            RequestError: It was refused.

        Effects: leaving the iteration early cancels the request.
        """
        self.commands.check()
        prepared, mailbox = await make(), Mailbox()
        self.commands.put(partial(self._add, prepared, mailbox))
        is_delta = prepared.params.output_kind is RequestOutputKind.DELTA
        finished, last = False, None
        try:
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output.since(last) if is_delta else output
                last = output
        except OstinatoError:
            finished = True
            raise
        finally:
            if not finished:
                self.run_later(lambda: self._cancel_for(mailbox, prepared.request.request_id))

    def run_later(self, command: Callable[[], None]) -> None:
        """Queue a command that only cleans up; one that has stopped needs none."""
        with suppress(EngineStopped):
            self.commands.put(command)

    def cancel(self, request_id: str) -> None:
        """End a request, in the engine's thread; its reader gets the output so far."""
        if self._is_broken:  # all readers got the reason
            return
        output = self.engine.cancel(request_id)
        mailbox = self._mailboxes.pop(request_id, None)
        if output is not None and mailbox is not None:
            post_all([(mailbox, output)])

    def cancel_all(self, salt: str | bytes) -> int:
        """End a tenant's requests, in the engine's thread; returns how many."""
        names = self.engine.requests_of(salt)
        for name in names:
            self.cancel(name)
        return len(names)

    def shutdown(self) -> None:
        """End all requests and the thread; a second call does nothing, nor does one in a fork."""
        if not self.engine.owner.is_here:
            return
        self.commands.close("the engine was shut down: make another AsyncLLM")
        self._thread.join()

    def _serve(self) -> None:
        """Run until the queue is closed. A bug of ours ends the engine; all readers get it."""
        try:
            while self.commands.reason is None:
                self._run_once()
            for live in list(self._mailboxes):
                self.cancel(live)
        except Exception as fault:
            logger.exception("the engine's loop broke; all its requests end")
            self._is_broken, reason = True, f"the engine's loop broke: {fault!r}"
            self.commands.close(reason)
            post_all((mailbox, EngineStopped(reason)) for mailbox in self._mailboxes.values())
            self._mailboxes.clear()
        self.commands.drain()
        self.engine.close()

    def _run_once(self) -> None:
        """Run the queued commands, or wait for one if there is no work; then step."""
        self.commands.run_pending(wait=not self.engine.has_work and not self._run_idle_work())
        begun_s = time.monotonic()
        num_ended = self._post(self.engine.step())
        if num_ended and self.engine.has_work:
            self._wait_for_turns(num_ended, time.monotonic() - begun_s)

    def _run_idle_work(self) -> bool:
        """Do a part of the work for idle moments; returns whether there is more."""
        ghost, tiers = self.engine.cache.ghost, self.engine.tiers
        if self.engine.rebase.run_idle_work():
            return True
        if self.engine.audit.run_idle_work() or (ghost is not None and ghost.rest()):
            return True
        return tiers is not None and tiers.run_idle_work()

    def _wait_for_turns(self, num_ended: int, step_s: float) -> None:
        """Give callers that were answered a moment to send their next turn."""
        self._num_useless_waits += 1
        num_useless = self._num_useless_waits
        if num_useless > MAX_USELESS_WAITS and num_useless % MAX_USELESS_WAITS:
            return
        if self.commands.run_until(num_ended, time.monotonic() + step_s * PATIENCE):
            self._num_useless_waits = 0

    def _post(self, states: Iterable[RequestState]) -> int:
        """Post a step's outputs; returns how many requests ended with it."""
        letters, num_ended = [], 0
        for state in states:
            name = state.request.request_id
            mailbox = self._mailboxes[name]
            if state.finished:
                del self._mailboxes[name]
                num_ended += 1
            if (output := state.next_output(self.engine.config.stream_interval)) is not None:
                letters.append((mailbox, output))
        post_all(letters)
        return num_ended

    def _add(self, prepared: PreparedRequest, mailbox: Mailbox) -> None:
        """Add a request; an error is posted to its reader."""
        try:
            self.commands.check()
            self.engine.add(prepared)
        except OstinatoError as error:
            post_all([(mailbox, error)])
        else:
            self._mailboxes[prepared.request.request_id] = mailbox

    def _cancel_for(self, mailbox: Mailbox, request_id: str) -> None:
        """End the request of a reader that has left; another one of the same name continues."""
        if self._mailboxes.get(request_id) is mailbox:
            self.cancel(request_id)

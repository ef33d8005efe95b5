"""The engine's thread: runs the commands of event loops, then a step, and posts its outputs.

::

    commands ──► run_pending ─► step ─► post, one call per event loop ─┐
                      ▲                                                │
                      └──── a short wait for next turns ◄──────────────┘

A caller often sends its next request at once: the next turn of a conversation, the next call of
an agent. So where a request ended and others run, the thread waits briefly before it plans the next
step: a request that just missed it would wait for a whole step.
"""

import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ostinato.engine.api.thread_bridge import AnswerT, CommandQueue, Mailbox, post_all
from ostinato.engine.loop.engine import Engine, logger
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.request_state import RequestState
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.engine.requests.sampling_params import RequestOutputKind
from ostinato.errors import EngineStopped, OstinatoError

ArgumentT = TypeVar("ArgumentT")

PATIENCE = 1 / 32
"""Share of the last step's time to wait for next turns; each that arrives saves a whole step."""

MAX_USELESS_WAITS = 8
"""After so many useless waits, only one in so many is tried: these callers send no next turn."""


def run_in_new_thread(make: Callable[[ArgumentT], AnswerT], argument: ArgumentT) -> AnswerT:
    """Return what ``make`` returns, called in a thread that has ended by then.

    OpenMP keeps threads for every thread that has computed, until it ends, and where all of them
    together are more than the processors, those that wait for each other sleep at once: loading a
    model in the caller's thread cost every operation of the engine's thread a wake-up.
    """
    result: Future[AnswerT] = Future()

    def run() -> None:
        try:
            result.set_result(make(argument))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="ostinato-loader", daemon=True)
    thread.start()
    answer = result.result()
    thread.join()
    return answer


class EngineThread:
    """One engine, the thread that steps it, and the mailboxes of its readers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # while the thread runs, only its counters may be read
        self.commands = CommandQueue(engine.owner)  # run between steps
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

    async def call(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Run something in the engine's thread, between steps, and wait for it."""
        return await self.commands.ask(question)

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
            while self.commands.is_open:
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

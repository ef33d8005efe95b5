"""Waiting for a condition: the only places in which a test sleeps."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine.api.engine_thread import Command, CommandQueue
from ostinato.runner.model_runner import ModelRunner

_PATIENCE_S = 30
_INTERVAL_S = 0.002


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait until something is so, which it will be in a moment."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came to be so"
        time.sleep(_INTERVAL_S)


async def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so, as ``wait_until``, while the event loop runs on."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came to be so"
        await asyncio.sleep(_INTERVAL_S)


async def other_tasks_have_started() -> None:
    """Let every new task run up to its first wait."""
    await asyncio.sleep(0)


@contextmanager
def held_up(runner: ModelRunner) -> Iterator[threading.Event]:
    """Hold up every forward pass until the block is left; the event says that one has begun."""
    begun, goes_on = threading.Event(), threading.Event()
    execute = runner.execute

    def held(plan: StepPlan) -> StepResult:
        begun.set()
        assert goes_on.wait(120), "the forward pass was never let go on"
        return execute(plan)

    with mock.patch.object(runner, "execute", held):
        try:
            yield begun
        finally:
            goes_on.set()


@contextmanager
def queued_commands() -> Iterator[list[Command]]:
    """List the commands that wait for an engine's thread, of those that are sent from now on."""
    waiting: list[Command] = []
    put = CommandQueue.put

    def put_noted(queue: CommandQueue, command: Command) -> None:
        def run() -> None:
            waiting.remove(run)
            command()

        waiting.append(run)
        put(queue, run)

    with mock.patch.object(CommandQueue, "put", put_noted):
        yield waiting

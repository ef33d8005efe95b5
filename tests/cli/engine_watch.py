"""What the engines under a command really did: a witness that takes no command's word."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils.hooks import RemovableHandle

from ostinato import AsyncLLM
from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine.loop.engine import Engine
from ostinato.runner.model_runner import ModelRunner


class EngineWatch:
    """The engines that were made, and the tokens that went through each one's embedding.

    Attributes:
        engines: In the order in which they were made.
        embedded_tokens: One count per engine.
    """

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.embedded_tokens: list[int] = []
        self._hooks: list[RemovableHandle] = []

    def add(self, engine: Engine) -> None:
        """Begin to count."""
        place = len(self.engines)
        self.engines.append(engine)
        self.embedded_tokens.append(0)

        def count(module: Any, inputs: Any, output: Any) -> None:
            self.embedded_tokens[place] += inputs[0].numel()

        embeddings = engine.loaded.model.get_input_embeddings()
        self._hooks.append(embeddings.register_forward_hook(count))

    def remove_hooks(self) -> None:
        """Stop counting: other tests use the models."""
        for hook in self._hooks:
            hook.remove()

    def check_nothing_is_held(self) -> None:
        """No request is live, no block is held, and every count in the cache is right."""
        assert self.engines
        for engine in self.engines:
            assert not engine.has_work
            assert engine.cache.manager.num_live_tables == 0
            engine.cache.manager.check()


@contextmanager
def watching() -> Iterator[EngineWatch]:
    """Watch every engine that is made meanwhile."""
    watch, make = EngineWatch(), Engine.__init__

    def made(self: Engine, *args: Any, **settings: Any) -> None:
        make(self, *args, **settings)
        watch.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", made)
        try:
            yield watch
        finally:
            watch.remove_hooks()


@pytest.fixture
def watch() -> Iterator[EngineWatch]:
    """Watch for the time of one test; at its end nothing may be held."""
    with watching() as watch:
        yield watch
    watch.check_nothing_is_held()


def press_ctrl_c_in_step(number: int, patch: pytest.MonkeyPatch) -> None:
    """Send the signal of Ctrl-C to this process while that step runs, counted over all engines.

    The step goes on when the command has asked the engine to cancel, so that it is the last.
    """
    steps, asked = itertools.count(1), threading.Event()
    execute, abort = ModelRunner.execute, AsyncLLM.abort

    def interrupted(self: ModelRunner, plan: StepPlan) -> StepResult:
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGINT)
            assert asked.wait(60), "the engine was not asked to cancel"
        return execute(self, plan)

    def noted(self: AsyncLLM, request_id: str) -> None:
        abort(self, request_id)
        asked.set()

    patch.setattr(ModelRunner, "execute", interrupted)
    patch.setattr(AsyncLLM, "abort", noted)

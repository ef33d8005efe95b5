"""Runs a batch of prompts to its end, with a progress bar and Ctrl-C.

The bar shows the share of cached tokens::

Generating: 25%|██▌    | 250/1000 [prefill 9103 tok/s, decode 318 tok/s, cached 96.8%]
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType, TracebackType
from typing import Any

from tqdm.auto import tqdm

from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.tiers.stores import GRACE_S
from ostinato.errors import RequestError, StepFailed, naming

ShowProgress = bool | Callable[..., Any]
"""Whether to show progress, or what makes the bar, such as ``partial(tqdm, leave=False)``."""


def run_batch(
    engine: Engine,
    prompts: list[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: ShowProgress,
    priority: int | Sequence[int] | None,
) -> list[RequestOutput]:
    """Check everything, then add everything, then step until all have ended."""
    each_params = one_each(
        "sampling_params", engine.defaults.params() if params is None else params, len(prompts)
    )
    each_priority = one_each("priority", 0 if priority is None else priority, len(prompts))
    prepared = []
    for number, each in enumerate(zip(prompts, each_params, each_priority, strict=True)):
        prompt, p, rank = each
        with naming("prompt", number) if len(prompts) > 1 else nullcontext():
            prepared.append(engine.make_request(prompt, p, priority=rank))
    outputs: dict[str, RequestOutput] = {}
    with DeferredSignals(lambda: engine.is_computing) as gate:
        try:
            with GenerationProgress(len(prepared), engine, use_tqdm) as progress:
                for request in prepared:
                    engine.add(request)
                while engine.has_work:
                    gate.check()
                    ended = [state for state in engine.step() if state.finished]
                    outputs.update((state.request.request_id, state.output()) for state in ended)
                    progress.update(len(ended))
            while engine.audit.run_idle_work():  # a batch is idle at its end
                gate.check()
        finally:
            for request in prepared:  # those that were interrupted
                engine.discard(request.request.request_id)
            engine.drain_tiers(GRACE_S)
    finished = [outputs[request.request.request_id] for request in prepared]
    failed = [output for output in finished if output.error is not None]
    if failed:
        raise StepFailed(
            f"{len(failed)} of {len(finished)} requests failed: {failed[0].error}; "
            "the exception's 'outputs' holds the others",
            finished,
        )
    return finished


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """Repeat a single setting, or check that there is one per prompt."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{len(value)} {name} for {count} prompts: give one for all, or one per prompt"
        )
    return list(value)


class GenerationProgress:
    """A progress bar over requests; a context manager."""

    def __init__(self, num_requests: int, engine: Engine, shown: ShowProgress) -> None:
        self._cache, self._scheduler = engine.cache_stats, engine.scheduler_stats
        make = shown if callable(shown) else tqdm
        self._bar = make(total=num_requests, desc="Generating", unit="req", disable=not shown)
        self._start_s = time.monotonic()
        self._before = self._counts()

    def __enter__(self) -> "GenerationProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, num_finished: int) -> None:
        """Count the requests that ended in a step."""
        if self._bar.disable:
            return
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        prompt, output, query, hit = (
            now - before for now, before in zip(self._counts(), self._before, strict=True)
        )
        cached = hit / query if query else 0.0
        self._bar.set_postfix_str(
            f"prefill {prompt / elapsed_s:.0f} tok/s, decode {output / elapsed_s:.0f} tok/s, "
            f"cached {cached:.1%}",
            refresh=False,
        )
        self._bar.update(num_finished)

    def _counts(self) -> tuple[int, int, int, int]:
        first = self._cache.first
        return (
            self._scheduler.computed_prompt_tokens,
            self._scheduler.computed_output_tokens,
            first.query_tokens,
            first.hit_tokens,
        )


class DeferredSignals:
    """Runs handlers of signals when the engine is consistent; a context manager.

    Python runs a handler between any two instructions. One that raises, such as that of Ctrl-C or
    of a time limit, would leak blocks in the middle of a plan or a commit. So handlers run at once
    within a forward pass, which may take long (the engine ends that step as failed), and anywhere
    else at the next ``check``.

    Acts in the main thread, which is the only one that gets signals.
    """

    def __init__(self, may_run: Callable[[], bool]) -> None:
        """Take a function that says whether a handler may run at once."""
        self._may_run = may_run
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> "DeferredSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._on_signal)
        except BaseException:  # of a handler that is not deferred yet
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the handlers, and run those of pending signals."""
        self._restore()
        self.check()

    def check(self) -> None:
        """Run the handlers of pending signals, which may raise."""
        while self._pending:
            number, frame = self._pending.pop(0)
            self._handlers[number](number, frame)

    def _restore(self) -> None:
        """Restore the handlers that the program has not replaced meanwhile."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._may_run():
            self._handlers[number](number, frame)
        else:
            self._pending.append((number, frame))

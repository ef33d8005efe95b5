"""Runs a batch of prompts to its end, with a progress bar and Ctrl-C.

The bar shows the share of cached tokens::

Generating: 25%|██▌    | 250/1000 [prefill 9103 tok/s, decode 318 tok/s, cached 96.8%]
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from tqdm.auto import tqdm

from ostinato.engine.engine import Engine
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.prompts import Prompt
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.tier_stores import GRACE_S
from ostinato.errors import RequestError, StepFailed

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
        "sampling_params", SamplingParams() if params is None else params, len(prompts)
    )
    each_priority = one_each("priority", 0 if priority is None else priority, len(prompts))
    made = [
        engine.make_request(prompt, p, priority=rank)
        for prompt, p, rank in zip(prompts, each_params, each_priority, strict=True)
    ]
    outputs: dict[str, RequestOutput] = {}
    with DeferredSigint(lambda: engine.is_computing) as gate:
        try:
            with GenerationProgress(len(made), engine, use_tqdm) as progress:
                for request in made:
                    engine.add(request)
                while engine.has_work:
                    gate.check()
                    ended = [state for state in engine.step() if state.finished]
                    outputs.update((state.request.request_id, state.output()) for state in ended)
                    progress.update(len(ended))
            while engine.audit.run_idle_work():  # a batch is idle at its end
                gate.check()
        finally:
            for request in made:  # those that were interrupted
                engine.discard(request.request.request_id)
            engine.drain_tiers(GRACE_S)
    finished = [outputs[request.request.request_id] for request in made]
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


class DeferredSigint:
    """Raises Ctrl-C only at moments at which the engine is consistent; a context manager.

    Python raises ``KeyboardInterrupt`` between any two instructions; in the middle of a plan or a
    commit that would leak blocks. So it is raised at once within a forward pass, which may take
    long (the engine ends that step as failed), and anywhere else at the next ``check``.

    Acts in the main thread, which is the only one that gets signals, and only where Python's own
    handler is installed: a program's handler is left alone.
    """

    def __init__(self, may_raise: Callable[[], bool]) -> None:
        """Take a function that says whether an exception may be raised at once."""
        self._may_raise = may_raise
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> "DeferredSigint":
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore Python's handler, and raise a pending Ctrl-C unless another error is raised."""
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a Ctrl-C is pending."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._may_raise():
            raise KeyboardInterrupt
        self._is_pending = True

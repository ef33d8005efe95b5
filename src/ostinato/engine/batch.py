"""Runs a batch of prompts to its end, with a progress bar.

The bar shows the share of cached tokens::

Generating: 25%|██▌    | 250/1000 [prefill 9103 tok/s, decode 318 tok/s, cached 96.8%]
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm.auto import tqdm

from ostinato.engine.engine import Engine
from ostinato.engine.interrupts import DeferredSigint
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.prompts import Prompt
from ostinato.engine.request_validation import PreparedRequest
from ostinato.engine.sampling_params import SamplingParams
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
    each_params = _one_each(
        "sampling_params", SamplingParams() if params is None else params, len(prompts)
    )
    each_priority = _one_each("priority", 0 if priority is None else priority, len(prompts))
    made = [
        engine.make_request(prompt, p, priority=rank)
        for prompt, p, rank in zip(prompts, each_params, each_priority, strict=True)
    ]
    with DeferredSigint(lambda: engine.is_computing) as gate:
        try:
            outputs = _drain(engine, made, use_tqdm, gate)
            while engine.audit.rest():  # the idle moment of a batch is its end
                gate.check()
        finally:
            for request in made:  # after an interruption, nothing stays behind
                engine.discard(request.request.request_id)
            engine.drain_tiers()
    return _raise_failures([outputs[request.request.request_id] for request in made])


def _drain(
    engine: Engine, made: list[PreparedRequest], use_tqdm: ShowProgress, gate: DeferredSigint
) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    with GenerationProgress(len(made), engine, use_tqdm) as progress:
        for request in made:
            engine.add(request)
        while engine.has_work:
            gate.check()
            finished = [state for state in engine.step() if state.finished]
            outputs.update((state.request.request_id, state.output()) for state in finished)
            progress.update(len(finished))
    return outputs


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """Repeat a single setting, or check that there is one per prompt."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{len(value)} {name} for {count} prompts: give one for all, or one per prompt"
        )
    return list(value)


def _raise_failures(outputs: list[RequestOutput]) -> list[RequestOutput]:
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise StepFailed(
            f"{len(failed)} of {len(outputs)} requests failed: {failed[0].error}; "
            "the exception's 'outputs' holds the others",
            outputs,
        )
    return outputs


class GenerationProgress:
    """A progress bar over requests; a context manager."""

    def __init__(self, num_requests: int, engine: Engine, shown: ShowProgress) -> None:
        """Start to count from what the engine has done so far."""
        self._cache, self._scheduler = engine.cache_stats, engine.scheduler_stats
        make = shown if callable(shown) else tqdm
        self._bar = make(total=num_requests, desc="Generating", unit="req", disable=not shown)
        self._start_s = time.monotonic()
        self._before = self._counts()

    def __enter__(self) -> "GenerationProgress":
        """Show the bar."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
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

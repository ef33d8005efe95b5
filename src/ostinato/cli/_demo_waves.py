"""Runs a wave of calls and measures tokens, seconds and the time to the first token.

A wave is many prompts submitted at once. The engine counts tokens; seconds are wall-clock time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ostinato.engine.sampling_params import SamplingParams
from ostinato.errors import StepFailed

if TYPE_CHECKING:
    from ostinato import RequestOutput
    from ostinato.engine.engine import Engine
    from ostinato.engine.request_validation import PreparedRequest

Watch = Callable[[int, int], None]
"""Called after each step, with calls answered and prompt tokens computed so far."""

OUTPUT_TOKENS = 4

_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Wave:
    """The result of a wave.

    Attributes:
        num_calls: Prompts that were submitted.
        prompt_tokens: All their tokens.
        computed_tokens: Prompt tokens computed by the model.
        seconds: From the first submission to the last answer, or to the time limit.
        answers: Texts by number of the prompt; incomplete if time ran out.
    """

    num_calls: int
    prompt_tokens: int
    computed_tokens: int
    seconds: float
    answers: dict[int, str]

    @property
    def complete(self) -> bool:
        """Whether every call was answered."""
        return len(self.answers) == self.num_calls


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time to first token of a single call.

    Attributes:
        computed_tokens: Prompt tokens that it computed.
        seconds: Median over a few trials.
    """

    computed_tokens: int
    seconds: float


def run_wave(
    engine: "Engine", prompts: list[str], watch: Watch, limit_s: float | None = None
) -> Wave:
    """Submit prompts at once and answer them, with four tokens each.

    Args:
        engine: An engine without other requests.
        prompts: Texts.
        watch: Called with the progress.
        limit_s: Time limit, checked after each step; None is no limit.

    Raises:
        StepFailed: A forward pass raised.
    """
    counts = engine.scheduler_stats
    before = counts.computed_prompt_tokens
    start_s = time.perf_counter()
    made = _submit(engine, prompts, OUTPUT_TOKENS)
    numbers: dict[str, int] = {
        request.request.request_id: number for number, request in enumerate(made)
    }
    answers: dict[int, str] = {}
    while engine.has_work:
        for output in _step(engine):
            answers[numbers[output.request_id]] = output.outputs[0].text
        watch(len(answers), counts.computed_prompt_tokens - before)
        if limit_s is not None and time.perf_counter() - start_s > limit_s:
            break
    seconds = time.perf_counter() - start_s
    for request in made:  # the unfinished ones
        engine.cancel(request.request.request_id)
    tokens = sum(len(request.request.prompt_token_ids) for request in made)
    return Wave(len(made), tokens, counts.computed_prompt_tokens - before, seconds, answers)


def first_tokens(engine: "Engine", cold: str, warm: str) -> tuple[FirstToken, FirstToken]:
    """Measure two calls one after the other, the first of them on an empty cache.

    Args:
        engine: An engine without other requests; its cache is reset.
        cold: Prompt of the first call.
        warm: Prompt of the second one, which may hit what the first one cached.
    """
    trials = []
    for _ in range(_TRIALS):
        engine.reset_cache()
        trials.append((_alone(engine, cold), _alone(engine, warm)))
    first, second = zip(*trials, strict=True)
    return _middle(first), _middle(second)


def _submit(engine: "Engine", prompts: list[str], output_tokens: int) -> "list[PreparedRequest]":
    """Add prompts to the engine without running them."""
    from ostinato.engine.prompts import Prompt

    params = SamplingParams(max_tokens=output_tokens, temperature=0)
    made = [engine.make_request(Prompt(text=prompt), params) for prompt in prompts]
    for request in made:
        engine.add(request)
    return made


def _step(engine: "Engine") -> "list[RequestOutput]":
    """Run one step and return the finished outputs."""
    ended = [state.output() for state in engine.step() if state.finished]
    for output in ended:
        if output.error is not None:
            raise StepFailed(output.error, ended)
    return ended


def _alone(engine: "Engine", prompt: str) -> "RequestOutput":
    """Answer a single call with one token."""
    _submit(engine, [prompt], 1)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += _step(engine)
    return outputs[0]


def _middle(outputs: "tuple[RequestOutput, ...]") -> FirstToken:
    """Take the median of equal calls."""
    computed = [len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs]
    seconds = [output.timings.time_to_first_token or 0.0 for output in outputs]
    return FirstToken(round(median(computed)), median(seconds))

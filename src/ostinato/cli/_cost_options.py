"""What does a step cost: given, measured here, or assumed?"""

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato.core.config import at_least
from ostinato.core.errors import ConfigError
from ostinato.lab.cost_model import ASSUMED, CostModel, Work, error_of, fit, prefill_work

if TYPE_CHECKING:
    from ostinato import LLM

_COST = "What a step costs"

_LENGTHS = (32, 128, 512)
_BATCHES = (1, 8)
_NEW_TOKENS = 24
_SHORT = 16
_REPEATS = 2

StepMs = Annotated[
    float | None,
    typer.Option(help="Milliseconds per step, however little it computes.", rich_help_panel=_COST),
]
PrefillRate = Annotated[
    float | None,
    typer.Option(help="Prompt tokens per second, attention aside.", rich_help_panel=_COST),
]
AttentionDoubles = Annotated[
    float | None,
    typer.Option(
        help="Context, in tokens, at which attention costs as much as all else.",
        rich_help_panel=_COST,
    ),
]
Measure = Annotated[
    str | None,
    typer.Option(
        help="A model to measure on this machine instead: some seconds of work.",
        rich_help_panel=_COST,
    ),
]


def choose_cost(
    step_ms: float | None,
    prefill_rate: float | None,
    attention_doubles: float | None,
    measure: str | None,
) -> CostModel:
    """Return the prices of a step; what is not given is assumed.

    Raises:
        ConfigError: A figure is not above 0, or figures are given *and* to be measured.
    """
    figures = {
        "step_ms": step_ms,
        "prefill_rate": prefill_rate,
        "attention_doubles": attention_doubles,
    }
    given = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in given.items():
        if not 0 < figure < float("inf"):
            raise ConfigError(f"{name}={figure}: must be above 0")
    if measure is not None:
        if given:
            raise ConfigError(f"measure={measure!r} and {', '.join(given)}: give one of them")
        return measure_cost(measure)
    if not given:
        return ASSUMED
    token_s = 1 / prefill_rate if prefill_rate else ASSUMED.token_s
    doubles = attention_doubles or ASSUMED.token_s / ASSUMED.pair_s
    step_s = ASSUMED.step_s if step_ms is None else step_ms / 1000
    return CostModel(step_s, token_s, token_s / doubles, "given")


def measure_cost(model: str, **settings: int) -> CostModel:
    """Run a few prompts of a model on this machine, and fit the prices to their times.

    Args:
        model: As ``LLM`` takes it.
        **settings: Of ``LLM``.

    Effects: the model is loaded and runs for some seconds; a line on stderr says how well the
    prices explain what was measured.
    """
    # Imported here: only this needs tensors.
    from ostinato import LLM

    console = Console(stderr=True)
    with console.status(f"Measuring {model} ..."), LLM(model, **settings) as llm:
        measured = [_measure(llm, *run) for run in _runs(llm)]
    cost = fit(measured, f"measured: {model} on this machine")
    console.print(
        f"{model}: {cost.step_s * 1000:.2f} ms per step, {cost.token_s * 1e6:.1f} us per token, "
        f"{cost.pair_s * 1e9:.2f} ns per pair; within {error_of(cost, measured):.0%} of what was "
        "measured",
        style="dim",
    )
    return cost


def _runs(llm: "LLM") -> list[tuple[int, int, int]]:
    """List batch, prompt tokens and new tokens of each run."""
    longest = llm.engine.scheduler.config.max_model_len
    at_least("max_model_len", longest, _SHORT + _NEW_TOKENS)
    lengths = [length for length in _LENGTHS if length < longest]
    return [(1, length, 1) for length in lengths] + [(b, _SHORT, _NEW_TOKENS) for b in _BATCHES]


def _measure(llm: "LLM", batch: int, num_prompt: int, num_new: int) -> tuple[Work, float]:
    """Time one run, the fastest of a few; nothing is read from the cache."""
    from ostinato import SamplingParams
    from ostinato.engine.prompts import PromptDict

    params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True, detokenize=False)
    prompts: list[PromptDict] = [
        {"prompt_token_ids": [1 + number % 7] * num_prompt, "cache_read": False}
        for number in range(batch)
    ]
    seconds = []
    for _ in range(1 + _REPEATS):
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    budget = llm.engine.scheduler.config.max_num_batched_tokens
    one = prefill_work(num_prompt)
    work = Work(-(-num_prompt * batch // budget), one.tokens * batch, one.pairs * batch)
    for place in range(1, num_new):
        work += Work(1, batch, batch * (num_prompt + place))
    return work, min(seconds[1:])

"""Options for a replica's machine and the cost of a step.

The cost is derived from a model and a GPU, given, measured here, or assumed.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console

from ostinato.cli.options.option_groups import option
from ostinato.core.config import check_minimum, one_of
from ostinato.core.errors import ConfigError
from ostinato.lab.size.gpus import DENSE_SHARE, GPUS, MEMORY_SHARE, MOE_SHARE, find_gpu
from ostinato.lab.size.kv_bytes import DTYPE_BITS
from ostinato.lab.size.kv_config import Config
from ostinato.lab.size.quantities import read_bytes
from ostinato.lab.traces.recording import Recording, read_recording
from ostinato.lab.work.cost_model import (
    ASSUMED,
    CostModel,
    StepCost,
    cost_of,
    error_of,
    fit_cost,
    measured_steps,
)
from ostinato.lab.work.model_work import WEIGHT_FORMATS, model_work
from ostinato.lab.work.roofline import Machine, RooflineCost, choose_machine
from ostinato.scheduling.price_fit import Measured

if TYPE_CHECKING:
    from ostinato import LLM

_cost = partial(option, panel="Cost of a step, if not derived from model and GPU")
_machine = partial(option, panel="The machine")

_LENGTHS = (32, 128, 512)
_TAILS = (4, 16, 64, 256)
_CROWD = 8
_NEW_TOKENS, _FEW_TOKENS = 24, 8
_SHORT = 16
_REPEATS = 3


@dataclass(frozen=True)
class MachineOptions:
    """The GPUs of one replica."""

    gpu: str | None = _machine(None, f"{', '.join(GPUS)}; h100 by default.")
    gpus: int | None = _machine(None)
    """GPUs of one replica (tensor parallelism); by default as few as hold the weights."""
    weights: str | None = _machine(
        None, f"Format of the weights: {', '.join(WEIGHT_FORMATS)}. auto takes the config's."
    )
    kv_cache_dtype: str | None = _machine(
        None, f"Format of the KV: auto, {', '.join(DTYPE_BITS)}. auto takes the config's."
    )
    compute_share: float | None = _machine(
        None,
        f"Share of the GPU's peak that prefill reaches; by default {DENSE_SHARE}, and {MOE_SHARE} "
        "in routed experts.",
    )
    memory_share: float | None = _machine(
        None,
        f"Share of the memory bandwidth that decoding reaches; {MEMORY_SHARE} by default.",
    )
    gpu_tflops: float | None = _machine(None)
    """Peak TFLOP/s in bfloat16, instead of --gpu's."""
    gpu_bandwidth: float | None = _machine(None)
    """TB/s of its memory, instead of --gpu's."""
    gpu_memory: str | None = _machine(None)
    """Memory of one GPU, such as 80GiB, instead of --gpu's."""

    @property
    def given(self) -> list[str]:
        """The names of the options given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def machine(self) -> Machine:
        """Return the machine; 0 GPUs stand for as few as hold the weights.

        Raises:
            ConfigError: An option is out of range.
        """
        if self.gpus is not None:
            check_minimum("gpus", self.gpus, 1)
        one_of("kv_cache_dtype", self.kv_cache_dtype or "auto", ("auto", *DTYPE_BITS))
        memory = None if self.gpu_memory is None else read_bytes("gpu_memory", self.gpu_memory)
        gpu = find_gpu(self.gpu or "h100").overridden(self.gpu_tflops, self.gpu_bandwidth, memory)
        share = MEMORY_SHARE if self.memory_share is None else self.memory_share
        return Machine(gpu, self.gpus or 0, self.compute_share, share)


@dataclass(frozen=True)
class CostOptions:
    """The cost of a step: derived, given, measured here, or assumed."""

    step_ms: float | None = _cost(None)
    """Fixed milliseconds per step."""
    prefill_rate: float | None = _cost(None)
    """Prompt tokens per second, without attention."""
    attention_doubles: float | None = _cost(None)
    """Context, in tokens, at which attention costs as much as everything else."""
    measure: str | None = _cost(None)
    """Measure this model on this machine instead; takes some seconds."""

    def check(self, machine: MachineOptions) -> None:
        """Check the options before anything is read.

        Raises:
            ConfigError: A figure is not above 0, or figures are given in two ways.
        """
        given = self._given()
        for name, figure in given.items():
            if not 0 < figure < float("inf"):
                raise ConfigError(f"{name}={figure}: must be above 0")
        if self.measure is not None and given:
            raise ConfigError(f"measure={self.measure!r} and {', '.join(given)}: give one of them")
        if machine.given and (given or self.measure is not None):
            raise ConfigError(
                f"{', '.join(machine.given)} and {', '.join(given) or 'measure'}: the cost of a "
                "step is either derived from a machine or given; leave one of them out"
            )
        machine.machine()

    def choose(
        self, machine: MachineOptions, recording: Recording | None, config: Config | None
    ) -> StepCost:
        """Return the cost of steps; by default derived from the model's config.

        Without options, a complete recording provides it. Without a model, that of a common model
        is assumed.

        Raises:
            ConfigError: The model's weights do not fit, or a machine is described without a model.
            UnsupportedModel: The model's work cannot be derived.
        """
        if self.measure is not None:
            return measure_cost(self.measure)
        if self._given():
            return self._as_given()
        if machine.given and config is None:
            names = ", ".join(machine.given)
            raise ConfigError(f"{names}: needs the model that runs there; add --model")
        if recording is not None and recording.is_whole and not machine.given:
            with suppress(ConfigError):  # too few steps to fit
                return cost_of(recording)
        if config is None:
            return ASSUMED
        work = model_work(config, machine.weights or "auto", machine.kv_cache_dtype or "auto")
        return RooflineCost(work, choose_machine(work, machine.machine()))

    def _given(self) -> dict[str, float]:
        figures = {
            "step_ms": self.step_ms,
            "prefill_rate": self.prefill_rate,
            "attention_doubles": self.attention_doubles,
        }
        return {name: figure for name, figure in figures.items() if figure is not None}

    def _as_given(self) -> CostModel:
        token_s = ASSUMED.token_s if self.prefill_rate is None else 1 / self.prefill_rate
        doubles = self.attention_doubles or ASSUMED.token_s / ASSUMED.pair_s
        fixed_s = ASSUMED.fixed_s if self.step_ms is None else self.step_ms / 1000
        return CostModel(fixed_s, token_s, token_s / doubles, "given")


def measure_cost(model: str, **settings: int) -> CostModel:
    """Serve some prompts with a model on this machine, and fit the cost to the steps' times.

    Args:
        model: The model, as in ``LLM``.
        **settings: Keywords of ``LLM``.

    Effects: the model is loaded and runs for some seconds; a line on stderr gives the error of the
    fit.
    """
    # Imported here: only this needs tensors.
    from ostinato import LLM
    from ostinato.lab.work.cost_model import of_repeats

    console = Console(stderr=True)
    with (
        console.status(f"Measuring {model} ..."),
        TemporaryDirectory() as folder,
        LLM(model, **({"max_num_seqs": _CROWD} | settings)) as llm,
    ):
        waves = list(_waves(llm.engine.scheduler.config.max_model_len))
        _serve(llm, waves)  # warm-up
        paths = [Path(folder) / f"{number}.jsonl" for number in range(_REPEATS)]
        measured = of_repeats([_recorded(llm, waves, path) for path in paths])
    cost = fit_cost(measured, f"measured: {model} on this machine")
    console.print(
        f"{model}: {cost.fixed_s * 1000:.2f} ms per step, {cost.token_s * 1e6:.1f} us per token, "
        f"{cost.pair_s * 1e9:.2f} ns per pair; half of the {len(measured):,} steps within "
        f"{error_of(cost, measured):.0%} of that",
        style="dim",
    )
    return cost


_Wave = list[tuple[list[int], int]]
"""Prompts sent together, each with the number of tokens that it generates."""


def _waves(longest: int) -> Iterator[_Wave]:
    """Return the waves to serve.

    Single prompts, prompts after cached ones, many at once, and more than run at once, so that
    prefill and decode share steps.
    """
    check_minimum("max_model_len", longest, _SHORT + _NEW_TOKENS)
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(1, 8), k=length)

    for length in _LENGTHS:
        if length < longest:
            yield [(prompt(length), 1)]
    head = prompt(min(_LENGTHS[-1], (longest - _NEW_TOKENS) // 2))
    for length in _TAILS:
        if len(head) + length + _FEW_TOKENS <= longest:
            yield [(head + prompt(length), _FEW_TOKENS)]
    for batch in (1, _CROWD):
        yield [(prompt(_SHORT), _NEW_TOKENS) for _ in range(batch)]
        if len(head) + _SHORT + _NEW_TOKENS <= longest:
            yield [(head + prompt(_SHORT), _NEW_TOKENS) for _ in range(batch)]
    room = min(_TAILS[-1], longest - len(head) - _NEW_TOKENS)
    if room > 0:
        tails = [prompt(draw.randint(1, room)) for _ in range(4 * _CROWD)]
        yield [(head + tail, draw.randint(2, _NEW_TOKENS)) for tail in tails]


def _serve(llm: "LLM", waves: list[_Wave]) -> None:
    from ostinato import SamplingParams
    from ostinato.engine.requests.prompts import PromptDict

    for wave in waves:
        params = [
            SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True, detokenize=False)
            for _, num_new in wave
        ]
        prompts: list[PromptDict] = [{"prompt_token_ids": prompt} for prompt, _ in wave]
        llm.generate(prompts, params, use_tqdm=False)


def _recorded(llm: "LLM", waves: list[_Wave], path: Path) -> Measured:
    """Serve from a cold cache, and return what each step computed and its time."""
    llm.reset_prefix_cache()
    llm.start_recording(path)
    _serve(llm, waves)
    llm.stop_recording()
    return measured_steps(read_recording(path))

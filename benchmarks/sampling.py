"""Processor time of the sampler alone, in the native library and in torch, by turns.

::

    python -m benchmarks.sampling                          # both, 1 and 16 rows, three vocabularies
    python -m benchmarks.sampling --step-ms 37,67          # and shares of a decode step
    python -m benchmarks.sampling --spread 1 --json FILE

Logits are normal in bfloat16. With ``--spread 1`` they are as flat as those of random weights, so
that ``top_p=0.95`` keeps three quarters of the vocabulary; 4 is nearer to a trained model. Figures
are medians of processor time over rounds, in milliseconds for the batch; on several threads, a step
waits for a share of it. ``--step-ms`` names the time of a greedy step of one and of 16 sequences.
"""

import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of, write_json
from ostinato.core.plan import SampleTask
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.native.library import library
from ostinato.runner.native.sampling import sample_rows
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.sampling.sampler import Sampler
from ostinato.runner.sampling.torch_draws import draw_rows
from ostinato.runner.token_lists import prepare

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_k+top_p": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalty": {"presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "allowed ids": {"allowed_token_ids": range(0, 32_000, 2)},
    "bad words": {"bad_words_ids": [[number, number + 1] for number in range(64)]},
}
VOCABULARIES, BATCHES = (32_000, 151_936, 262_144), (1, 16)
PROMPT, OUTPUT = 2048, 256


def tasks_of(parameters: dict[str, Any], batch: int, vocab: int) -> list[SampleTask]:
    """Make rows whose texts are as long as after some hundred steps."""
    random = torch.Generator().manual_seed(1)
    texts = torch.randint(vocab, (batch, PROMPT + OUTPUT), generator=random).tolist()
    params = SamplingParams(**parameters)
    return [
        SampleTask(params, (seed,), array("I", text[:PROMPT]), array("I", text[PROMPT:]))
        for seed, text in enumerate(texts)
    ]


def ways(logits: torch.Tensor, tasks: list[SampleTask]) -> dict[str, Callable[[], object]]:
    """Return what is measured: the sampler as it is, and the same rows in torch."""
    native, sampler = library(), Sampler()
    assert native is not None, "there is no native library"
    lists = [prepare(tasks[0].params, logits.shape[1])] * len(tasks)
    numbers = [[uniform(seed, OUTPUT) for seed in task.seeds] for task in tasks]
    assert (
        draw_rows(logits, tasks, lists, numbers).ids
        == sample_rows(native, logits, tasks, lists, numbers).ids
    )
    return {
        "native": lambda: sampler.sample(logits, tasks),
        "torch": torch.inference_mode()(lambda: draw_rows(logits, tasks, lists, numbers)),
    }


def measure(vocab: int, batch: int, spread: float, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of processor time by kind and way."""
    random = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(batch, vocab, generator=random)).to(torch.bfloat16)
    calls = {
        (kind, way): call
        for kind, parameters in KINDS.items()
        for way, call in ways(logits, tasks_of(parameters, batch, vocab)).items()
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            begin_s = time.process_time()
            call()
            times[key].append(1e3 * (time.process_time() - begin_s))
    return {kind: {way: median(times[kind, way]) for way in ("native", "torch")} for kind in KINDS}


def row_of(times: dict[str, float], step_ms: float | None) -> list[str]:
    """Return the cells of one kind."""
    cells = [f"{times['torch']:.2f}", f"{times['native']:.2f}"]
    if step_ms is not None:
        extra = (times["native"] - times["greedy"]) / torch.get_num_threads()
        cells.append(f"{100 * extra / step_ms:.1f} %")
    return cells


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__, rounds=9, threads=2, has_json=True)
    parser.add_argument("--vocabularies", default=",".join(map(str, VOCABULARIES)))
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--step-ms", help="a greedy step of 1 and of 16 sequences: 37,67")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = (
        dict(zip(BATCHES, map(float, (options.step_ms or "").split(",")), strict=True))
        if (options.step_ms)
        else {}
    )
    table = Table("vocabulary", "rows", "", "torch", "native", *(["of a step"] if steps else []))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for vocab in map(int, options.vocabularies.split(",")):
        for batch in BATCHES:
            kinds = measure(vocab, batch, options.spread, options.rounds)
            figures[f"{vocab}x{batch}"] = kinds
            for kind, times in kinds.items():
                greedy = {"greedy": kinds["greedy"]["native"]}
                cells = row_of(times | greedy, steps.get(batch))
                table.add_row(f"{vocab:,}", str(batch), kind, *cells)
    Console(width=100).print(table)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

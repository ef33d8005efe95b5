"""Speed of models with states, beside ``transformers`` with its own cache, on a CPU.

::

    python -m benchmarks.hybrids                # random weights, some 4 minutes on two cores
    python -m benchmarks.hybrids --small        # runs in a moment
    python -m benchmarks.hybrids --json FILE
    python -m benchmarks.hybrids --scans        # native scans beside torch's, one to two minutes

A Qwen3.5 of 0.53 billion random weights in bfloat16: 24 layers of 1,024, three in four of them
gated delta nets with 16 heads of 128 x 128, a vocabulary of 32,000. Both compute the same tokens of
the same checkpoint, by turns in one process. ``transformers`` gets the best that its cache allows:
the shared prefix is computed once and copied for each use, and 16 continuations are one batch.

============  ===================================================================================
first cold    to the first token of 2,048 + 64 tokens, nothing cached
first warm    the same, with the 2,048 cached
16 shared     16 prompts of 64 tokens behind the cached 2,048, until all have a first token
decode 1, 16  one step of so many sequences behind them
============  ===================================================================================

``--scans`` computes the first token of 2,048 tokens, and steps of 16 sequences, with layers of
states as operations and with the modules and scans of ``transformers``, by turns in two engines:
four layers of Qwen3.5 (32 heads of 128 x 128) and of Granite 4 (64 heads of 64 x 128), each with
2,048 channels and one layer of attention.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    PreTrainedConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from benchmarks.command_line import by_turns, parser_of, write_json
from benchmarks.greedy import greedy
from ostinato import LLM
from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine.requests.request_state import RequestState
from ostinato.runner.forward.stand_ins import Unknown

SIZES = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
STATES = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
VOCAB_SIZE = 32_000
BODY = {
    "hidden_size": 2048, "num_hidden_layers": 4, "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
GRANITE = {
    "layer_types": ["mamba", "mamba", "mamba", "attention"], "mamba_n_heads": 64,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 0,
    "num_experts_per_tok": 0, "shared_intermediate_size": 8192, "num_key_value_heads": 8,
    "position_embedding_type": "nope",
}  # fmt: skip

NATIVE_SCANS = "ostinato.runner.states.recurrences.native_for"
OPERATIONS = "ostinato.runner.forward.structure.mixer_of"

Prompts = list[list[int]]
Figures = dict[str, float]


def make_checkpoint(folder: Path, small: bool) -> Path:
    """Write random weights; returns the folder."""
    torch.manual_seed(0)
    sizes = {**SIZES, **HEADS, **STATES, **(SMALL if small else {})}
    config = Qwen3_5TextConfig(
        **sizes, vocab_size=VOCAB_SIZE, tie_word_embeddings=True, max_position_embeddings=16_384
    )
    model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    print(f"{model.num_parameters() / 1e9:.2f} billion weights")
    model.save_pretrained(folder)
    return folder


class Ours:
    """Ostinato, through ``LLM.generate``."""

    def __init__(self, path: Path) -> None:
        """Load the checkpoint."""
        self.llm = LLM(str(path), dtype="bfloat16", kv_cache_memory=3 * 2**30, max_num_seqs=16)

    def forget(self) -> None:
        """Drop what is cached."""
        self.llm.reset_prefix_cache()

    def prepare(self, prefix: list[int]) -> None:
        """Cache a prefix, as a request before would have."""
        self._generate([[*prefix, 5]], 1)

    def first_tokens(self, prefix: list[int], own: Prompts) -> list[int]:
        """Return the first token behind each prompt."""
        return [tokens[0] for tokens in self._generate([[*prefix, *each] for each in own], 1)]

    def decode(self, prefix: list[int], own: Prompts, num_steps: int) -> float:
        """Return the seconds of one step behind the first tokens, the median of ``num_steps``."""
        engine, times = self.llm.engine, list[float]()
        step, execute = engine.step, engine.runner.execute
        is_decode = [False]

        def noted(plan: StepPlan) -> StepResult:
            is_decode[0] = plan.num_tokens == len(plan.sequences) == len(own)
            return execute(plan)

        def timed() -> list[RequestState]:
            begin_s = time.perf_counter()
            results = step()
            if is_decode[0]:
                times.append(time.perf_counter() - begin_s)
            return results

        engine.step, engine.runner.execute = timed, noted
        self._generate([[*prefix, *each] for each in own], num_steps + 1)
        engine.step, engine.runner.execute = step, execute
        return median(times)

    def _generate(self, prompts: Prompts, num_tokens: int) -> list[Sequence[int]]:
        outputs = self.llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


class Theirs:
    """``transformers``, with its own cache and attention."""

    def __init__(self, path: Path) -> None:
        """Load the checkpoint."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self._model, self._kept = model.eval(), None

    def forget(self) -> None:
        """Drop what is cached."""
        self._kept = None

    @torch.inference_mode()
    def prepare(self, prefix: list[int]) -> None:
        """Compute a prefix and keep its cache."""
        self._kept = self._model(torch.tensor([prefix]), use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def first_tokens(self, prefix: list[int], own: Prompts) -> list[int]:
        """Return the first token behind each prompt."""
        return self._prefill(prefix, own).logits[:, -1].argmax(-1).tolist()

    @torch.inference_mode()
    def decode(self, prefix: list[int], own: Prompts, num_steps: int) -> float:
        """Return the seconds of one step behind the first tokens, the median of ``num_steps``."""
        output, times = self._prefill(prefix, own), []
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            output = self._model(tokens, past_key_values=output.past_key_values, use_cache=True)
            times.append(time.perf_counter() - begin_s)
        return median(times)

    def _prefill(self, prefix: list[int], own: Prompts) -> Any:
        if self._kept is None:
            (prompt,) = own
            whole = torch.tensor([[*prefix, *prompt]])
            return self._model(whole, use_cache=True, logits_to_keep=1)
        cache = copy.deepcopy(self._kept.past_key_values)
        cache.reorder_cache(torch.zeros(len(own), dtype=torch.int64))
        rows = torch.tensor(own)
        return self._model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1)


def measure(engines: dict[str, Ours | Theirs], small: bool, rounds: int) -> dict[str, Figures]:
    """Return milliseconds by measure and engine: medians, the engines by turns."""
    rng = np.random.default_rng(0)

    def draw(num_tokens: int) -> list[int]:
        return rng.integers(3, VOCAB_SIZE, num_tokens).tolist()

    num_shared, num_steps = (128, 3) if small else (2048, 16)
    results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        prefix, own = draw(num_shared), [draw(64) for _ in range(17)]
        for name, engine in engines.items():
            engine.forget()
            results["first cold"][name].append(_ms(engine.first_tokens, prefix, own[16:]))
            engine.prepare(prefix)
            results["first warm"][name].append(_ms(engine.first_tokens, prefix, own[:1]))
            results["16 shared"][name].append(_ms(engine.first_tokens, prefix, own[:16]))
            for number in (1, 16):
                step_s = engine.decode(prefix, own[:number], num_steps)
                results[f"decode {number}"][name].append(1e3 * step_s)
    return {
        name: {engine: median(times) for engine, times in row.items()}
        for name, row in results.items()
    }


def _ms(call: Callable[..., object], *arguments: object) -> float:
    begin_s = time.perf_counter()
    call(*arguments)
    return 1e3 * (time.perf_counter() - begin_s)


def compare_scans(small: bool, rounds: int) -> None:
    """Print the milliseconds of prompts and of steps with native scans and torch's, by turns."""
    states = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    body = BODY | ({"hidden_size": 64} if small else {})
    qwen = Qwen3_5TextConfig(**body, **HEADS, **states, intermediate_size=6144)
    granite = GraniteMoeHybridConfig(**body, **GRANITE, mamba_expand=4096 // body["hidden_size"])
    settings = {"kv_cache_memory": 2**30, "max_num_batched_tokens": 4096, "weight_cache_bytes": 0}
    works = {"first token": (1, 128 if small else 2048, 1), "step of 16": (16, 32, 32)}
    table = Table("ms", "work", "native", "torch", "times as fast", "CPU times as fast")
    for (name, config), work in product({"qwen3.5": qwen, "granite 4": granite}.items(), works):
        num_prompts, length, num_tokens = works[work]
        with TemporaryDirectory() as folder:
            _write_random(config, folder)
            engines = {"native": LLM(folder, dtype="bfloat16", **settings)}
            with patch(OPERATIONS, side_effect=Unknown("its modules are measured")):
                engines["torch"] = LLM(folder, dtype="bfloat16", **settings)
        rng = np.random.default_rng(0)
        prompts = rng.integers(3, VOCAB_SIZE, (num_prompts, length)).tolist()
        calls = {name: partial(_times, llm, prompts, num_tokens) for name, llm in engines.items()}
        times = by_turns(calls, rounds)
        (wall, torch_wall), (cpu, torch_cpu) = (
            [median(each[place] for each in measured) for measured in times.values()]
            for place in (0, 1)
        )
        table.add_row(
            name, work, f"{1e3 * wall:,.0f}", f"{1e3 * torch_wall:,.0f}",
            f"{torch_wall / wall:.2f}", f"{torch_cpu / cpu:.2f}",
        )  # fmt: skip
    Console().print(table)


def _times(llm: LLM, prompts: Prompts, num_tokens: int) -> tuple[float, float]:
    """Return wall and processor seconds of a step, on an empty cache."""
    llm.reset_prefix_cache()
    with patch(NATIVE_SCANS, return_value=None):  # not those of operations
        begin = time.perf_counter(), time.process_time()
        llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
        wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
    return wall / num_tokens, cpu / num_tokens


def _write_random(config: PreTrainedConfig, folder: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def show(figures: dict[str, Figures]) -> None:
    """Print a table, with how many times as fast ours is."""
    table = Table("ms", "ostinato", "transformers", "times as fast")
    for name, row in figures.items():
        ours, theirs = row["ostinato"], row["transformers"]
        table.add_row(name, f"{ours:,.1f}", f"{theirs:,.1f}", f"{theirs / ours:.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure and print."""
    parser = parser_of(__doc__, rounds=3, has_json=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scans", action="store_true")
    options = parser.parse_args(arguments)
    if options.scans:
        compare_scans(options.small, options.rounds)
        return
    with TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), options.small)
        engines: dict[str, Ours | Theirs] = {"ostinato": Ours(path), "transformers": Theirs(path)}
    figures = measure(engines, options.small, options.rounds)
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

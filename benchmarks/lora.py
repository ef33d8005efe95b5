"""Speed of a batch that mixes adapters, beside the base model's.

::

    python -m benchmarks.lora CHECKPOINT                  # 16 requests, four adapters of rank 16
    python -m benchmarks.lora CHECKPOINT --requests 32 --rank 64 --rounds 7
    python -m benchmarks.lora CHECKPOINT --specialists    # ten activated ones over one context
    python -m benchmarks.lora CHECKPOINT --json FILE

The same prompts run with the base model, with one adapter and with four by turns, in one process,
so that a busy machine slows all down. Each request has 128 prompt tokens and 32 answers; every
linear layer of the decoder and all experts are adapted. Figures are medians of tokens per second of
processor time.

``--specialists`` asks ten activated adapters, one after the other, a question on one context of
4,096 tokens, and gives computed prompt tokens and processor time until the first token, of the
first one and of the others.
``benchmarks/peers/checkpoint.py`` makes a checkpoint.
"""

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command_line import by_turns, parser_of, write_json
from benchmarks.greedy import greedy
from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.runner.experts.mixture import stacks_by_name

NUM_ADAPTERS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 128, 32
NUM_SPECIALISTS, CONTEXT_TOKENS, INVOCATION = 10, 4096, [7, 8, 9]
Figures = dict[str, float]


def save_adapter(checkpoint: Path, folder: Path, rank: int, seed: int, **more: object) -> Path:
    """Write an adapter of all linear layers and experts of the decoder, as ``peft`` does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    layers: list[tuple[str, int, int, int]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            layers.append((name, rank, module.in_features, module.out_features))
        for wrapper, own in zip((".base_layer", ""), stacks_by_name(module).values(), strict=False):
            size = own.num_experts * rank, own.in_features, own.num_parts * own.part_rows
            layers.append((f"{name}{wrapper}", *size))
    for name, ranks, inputs, outputs in layers:
        for part, shape in (("A", (ranks, inputs)), ("B", (outputs, ranks))):
            weights = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = weights.bfloat16()
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def run(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> Figures:
    """Serve prompts together; returns tokens per second of processor time."""
    llm.reset_prefix_cache()
    figures: Figures = {}
    for kind, num_new in (("prefill", 1), ("decode", OUTPUT_TOKENS)):
        before_s = time.process_time()
        llm.generate(prompts, greedy(num_new), lora_request=adapters, use_tqdm=False)
        took_s = time.process_time() - before_s
        num_tokens = len(prompts) * (PROMPT_TOKENS if kind == "prefill" else OUTPUT_TOKENS)
        figures[kind] = num_tokens / took_s
    return figures


def measure(checkpoint: Path, num_requests: int, rank: int, rounds: int) -> dict[str, Figures]:
    """Run base and mix by turns; returns medians and their ratios."""
    llm = LLM(
        checkpoint, num_blocks=num_requests * 16 + 16, max_model_len=1024,
        max_num_batched_tokens=num_requests * PROMPT_TOKENS, keep_explanations=0, ghost_blocks=0,
        enable_lora=True, max_lora_rank=rank,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    size = (num_requests, PROMPT_TOKENS)
    prompts = torch.randint(10, llm.engine.loaded.vocab_size, size, generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            save_adapter(checkpoint, Path(folder) / str(i), rank, i) for i in range(NUM_ADAPTERS)
        ]
        requests = [LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(paths)]
        mix: list[LoRARequest | None] = [requests[i % NUM_ADAPTERS] for i in range(num_requests)]
        kinds: dict[str, list[LoRARequest | None]] = {
            "base": [None] * num_requests, "one": mix[:1] * num_requests, "mix": mix
        }  # fmt: skip
        runs = {kind: partial(run, llm, prompts, adapters) for kind, adapters in kinds.items()}
        seen = by_turns(runs, rounds)
    print(llm.engine.compute_path)
    results = {
        kind: {part: median(one[part] for one in each) for part in ("prefill", "decode")}
        for kind, each in seen.items()
    }
    base = results["base"]
    ratios = {
        f"{kind}/base": {part: results[kind][part] / base[part] for part in base}
        for kind in ("one", "mix")
    }
    return results | ratios


def measure_specialists(checkpoint: Path, rank: int) -> dict[str, Figures]:
    """Ask specialists in turn; returns the first one's figures and the others' medians."""
    llm = LLM(
        checkpoint, num_blocks=512, max_model_len=CONTEXT_TOKENS + 256, enable_lora=True,
        max_lora_rank=rank, keep_explanations=0, ghost_blocks=0,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    vocab_size, generator = llm.engine.loaded.vocab_size, torch.Generator().manual_seed(0)
    context = torch.randint(10, vocab_size, (CONTEXT_TOKENS,), generator=generator).tolist()
    prompt, seen = [*context, *INVOCATION, *context[:29]], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, NUM_SPECIALISTS + 1):
            more = {"alora_invocation_tokens": INVOCATION}
            path = save_adapter(checkpoint, Path(folder) / str(number), rank, number, **more)
            request = LoRARequest(path.name, number, path)
            llm.add_lora(request)
            before_s = time.process_time()
            [output] = llm.generate([prompt], params, lora_request=request, use_tqdm=False)
            took_s = time.process_time() - before_s
            seen.append({"computed": len(prompt) - output.num_cached_tokens, "seconds": took_s})
    others = {name: median(one[name] for one in seen[1:]) for name in seen[0]}
    return {"first": seen[0], "others": others}


def main() -> None:
    """Read the command line, measure, and print a table."""
    parser = parser_of(__doc__, rounds=5, has_json=True)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--specialists", action="store_true")
    options = parser.parse_args()
    if options.specialists:
        results = measure_specialists(options.checkpoint, options.rank)
        table = Table("specialist", "computed tokens", "processor time, s")
    else:
        results = measure(options.checkpoint, options.requests, options.rank, options.rounds)
        table = Table("", "prefill, tokens/s", "decode, tokens/s")
    for kind, figures in results.items():
        table.add_row(kind, *(f"{figure:,.4g}" for figure in figures.values()))
    Console().print(table)
    write_json(options.json, results)


if __name__ == "__main__":
    main()

"""Times one block of experts of a shape, as modules of transformers and as own products.

    python -m benchmarks.experts --hidden 2048 --inner 768 --experts 128 --formats plain,int4

Each call has other random rows, so that its experts are read from memory; the fastest of a format's
calls counts. The second figure is the rate at which weights are read, had each pair of a row and an
expert another expert, up to all of them.
"""

import argparse
import time
from typing import cast

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.command_line import parser_of
from ostinato.runner.experts.mixture import PackedExperts
from ostinato.runner.forward.packing import pack_linears, pack_plain
from ostinato.runner.forward.quantized import Quantization


def block_of(arguments: argparse.Namespace) -> nn.Module:
    """Return a block with random weights in bfloat16."""
    config = Qwen3MoeConfig(
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.inner,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config).bfloat16()
    block = block.to_empty(device="cpu").eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=0.02)
    return block


def fastest(block: nn.Module, num_rows: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return seconds of the fastest call, and the bytes of active weights that it reads."""
    rows = torch.randn(1, num_rows, arguments.hidden).bfloat16()
    experts = cast(nn.Module, block.experts)
    begin = time.perf_counter()
    block(rows)
    seconds = time.perf_counter() - begin
    num_bytes = sum(p.nbytes for p in experts.parameters())
    if isinstance(experts, PackedExperts):
        num_bytes = sum(part.packed.nbytes for part in experts.parts.values())
    active = min(arguments.experts, num_rows * arguments.top_k)
    return seconds, num_bytes * active / arguments.experts


def main() -> None:
    """Print a table."""
    parser = parser_of(__doc__, threads=2)
    for name, default in (("hidden", 2048), ("inner", 768), ("experts", 128), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="1,16,2048")
    parser.add_argument("--formats", default="modules,plain,int4,w4a8")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    counts = [int(count) for count in arguments.rows.split(",")]
    print("| rows |", " | ".join(f"{count}, ms (GB/s)" for count in counts), "|")
    for format_name in arguments.formats.split(","):
        block = block_of(arguments)
        if format_name != "modules":
            is_plain = format_name == "plain"
            pack_linears(block, pack_plain if is_plain else Quantization.named(format_name))
        cells = []
        with torch.inference_mode():
            for count in counts:
                calls = [fastest(block, count, arguments) for _ in range(3 if count > 64 else 40)]
                seconds, num_bytes = min(calls)
                cells.append(f"{1000 * seconds:.2f} ({num_bytes / seconds / 1e9:.1f})")
        print(f"| {format_name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()

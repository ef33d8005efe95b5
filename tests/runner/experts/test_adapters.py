"""Updates of packed experts and routers are those of merged weights, each row by itself."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ostinato.runner.adapters import lora
from ostinato.runner.adapters.module_updates import hook_updates
from ostinato.runner.experts.mixture import PackedExperts, stacks_by_name
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.forward.packing import pack_linears, pack_plain
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.settings import QuantizationName
from tests.runner.experts.test_mixture import WIDTH, block_of, distance, rows_of
from tests.support.instruction_sets import isa, needs_library

__all__ = ["isa"]
pytestmark = [needs_library, pytest.mark.usefixtures("isa")]

NUM_ROWS, TOP_K = 60, 3
SPANS = [(0, 5, 0), (6, 30, 1), (33, NUM_ROWS, 0)]


class Adapted:
    """A module with the adapters of a step, which a test sets."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        adapters: list[lora.LoraAdapter],
        around: nn.Module | None = None,
    ) -> None:
        self._adapters, self._module = adapters, around or module
        self.step: lora.StepAdapters | None = None
        hook_updates(name, module, adapters[0], lambda: self.step)

    def __call__(self, spans: list[tuple[int, int, int]], *inputs: Tensor) -> Any:
        segments = tuple(lora.AdapterSegment(a, b, self._adapters[n]) for a, b, n in spans)
        self.step = lora.StepAdapters(segments) if segments else None
        with torch.inference_mode():
            return self._module(*inputs)


def adapters_of(
    layers: list[dict[str, lora.LoraLayer]], packs: bool = True
) -> tuple[list[lora.LoraAdapter], list[lora.LoraAdapter]]:
    """Adapters as the library reads them (in float16 it reads none), and in float64."""
    exact = [
        {n: lora.LoraLayer(o.down.double(), o.up.double(), o.scale) for n, o in each.items()}
        for each in layers
    ]
    packed = [lora.LoraAdapter(b"", 1, lora.pack_layers(o) if packs else o, (), 0) for o in layers]
    return packed, [lora.LoraAdapter(b"", 1, each, (), 0) for each in exact]


def layer(rank: int, width: int, height: int, dtype: torch.dtype) -> lora.LoraLayer:
    return lora.LoraLayer(
        torch.randn(rank, width).to(dtype), (0.1 * torch.randn(height, rank)).to(dtype), 0.5
    )


def expert_layers(module: nn.Module, dtype: torch.dtype) -> list[dict[str, lora.LoraLayer]]:
    """Rank 3 of all experts, ten of which share a tile; rank 40 of the gates of some, and 5."""
    stacks = stacks_by_name(module)
    name, gate_up = next(iter(stacks.items()))
    count, inner = gate_up.num_experts, gate_up.part_rows
    first: dict[str, lora.LoraLayer] = {}
    for expert in range(count):
        own = layer(3, WIDTH, gate_up.num_outputs, dtype)
        up = gate_up.arranged(own.up).contiguous()
        first[f"experts[{expert}].{name}"] = lora.LoraLayer(own.down, up, own.scale)
        first[f"experts[{expert}].down_proj"] = layer(3, inner, WIDTH, dtype)
    gates = (0, 3) if name == "gate_up_proj" else ()
    second = {f"experts[{e}].gate_proj": layer(40, WIDTH, inner, dtype) for e in gates}
    second |= {f"experts[{e}].up_proj": layer(5, WIDTH, inner, dtype) for e in (0, 1, 7)}
    return [first, second]


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float16", "int8", "int4", "w4a8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_updates_of_experts_are_those_of_merged_weights(family: str, name: str):
    """Rows of two adapters and of none; alone, each of them has the same bits."""
    is_plain = name.startswith(("bf", "fl"))
    dtype = getattr(torch, name) if is_plain else torch.bfloat16
    block = block_of(family, dtype)
    pack_linears(
        block, pack_plain if is_plain else Quantization.named(cast(QuantizationName, name))
    )
    experts = next(m for m in block.modules() if isinstance(m, PackedExperts))
    exact = copy.deepcopy(experts.unpacked()).double()
    packed, plain = adapters_of(expert_layers(experts, dtype), name != "float16")
    ours, reference = Adapted("experts", experts, packed), Adapted("experts", exact, plain)

    rows = rows_of(NUM_ROWS, dtype)
    chosen = torch.stack([torch.randperm(8)[:TOP_K] for _ in range(NUM_ROWS)])
    weights = torch.rand(NUM_ROWS, TOP_K)
    together = ours(SPANS, rows, chosen, weights)
    expected = reference(SPANS, rows.double(), chosen, weights.double())
    near = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}.get(name, 5e-2)
    assert distance(together, expected) < near
    base = ours([], rows, chosen, weights)
    assert distance(base, expected) > 0.1
    assert torch.equal(together[[5, 30, 31, 32]], base[[5, 30, 31, 32]]), "the base model's"
    for row, own in ((0, 0), (4, 0), (7, 1), (29, 1), (59, 0)) if name != "float16" else ():
        alone = ours([(0, 1, own)], *(each[row : row + 1] for each in (rows, chosen, weights)))
        assert torch.equal(alone[0], together[row])


def test_many_rows_of_adapters_go_in_several_chunks_with_the_same_bits():
    """2,048 pairs of a row and an expert are a chunk; here are 2,700."""
    block, rows = block_of("qwen3_moe", torch.bfloat16), rows_of(900, torch.bfloat16)
    pack_linears(block)
    experts = next(m for m in block.modules() if isinstance(m, PackedExperts))
    packed, _ = adapters_of(expert_layers(experts, torch.bfloat16))
    ours = Adapted("experts", experts, packed)
    chosen = torch.stack([torch.randperm(8)[:TOP_K] for _ in rows])
    inputs = rows, chosen, torch.rand(chosen.shape)
    together = ours([(0, 300, 0), (400, 900, 1)], *inputs)
    for first, spans in ((0, [(0, 100, 0)]), (300, []), (850, [(0, 50, 1)])):
        part = ours(spans, *(each[first : first + 100] for each in inputs))
        assert torch.equal(part, together[first : first + 100])


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe", "hunyuan_v1_moe"]
)
def test_an_update_of_a_router_changes_the_choice_of_its_rows(family: str):
    block = block_of(family, torch.float32)
    rows, routed = rows_of(NUM_ROWS, torch.float32), copy.deepcopy(block).double()
    pack_linears(block)
    name, router = next((n, m) for n, m in block.named_modules() if isinstance(m, PackedRouter))
    name += router.suffix
    both = [{name: layer(rank, WIDTH, 8, torch.float32)} for rank in (2, 4)]
    packed, plain = adapters_of(both)
    ours = Adapted(name, router, packed)
    own = routed.get_submodule(name.removesuffix(router.suffix))
    reference = Adapted(name, routed.get_submodule(name), plain, own)
    logits, _, chosen = ours(SPANS, rows)
    exact = reference(SPANS, rows.double())
    assert distance(logits, exact[0]) < 2e-6
    base = ours([], rows)
    assert torch.equal(logits[[5, 30]], base[0][[5, 30]]) and not torch.equal(chosen, base[2])
    assert torch.equal(ours([(0, 1, 1)], rows[7:8])[2][0], chosen[7])

"""Experts and routers compute what those of transformers do, each row by itself."""

from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn

from ostinato.runner.experts.mixture import (
    PackedExperts,
    is_experts,
    pack_mixtures,
    why_modules,
)
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.forward.packing import pack_linears, pack_plain, unpack_linears
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.forward.weight_refs import replace_weights, weight_bytes, weight_places
from ostinato.runner.settings import QuantizationName
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import make_config

pytestmark = [needs_library, pytest.mark.usefixtures("isa")]

WIDTH, INNER = 48, 40
_SIZES: dict[str, Any] = {
    **{"num_key_value_heads": 4, "head_dim": 12},
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), INNER),
    "moe_shared_expert_intermediate_size": INNER,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 3),
    "moe_num_experts": 8,
}
_GROUPS: dict[str, Any] = {
    **{"first_k_dense_replace": 0, "num_dense_layers": 0},
    **{"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1},
}
_MLA: dict[str, Any] = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{**_GROUPS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": True},
    **{name: {} for name in ("qwen3_next", "mixtral", "olmoe", "gpt_oss", "granitemoe")},
    **{name: {} for name in ("granitemoehybrid", "granitemoeshared", "flex_olmo", "mellum")},
    **{name: {} for name in ("minimax_m2", "hunyuan_v1_moe", "jamba", "aria_text")},
    **{name: _GROUPS for name in ("glm4_moe", "dots1", "exaone_moe", "solar_open", "laguna")},
    **{name: _GROUPS for name in ("afmoe", "hy_v3")},
    **{name: _MLA for name in ("deepseek_v3", "glm4_moe_lite")},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "mistral4": {**_MLA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "phimoe": {"num_experts_per_tok": 2},
    "cohere2_moe": {"expert_selection_fn": "softmax", "num_shared_experts": 0},
    "cohere2_moe sigmoid": {"expert_selection_fn": "sigmoid", "num_shared_experts": 1},
    "laguna capped": {**_GROUPS, "moe_router_logit_softcapping": 2.0},
    "minimax_m3_vl_text": {**_GROUPS, "swiglu_limit": 1.5},
    **{name: {**_GROUPS, "routed_scaling_factor": 2.5} for name in ("lfm2_moe", "nemotron_h")},
    "flint": {"norm_topk_prob": True},
    "kolibri1": {**_GROUPS, "norm_topk_prob": True},
}
"""How configs differ from those of ``model_families``."""

ALONE = ["qwen2_moe", "gpt_oss", "deepseek_v3", "granitemoe", "phimoe", "lfm2_moe", "nemotron_h"]


def block_of(family: str, dtype: torch.dtype) -> nn.Module:
    """The block of a tiny model's first layer that has experts, with random weights."""
    torch.manual_seed(0)
    config = make_config(family.partition(" ")[0], **{**_SIZES, **FAMILIES[family]})
    config._experts_implementation = "eager"
    model = transformers.AutoModel.from_config(config)
    for block in model.modules():
        if any(is_experts(child) for child in block.children()):
            for name, tensor in (*block.named_parameters(), *block.named_buffers()):
                tensor.data.normal_(std=0.02 if "bias" in name else 0.3)
            return block.to(dtype).eval().requires_grad_(False)
    raise AssertionError(f"{family} has no experts")


def call(block: nn.Module, rows: Tensor) -> Tensor:
    with torch.inference_mode():
        result = block(rows[None])
    return cast(Tensor, result[0] if isinstance(result, tuple) else result)[0]


def rows_of(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_block_computes_what_the_block_does_in_float64(family: str):
    """Router, experts and what composes them: float32 differs by its rounding alone."""
    block, rows = block_of(family, torch.float32), rows_of(19, torch.float32)
    exact = call(block_of(family, torch.float64), rows.double())
    assert pack_mixtures(block, pack_plain) == 1
    assert any(isinstance(module, PackedRouter) for module in block.modules())
    assert distance(call(block, rows), exact) < 2e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_a_packed_block_is_as_near_as_the_block_itself(family: str):
    """Rows whose choice rounding changes are left out: they are right either way."""
    block, rows = block_of(family, torch.bfloat16), rows_of(19, torch.bfloat16)
    exact = call(block.double(), rows.double())
    own = call(block.bfloat16(), rows)
    pack_linears(block)
    packed = call(block, rows)
    near = (own.double() - exact).norm(dim=1) < 0.05 * exact.norm(dim=1)
    near &= (packed.double() - exact).norm(dim=1) < 0.05 * exact.norm(dim=1)
    assert int(near.sum()) >= 14
    assert distance(packed[near], exact[near]) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ALONE)
def test_a_row_alone_equals_that_row_in_any_batch(family: str, dtype: torch.dtype):
    """Also where experts have many rows in one batch, one in another, and go in other chunks."""
    block, rows = block_of(family, dtype), rows_of(70, dtype)
    pack_linears(block)
    together = call(block, rows)
    for count in (1, 2, 7, 33):
        assert torch.equal(call(block, rows[:count]), together[:count])
    assert torch.equal(call(block, rows[40:41]), together[40:41])


def test_many_rows_go_in_several_chunks_with_the_same_bits():
    """2,048 pairs of a row and an expert are a chunk; here are 4,500."""
    block, rows = block_of("mixtral", torch.bfloat16), rows_of(1500, torch.bfloat16)
    pack_linears(block)
    together = call(block, rows)
    parts = [call(block, part) for part in rows.split(100)]
    assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("name", ["int8", "int4", "w8a8", "w4a8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", *ALONE[-3:]])
def test_experts_of_few_bits_stay_near_and_keep_each_rows_bits(family: str, name: QuantizationName):
    """The codes' own error is what is allowed: half a step of 8 or 4 bits."""
    block, rows = block_of(family, torch.bfloat16), rows_of(40, torch.bfloat16)
    exact = call(block, rows)
    pack_linears(block, Quantization.named(name))
    experts = next(m for m in block.modules() if isinstance(m, PackedExperts))
    assert experts.parts["down_proj"].packed.nbytes < WIDTH * 64 * 8 * 1.4
    together = call(block, rows)
    size = exact.double().norm(dim=1)
    away = (together.double() - exact.double()).norm(dim=1) / size
    assert float(away.median()) < (0.03 if name.startswith(("int8", "w8")) else 0.25)
    for count in (1, 3, 17):
        assert torch.equal(call(block, rows[:count]), together[:count])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "hunyuan_v1_moe", "nemotron_h"])
def test_packed_experts_have_the_names_and_numbers_of_the_plain_ones(family: str):
    """So that weights can be saved, loaded, replaced, and unpacked again."""
    block, rows = block_of(family, torch.float32), rows_of(5, torch.float32)
    plain = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    pack_linears(block)
    saved = block.state_dict()
    assert saved.keys() == plain.keys() == weight_places(block).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())
    before = call(block, rows)
    replace_weights(block, {name: tensor * 0.5 for name, tensor in plain.items()})
    assert not torch.equal(call(block, rows), before)
    block.load_state_dict(plain)
    assert torch.equal(call(block, rows), before)
    assert weight_bytes(block) >= sum(tensor.nbytes for tensor in plain.values())
    unpack_linears(block)
    assert not any(isinstance(m, (PackedExperts, PackedRouter)) for m in block.modules())
    assert all(torch.equal(block.state_dict()[name], tensor) for name, tensor in plain.items())


def test_numbers_that_are_none_choose_experts_that_there_are():
    """A NaN in one row changes no other row, and no memory beyond the experts is read."""
    block, rows = block_of("qwen3_moe", torch.float32), rows_of(4, torch.float32)
    pack_linears(block)
    whole = call(block, rows)
    rows[1] = torch.nan
    broken = call(block, rows)
    assert bool(broken[1].isnan().all())
    assert torch.equal(broken[[0, 2, 3]], whole[[0, 2, 3]])


def test_an_id_beyond_the_experts_is_a_bug_that_is_caught():
    """The library trusts its arguments, so they are checked before."""
    block = block_of("qwen3_moe", torch.float32)
    pack_linears(block)
    experts = next(m for m in block.modules() if isinstance(m, PackedExperts))
    with pytest.raises(AssertionError, match="no such expert"):
        experts(rows_of(1, torch.float32), torch.tensor([[8]]), torch.ones(1, 1))


def test_experts_that_gate_otherwise_stay_modules_with_the_reason():
    """Their class has a gate of its own, which nothing here computes."""
    block = block_of("qwen3_moe", torch.float32)
    experts = next(m for m in block.modules() if is_experts(m))
    own = type("OwnExperts", (type(experts),), {"_apply_gate": lambda self, both: both})
    experts.__class__ = own
    pack_linears(block)
    assert not any(isinstance(m, PackedExperts) for m in block.modules())
    assert why_modules(block) == "OwnExperts gates in a way of its own"

"""Quantized checkpoints compute what they compute in transformers, or are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM, PreTrainedModel

from ostinato import LLM, SamplingParams
from ostinato.errors import UnsupportedModel
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import pack_linears
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.stand_ins import Unknown
from ostinato.runner.forward.structure import describe_decoder
from ostinato.runner.model_loader import load_model
from ostinato.runner.quantization import change_by_neighbours, check_quantization, check_rows
from tests.runner.bench import Bench, random_prompt
from tests.support.models.checkpoints import Checkpoints, make_config
from tests.support.models.quantized import BY_TENSOR, BY_TOKEN, STATIC, save_w8a8

PROMPT = random_prompt(1, 40)


def own_logits(path: Path, dtype: str) -> Tensor:
    """What transformers alone computes, quantiser included."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1].double()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", [BY_TOKEN, STATIC, None], ids=["token", "static", "none"])
def test_quantized_activations_are_computed_as_transformers_does(
    activations: Any, dtype: Any, tmp_path: Path
):
    """Not with plain activations, which are nearer to the unquantized model and another one."""
    pytest.importorskip("compressed_tensors")
    path = save_w8a8(tmp_path / "w8a8", activations=activations, dtype=dtype)
    expected = own_logits(path, dtype)

    loaded = load_model(path, dtype)
    bench = Bench(loaded)
    (found,) = bench.logits(bench.sequence(PROMPT).next(len(PROMPT), sample=True))

    assert distance(found.double(), expected) < (0.15 if dtype == "bfloat16" else 0.03)
    quantized = loaded.model.model.layers[0].mlp.up_proj
    assert isinstance(quantized, PackedLinear) == (activations != STATIC)


def test_a_quantized_model_generates_what_generate_does(tmp_path: Path):
    """Cold, then with hits, in float64, where no rounding decides between two steps of 8 bits."""
    pytest.importorskip("compressed_tensors")
    path = save_w8a8(tmp_path / "w8a8", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    (expected,) = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    llm = LLM(path, dtype="float64", block_size=4, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    for cached in (0, 36):
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected[len(PROMPT) :].tolist()
        assert output.num_cached_tokens >= cached


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
            r"LLM\.int8 .*keys depend on other requests.*4 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"input_activations": BY_TENSOR}},
            },
            r"dynamically over the whole tensor.*per token",
        ),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC},
            r"kv_cache_scheme.*kv_cache_dtype",
        ),
    ],
    ids=["LLM.int8", "dynamic per tensor", "keys and values"],
)
def test_a_scheme_that_mixes_requests_is_refused_before_weights_are_read(
    settings: dict[str, Any], said: str, checkpoints: Checkpoints, tmp_path: Path
):
    """The config is all there is."""
    config = make_config("llama").to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(
        (checkpoints.path("gpt2") / "model.safetensors").read_bytes()
    )

    with pytest.raises(UnsupportedModel, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"input_activations": BY_TOKEN}},
        },
    ],
)
def test_a_scheme_that_computes_each_token_by_itself_passes(settings: dict[str, Any]):
    config = make_config("llama")
    config.quantization_config = settings

    check_quantization(config)


@torch.no_grad()
def test_rows_that_share_a_scale_are_found_by_trying():
    """Whatever the config says: one scale over all rows, as unknown quantisers may have."""

    class Rounding(nn.Linear):
        def __init__(self, is_shared: bool) -> None:
            super().__init__(16, 8)
            self.is_shared = is_shared

        def forward(self, rows: Tensor) -> Tensor:
            largest = rows.abs().amax() if self.is_shared else rows.abs().amax(-1, keepdim=True)
            return super().forward((rows / largest * 127).round() * largest / 127)

    rows = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    for module, is_refused in ((Rounding(True), True), (Rounding(False), False)):
        change = change_by_neighbours(module, rows, module(rows))
        assert (change is not None) == is_refused
    plain = nn.Linear(16, 8)
    assert change_by_neighbours(plain, rows, plain(rows)) is None


@torch.no_grad()
def test_rows_without_a_batch_share_a_scale_in_compressed_tensors(tmp_path: Path):
    """Shared experts are called so; "per token" then is "per tensor", whatever the config says."""
    pytest.importorskip("compressed_tensors")
    model = AutoModelForCausalLM.from_pretrained(save_w8a8(tmp_path / "w8a8"))
    rows = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(0))
    model(torch.tensor([PROMPT]))  # unpacks the weights
    layer = model.model.layers[0].mlp.up_proj

    assert change_by_neighbours(layer, rows, layer(rows)) is None
    assert change_by_neighbours(layer, rows[0], layer(rows[0])) is not None


@torch.no_grad()
def test_a_layer_that_mixes_requests_is_refused_by_its_name(tmp_path: Path):
    """The config says nothing of it; only what it computes does."""
    pytest.importorskip("compressed_tensors")
    model = AutoModelForCausalLM.from_pretrained(save_w8a8(tmp_path / "w8a8"))
    model(torch.tensor([PROMPT]))  # unpacks the weights
    layer = model.model.layers[1].mlp.down_proj
    own_forward = layer.forward
    layer.forward = lambda rows: own_forward(rows[0])[None]

    with (
        pytest.raises(
            UnsupportedModel,
            match=r"layers\.1\.mlp\.down_proj \(Linear\) computes a token differently",
        ),
        check_rows(model),
    ):
        model(torch.tensor([PROMPT]))


class Wrapped(Tensor):
    """A tensor that holds its numbers in another way, as torchao's do."""


def with_weight(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight = nn.Parameter(weight, requires_grad=False)


ALTERATIONS: dict[str, Callable[[nn.Linear], object]] = {
    "hook": lambda own: own.register_forward_hook(lambda _module, _inputs, output: 2 * output),
    "pre-hook": lambda own: own.register_forward_pre_hook(lambda _module, given: (2 * given[0],)),
    "own forward": lambda own: setattr(own, "forward", lambda rows: 2 * rows),
    "scale": lambda own: own.register_parameter("weight_scale", nn.Parameter(torch.ones(1))),
    "parametrization": lambda own: register_parametrization(own, "weight", nn.ReLU()),
    "wrapped weight": lambda own: with_weight(own, own.weight.data.as_subclass(Wrapped)),
    "integers": lambda own: with_weight(own, own.weight.data.to(torch.int8)),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_layer_that_is_not_what_its_class_says_is_never_packed(name: str):
    model = nn.ModuleDict({"plain": nn.Linear(8, 8), "altered": nn.Linear(8, 8)})
    ALTERATIONS[name](cast(nn.Linear, model["altered"]))

    assert is_plain_linear(model["plain"]) and not is_plain_linear(model["altered"])
    assert pack_linears(model) == 1
    assert isinstance(model["plain"], PackedLinear)
    assert not isinstance(model["altered"], PackedLinear)


@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.0.mlp", "model.norm"])
def test_a_model_with_an_altered_part_is_not_fused(part: str, checkpoints: Checkpoints):
    """The fused forward would never call it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoints.path("llama"))
    describe_decoder(model)
    model.get_submodule(part).register_forward_hook(lambda *_: None)

    with pytest.raises(Unknown, match=part):
        describe_decoder(model)

"""The fused forward, the packed modules and the plain ones agree; what is unlike falls back."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ostinato import LLM, SamplingParams
from ostinato.runner.forward import packing, structure
from ostinato.runner.forward.decoder import Mixture
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.stand_ins import MixtureNames, Unknown, check_mixture
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.library import library
from ostinato.runner.native.packed import PackedWeight
from tests.runner.bench import Bench, logits_in_steps, own_logits, random_prompt
from tests.support.models.checkpoints import Checkpoints, make_config
from tests.support.models.model_families import MIXTURES
from tests.support.pairs import pairwise

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library here")

FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2")},
    **{name: (name, {}) for name in ("phi3", "olmo2", "cohere", "starcoder2", "nemotron", "glm")},
    **{name: (name, {}) for name in ("gpt_neox", *MIXTURES)},
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1, "head_dim": 8}),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "granite": (
        "granite",
        {"residual_multiplier": 0.3, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    ),
    "gemma3": ("gemma3_text", {}),
    "neighbours by angles in float32": ("ernie4_5", {}),
    "no RoPE in every fourth layer": ("smollm3", {"num_hidden_layers": 8}),
    "linear RoPE": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
}
"""Models that are fused, by what is special about them."""

SAME = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def difference(found: Tensor, expected: Tensor) -> float:
    """How far rows differ, relative to the spread of their logits: the median in bfloat16, where a
    tie that falls the other way moves a row further, else the most."""
    rough = found.dtype == torch.bfloat16
    found, expected = found.double(), expected.double()
    each = (found - expected).square().mean(1).sqrt() / expected.std(1)
    return float(each.median() if rough else each.max())


def packed_layers(loaded: LoadedModel) -> int:
    return sum(isinstance(module, PackedLinear) for module in loaded.model.modules())


def in_steps(loaded: LoadedModel, prompt: list[int]) -> Tensor:
    return logits_in_steps(Bench(loaded), prompt, (7, 1, len(prompt) - 8))


@pairwise("kind", FUSED, "dtype", ["bfloat16", "float32"])
def test_fused_packed_and_plain_give_the_same_logits(checkpoints: Checkpoints, kind, dtype):
    """Against the model's own attention, in chunks and beside a stranger."""
    family, changes = FUSED[kind]
    path, prompt = checkpoints.path(family, **changes), random_prompt(1, 31)
    plain = load_model(path, dtype, forward="plain")
    packed = load_model(path, dtype, forward="packed")
    fused = load_model(path, dtype)
    expected = own_logits(plain, prompt)

    assert (plain.fused, packed.fused) == (None, None)
    assert (fused.forward.name, fused.forward.reason) == ("fused", "")
    assert packed_layers(plain) == 0 < packed_layers(packed) == packed_layers(fused)
    for loaded in (packed, fused):
        assert difference(in_steps(loaded, prompt), expected) <= SAME[plain.dtype]
        assert difference(own_logits(loaded, prompt), expected) <= SAME[plain.dtype], "modules"


def test_a_model_of_another_build_runs_its_own_modules_and_it_is_said(checkpoints: Checkpoints):
    path, prompt = checkpoints.path("gpt2"), random_prompt(1, 20)

    loaded = load_model(path, "float32")

    assert loaded.fused is None
    assert loaded.forward.name == "packed" and loaded.forward.reason
    expected = own_logits(load_model(path, "float32", forward="plain"), prompt)
    assert difference(in_steps(loaded, prompt), expected) <= 1e-3


ALONE = ["qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "minimax_m2", "phimoe"]


@pytest.mark.parametrize("family", sorted({*ALONE, *MIXTURES}))
def test_a_mixture_is_an_operation(checkpoints: Checkpoints, family: str):
    """Of a router and its experts, and shared ones: no module of the model is called."""
    loaded = load_model(checkpoints.path(family), "bfloat16")
    assert loaded.fused is not None and loaded.forward.reason == ""
    assert loaded.fused.promises_bits
    mixtures = [part for part in loaded.fused.decoder.parts() if isinstance(part, Mixture)]
    assert mixtures and all((part.shared is None) == (family in ALONE) for part in mixtures)


def test_a_mixture_whose_router_is_not_known_is_called_and_it_is_said(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostinato.runner.experts.routers.ROUTERS", {})
    loaded = load_model(checkpoints.path("phimoe"), "float32", weight_cache_bytes=0)
    assert loaded.fused is not None and not loaded.fused.promises_bits
    reason = "mlp is called (PhimoeSparseMoeBlock has a router that is not known)"
    assert reason in loaded.forward.reason


def qwen3_block(change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> type[nn.Module]:
    """A block that changes the rows that it gets, or what it makes of them."""

    def forward(self: Any, rows: Tensor) -> Tensor:
        return change(rows, lambda given: Qwen3MoeSparseMoeBlock.forward(self, given))

    return type("Qwen3Block", (Qwen3MoeSparseMoeBlock,), {"forward": forward})


class RoundingBlock(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, 1)
        _, weights, chosen = self.gate(rows)
        return cast(torch.Tensor, self.experts(rows, chosen, weights.half()))


class HalvedBlock(Qwen2MoeSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.shared_expert.register_forward_hook(lambda _module, _rows, output: output / 2)
        return cast(torch.Tensor, super().forward(hidden_states))


class OtherRowsBlock(Qwen2MoeSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.shared_expert.register_forward_pre_hook(lambda _module, rows: rows[0] + 1)
        return cast(torch.Tensor, super().forward(hidden_states))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Qwen3MoeSparseMoeBlock, ("", 1.0, 1.0)),
        (Qwen2MoeSparseMoeBlock, ("", 1.0, 1.0)),
        (qwen3_block(lambda rows, block: block(rows) * 2), ("", 2.0, 1.0)),
        (HalvedBlock, ("", 1.0, 0.5)),
        (OtherRowsBlock, "gives its shared experts other rows"),
        (
            qwen3_block(lambda rows, block: block(rows).square()),
            "computes more than its experts do",
        ),
        (RoundingBlock, "changes what its router chose"),
        (qwen3_block(lambda rows, block: block(rows + 1)), "gives its router more than rows"),
    ],
)
def test_what_a_block_does_beside_its_experts_is_noticed(
    kind: type[torch.nn.Module], found: tuple[str, float, float] | str
):
    """The block has no weights yet: its router and experts are stand-ins."""
    is_shared = issubclass(kind, Qwen2MoeSparseMoeBlock)
    names = ("shared_expert", "shared_expert_gate") if is_shared else ()
    with torch.device("meta"):
        block = kind(make_config("qwen2_moe" if is_shared else "qwen3_moe"))

    is_known = isinstance(found, tuple)
    with nullcontext() if is_known else pytest.raises(Unknown, match=str(found)):
        assert (
            check_mixture(block, MixtureNames("gate", "experts", *names), torch.bfloat16) == found
        )


def test_a_shared_expert_without_storage_is_noticed_whatever_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
):
    """A product with a ``meta`` weight gives memory as it is; fresh pages are zeros."""
    multiply = torch.nn.functional.linear

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.is_meta:
            return rows.new_zeros(*rows.shape[:-1], len(weight))
        return multiply(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    with torch.device("meta"):
        block = Qwen2MoeSparseMoeBlock(make_config("qwen2_moe"))

    with pytest.raises(Unknown, match="computes more than its experts do"):
        check_mixture(block, MixtureNames("gate", "experts"), torch.float32)


def test_what_is_called_has_packed_weights_too(checkpoints: Checkpoints):
    """LFM2's short convolutions have projections of their own."""
    loaded = load_model(checkpoints.path("lfm2"), "bfloat16")
    assert loaded.fused is not None and "conv is called" in loaded.forward.reason
    plain = [n for n, m in loaded.model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert plain == []


def test_queries_that_are_scaled_far_into_a_text_are_scaled(checkpoints: Checkpoints):
    """Ministral 3 does so from a position on that the prompt of the probe does not reach."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = checkpoints.path("ministral3", head_dim=16, rope_parameters=rope)
    prompt = random_prompt(7, 200)
    expected = own_logits(load_model(path, "float32", forward="plain"), prompt)
    loaded = load_model(path, "float32")
    found = logits_in_steps(Bench(loaded, num_blocks=300), prompt, (7, 1, 192))
    assert difference(found, expected) <= 1e-4


def test_a_model_that_scales_what_its_description_does_not_is_noticed(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(structure, "logit_edits", lambda model: None)
    loaded = load_model(checkpoints.path("gemma2", final_logit_softcapping=0.5), "float32")
    assert "fused, its logits differ" in loaded.forward.reason


def test_what_fails_while_a_model_is_described_is_a_reason(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a model's code")

    monkeypatch.setattr(structure, "norm_of", fail)
    loaded = load_model(checkpoints.path("llama"), "float32")
    assert loaded.forward.name == "packed"
    assert "cannot be described (ZeroDivisionError: in a model's code)" in loaded.forward.reason


def test_packed_weights_that_compute_something_else_are_unpacked(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """As if a kernel were broken here: twice what it should be."""
    right = PackedWeight.replace
    monkeypatch.setattr(PackedWeight, "replace", lambda *a: right(*(*a[:-1], 2 * a[-1])))

    loaded = load_model(checkpoints.path("llama"), "float32")

    assert loaded.fused is None and packed_layers(loaded) == 0
    assert loaded.forward.name == "plain"
    assert "packed, its logits differ" in loaded.forward.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_that_lose_a_little_are_unpacked(dtype, monkeypatch: pytest.MonkeyPatch):
    """Activations rounded to 8 bits move logits by a few hundredths of their spread."""
    right = PackedWeight.multiply

    def rounded(weight: PackedWeight, rows: Tensor, *others: Any) -> Tensor:
        step = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 127
        return right(weight, (rows / step).round() * step, *others)

    monkeypatch.setattr(PackedWeight, "multiply", rounded)

    assert packed_layers(load_model("tiny-shakespeare", dtype, forward="packed")) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_the_library_a_model_runs_its_own_modules(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, dtype: Any
):
    monkeypatch.setattr(packing, "library", lambda: None)

    loaded = load_model(checkpoints.path("llama"), dtype)

    assert loaded.fused is None and packed_layers(loaded) == 0
    assert loaded.forward.reason == "packed weights need the native library"


@pytest.mark.parametrize(("dtype", "num_packed"), [("float16", 15), ("float64", 0)])
def test_float16_is_packed_on_every_processor_and_float64_stays_as_it_is(
    checkpoints: Checkpoints, dtype: Any, num_packed: int
):
    loaded = load_model(checkpoints.path("llama"), dtype)
    assert loaded.fused is None and packed_layers(loaded) == num_packed


def test_a_long_step_goes_through_in_chunks(
    checkpoints: Checkpoints,
):
    """1,100 tokens at once: several chunks; then only the last row goes on."""
    path = checkpoints.path("qwen3", max_position_embeddings=2048)
    prompt = random_prompt(3, 1100)
    expected = own_logits(load_model(path, "float32", forward="plain"), prompt)[-1:]
    bench = Bench(load_model(path, "float32"), num_blocks=300)

    assert difference(bench.logits(bench.sequence(prompt).rest()), expected) <= 1e-4


def test_a_step_without_a_wanted_row_and_small_ones_after_a_large_one(checkpoints: Checkpoints):
    """What a large step left in the workspace has no effect."""
    loaded = load_model(checkpoints.path("llama"), "float32")
    bench, prompt = Bench(loaded), random_prompt(4, 60)
    expected = own_logits(loaded, prompt)
    sequence = bench.sequence(prompt)

    assert bench.logits(sequence.next(50)).shape == (0, 320)
    for position in range(50, 60):
        logits = bench.logits(sequence.next(1, sample=True))
        assert difference(logits, expected[position : position + 1]) <= 1e-4


PARAMS = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)


def generated(llm: LLM) -> list[int]:
    [output] = llm.generate(random_prompt(5, 24), PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid", "nemotron_h", "qwen3_5_text"])
def test_layers_with_a_state_are_called_with_the_states_of_the_step(
    checkpoints: Checkpoints, family: str
):
    """Two at once, and again with a hit; the tokens of the modules alone."""
    path, answers = str(checkpoints.path(family)), []
    prompts = [random_prompt(5, 40), random_prompt(6, 21)]
    for forward in ("auto", "packed"):
        llm = LLM(path, dtype="float32", num_blocks=64, block_size=16, forward=forward)
        assert (llm.engine.loaded.fused is not None) == (forward == "auto")
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
        llm.close()
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pairwise("family", ["llama", "qwen2", "gemma2"], "forward", ["auto", "packed"])
def test_an_engine_with_packed_weights_adopts_new_ones(checkpoints: Checkpoints, family, forward):
    """By name and whole; tied (qwen2, gemma2) and not; what comes out is a plain engine's."""
    path = checkpoints.path(family)
    engines = [
        LLM(str(path), dtype="float32", num_blocks=32, forward=name) for name in (forward, "plain")
    ]
    old = generated(engines[0])
    assert old == generated(engines[1])
    weights = engines[0].engine.loaded.model.state_dict()
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        update = {name: -weights[name]}
        for llm in engines:
            llm.update_weights(update)
        assert generated(engines[0]) == generated(engines[1])
    assert generated(engines[0]) != old, "the weights matter"

    for llm in engines:
        llm.update_weights(str(path))
    assert generated(engines[0]) == generated(engines[1]) == old
    assert engines[0].engine.loaded.fingerprint == engines[1].engine.loaded.fingerprint

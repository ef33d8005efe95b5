"""Weights of 8 and 4 bits: products by the definition, whole steps, memory, quality, refusals."""

import json
import math
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ostinato import LLM, SamplingParams
from ostinato.engine.requests.prompts import Prompt
from ostinato.errors import ConfigError, UnsupportedModel
from ostinato.lab.work.model_work import model_work
from ostinato.runner.forward import quantized
from ostinato.runner.forward.codes import (
    BY_TOKEN,
    IN_GROUPS,
    PLAIN,
    Activations,
    CodeFormat,
    encode,
)
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.forward.weight_refs import weight_bytes
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.library import Isa
from tests.runner.bench import Bench, own_logits, random_prompt
from tests.support.instruction_sets import needs_library, threads_in_use
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.quantized import save_w4a16
from tests.support.models.word_checkpoints import save_words

pytestmark = needs_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FORMATS = [
    CodeFormat(8, 128),
    CodeFormat(8, 32),
    CodeFormat(8, 4096),
    CodeFormat(8, 64, has_minima=True),
    CodeFormat(4, 32),
    CodeFormat(4, 288),
    CodeFormat(8, 64, has_zeros=True),
    CodeFormat(4, 128, has_zeros=True),
    CodeFormat(4, 32, has_minima=True),
]
ACTIVATIONS = [PLAIN, BY_TOKEN, IN_GROUPS]
NAMES: list[Any] = ["int8", "int4"]
ALL_NAMES: list[Any] = [*NAMES, "w8a8", "w4a8"]


def error_bound(rows: Tensor, weight: Tensor, exact: Tensor, isa: Isa) -> Tensor:
    """The rounding of a result, and what becomes of rows or weights on the way.

    Rows of bfloat16 are integers of 16 bits of their largest; float16 and AMX multiply weights
    that were rounded to the format.
    """
    sizes = rows.abs().double() @ weight.abs().double().T
    unit = UNITS[rows.dtype]
    by_row = rows.abs().amax(1, keepdim=True).double() @ weight.abs().sum(1)[None].double()
    own = {
        torch.float32: sizes * (rows.shape[1] + 2) * 2**-24,
        torch.float16: sizes * 2**-11 + 2.0**-14,
        torch.bfloat16: sizes * 2**-8 if isa is Isa.AMX else by_row * 2**-15,
    }
    return exact.abs() * unit + own[rows.dtype] + sizes * 2**-20


def random_rows(num_rows: int, num_inputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows with gaps between them."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_inputs + 8, generator=random).to(dtype)[:, :num_inputs]


@settings(max_examples=25, deadline=None)
@example(FORMATS[0], torch.float16, 110, 12, 1, False, False, BY_TOKEN, 1, 0)
@given(
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.one_of(st.integers(0, 60), st.integers(100, 300)),
    num_outputs=st.integers(1, 140),
    num_inputs=st.one_of(st.integers(1, 320), st.just(1300)),
    with_bias=st.booleans(),
    is_mixed=st.booleans(),
    activations=st.sampled_from(ACTIVATIONS),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_that_of_the_codes_in_float64(
    module_isa: Isa,
    format: CodeFormat,
    dtype: torch.dtype,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    with_bias: bool,
    is_mixed: bool,
    activations: Activations,
    threads: int,
    seed: int,
):
    """Few rows and many, sizes that tiles and groups do not divide, columns in another order."""
    rows = random_rows(num_rows, num_inputs, dtype, seed)
    random = torch.Generator().manual_seed(seed + 1)
    codes = encode(torch.randn(num_outputs, num_inputs, generator=random), format)
    if is_mixed:
        codes = replace(codes, order=torch.randperm(num_inputs, generator=random))
    bias = torch.randn(num_outputs, generator=random).to(dtype) if with_bias else None
    weight = codes.plain(torch.float64)
    own = rows.double()
    if activations.bits:
        columns = torch.arange(num_inputs) if codes.order is None else codes.order
        own[:, columns] = in_8_bits(rows[:, columns], activations.group_size)
    exact = own @ weight.T + (0 if bias is None else bias.double())
    with threads_in_use(threads):
        found = QuantizedWeight(codes, dtype, activations).multiply(rows, bias)
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    bound = error_bound(rows, weight, exact, module_isa)
    if activations.bits:  # sums of integers are exact
        bound = exact.abs() * UNITS[dtype] + (own.abs() @ weight.abs().T) * 2**-19
        bound += torch.finfo(dtype).tiny * UNITS[dtype]  # numbers below the smallest normal one
    assert ((found.double() - exact).abs() <= bound).all()


def in_8_bits(rows: Tensor, group_size: int) -> Tensor:
    """Return rows in 255 steps from minus the largest number of a group to it; 0 is one group."""
    groups = rows.float().split(group_size or rows.shape[1], dim=1)
    scales = [group.abs().amax(1, keepdim=True) / 127.5 for group in groups]
    return torch.cat(
        [
            (group / scale).nan_to_num().round().clamp(-128, 127).double() * scale.double()
            for group, scale in zip(groups, scales, strict=True)
        ],
        dim=1,
    )


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [FORMATS[0], *FORMATS[-2:]], ids=str)
def test_a_row_alone_has_the_product_that_it_has_in_a_batch_of_any_size(
    module_isa: Isa, format: CodeFormat, dtype: torch.dtype, activations: Activations
):
    """To the bit, whatever its neighbours hold, and on any number of threads."""
    rows = random_rows(430, 160, dtype)
    rows[5] *= 1000
    rows[6, 3] = math.nan
    weight = QuantizedWeight(encode(torch.randn(70, 160), format), dtype, activations)
    whole = weight.multiply(rows)
    assert whole[6].isnan().all() and whole[:6].isfinite().all() and whole[7:].isfinite().all()
    rows[6, 3] = 0
    whole = weight.multiply(rows)
    for num_rows in (1, 2, 3, 5, 7, 11, 12, 13, 31, 48, 49, 150, 429):
        with threads_in_use(num_rows % 3 + 1):
            assert torch.equal(weight.multiply(rows[:num_rows]), whole[:num_rows]), num_rows
            assert torch.equal(weight.multiply(rows[-num_rows:]), whole[-num_rows:]), num_rows


@pytest.fixture(params=[False, True], ids=["pairs", "blocks"])
def in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pack codes in pairs, and as processors with instructions for blocks have them."""
    monkeypatch.setattr(quantized, "packs_blocks", lambda: request.param)
    return request.param


@pytest.mark.parametrize("activations", [PLAIN, BY_TOKEN, IN_GROUPS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_both_layouts_of_codes_give_the_same_bits(
    format: CodeFormat,
    dtype: torch.dtype,
    activations: Activations,
    monkeypatch: pytest.MonkeyPatch,
):
    """In blocks, whole numbers of 16 bits are multiplied as bytes, and sums are the same."""
    codes, rows = encode(torch.randn(70, 160), format), random_rows(5, 160, dtype)
    products = []
    for is_in_blocks in (False, True):
        monkeypatch.setattr(quantized, "packs_blocks", lambda chosen=is_in_blocks: chosen)
        weight = QuantizedWeight(codes, dtype, activations)
        assert weight.is_in_blocks == is_in_blocks
        products.append(weight.multiply(rows))

    assert torch.equal(*products)


def test_rows_of_float16_multiply_with_plain_numbers_and_need_pairs(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(quantized, "packs_blocks", lambda: True)
    codes = encode(torch.randn(70, 160), FORMATS[0])

    assert not QuantizedWeight(codes, torch.float16).is_in_blocks
    assert QuantizedWeight(codes, torch.float16, BY_TOKEN).is_in_blocks


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_codes_come_out_of_their_tiles_as_they_went_in(format: CodeFormat, in_blocks: bool):
    codes = encode(torch.randn(95, 130), format)
    weight = QuantizedWeight(codes, torch.float32)
    part = weight.codes(33, 90)
    assert torch.equal(part.codes, codes.codes[33:90])
    assert torch.equal(part.scales, codes.scales[33:90])
    assert torch.equal(weight.plain(), codes.plain())

    weight.replace(31, torch.zeros(40, 130))

    assert not weight.plain(31, 71).any()
    assert torch.equal(weight.plain(0, 31), codes.plain()[:31])
    assert torch.equal(weight.plain(71), codes.plain()[71:])


def test_weights_of_nothing_and_of_one_size_are_exact():
    for format in FORMATS:
        for value in (0.0, 1e-20, -(2.0**-9), 448.0):
            weight = torch.full((3, 40), value)
            assert torch.allclose(encode(weight, format).plain(), weight, rtol=2**-6), format


@pytest.mark.parametrize(
    ("format", "peer", "factor"),
    [
        (CodeFormat(8, 32), gguf.GGMLQuantizationType.Q8_0, 1.03),
        (CodeFormat(8, 128), gguf.GGMLQuantizationType.Q8_0, 1.25),
        (CodeFormat(4, 32), gguf.GGMLQuantizationType.Q4_0, 1.0),
        (CodeFormat(4, 32, has_minima=True), gguf.GGMLQuantizationType.Q4_1, 1.02),
    ],
    ids=str,
)
def test_codes_err_as_little_as_those_of_llama_cpp(format, peer, factor):
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), peer), peer))
    error, their_error = (
        float((found - weight).square().mean())
        for found in (encode(weight, format).plain(), theirs)
    )
    assert error <= their_error * factor**2


# --- whole models ---


def with_codes_in_float64(loaded: LoadedModel, path: Any) -> LoadedModel:
    """The same model as plain modules in float64, each weight what its code stands for."""
    exact = load_model(path, "float64", forward="plain")
    for name, module in loaded.model.named_modules():
        if isinstance(module, PackedLinear) and isinstance(module.packed, QuantizedWeight):
            codes = module.packed.codes(module.first_row, module.first_row + module.out_features)
            plain = exact.model.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            # A tied head has codes of its own.
            plain.weight = nn.Parameter(codes.plain(torch.float64), requires_grad=False)
            if module.packed.activations.bits:
                plain.register_forward_pre_hook(partial(_in_8_bits, module.packed.activations))
    return exact


def _in_8_bits(activations: Activations, _: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    rows = in_8_bits(given[0].flatten(0, -2), activations.group_size)
    return (rows.view_as(given[0]),)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True}), ("gemma2", {})],
)
def test_tokens_are_those_of_the_codes_in_float64(checkpoints: Checkpoints, family, changes, name):
    """With hits, in chunks, beside strangers."""
    path = checkpoints.path(family, **changes)
    llm = LLM(
        str(path),
        dtype="float32",
        quantization=name,
        num_blocks=96,
        block_size=16,
        max_num_batched_tokens=40,
        max_num_seqs=4,
    )
    exact = with_codes_in_float64(llm.engine.loaded, path)
    common, params = random_prompt(1, 33), SamplingParams(temperature=0, max_tokens=6)
    prompts = [common + random_prompt(2, 20), random_prompt(3, 9), common + random_prompt(4, 5)]
    assert llm.engine.loaded.fused is not None
    for _ in range(2):
        answers = llm.generate(prompts, params, use_tqdm=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = list(answer.outputs[0].token_ids)
            logits = own_logits(exact, prompt + tokens)[len(prompt) - 1 : -1]
            best = logits.max(1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
            assert (best <= 1e-4 * logits.std(1)).all(), "but for ties, the best"
    assert answers[2].num_cached_tokens and answers[2].num_cached_tokens >= 32
    llm.close()


@pytest.mark.parametrize("name", ["int4", "w8a8"])
def test_steps_in_bfloat16_give_the_logits_of_the_codes(
    checkpoints: Checkpoints, module_isa: Isa, name: Any
):
    path, prompt = checkpoints.path("qwen3"), random_prompt(1, 31)
    loaded = load_model(path, "bfloat16", quantization=name)
    assert isinstance(loaded.fused, FusedForward)
    expected = own_logits(with_codes_in_float64(loaded, path), prompt)
    bench = Bench(loaded)
    ours, stranger = bench.sequence(prompt), bench.sequence(random_prompt(9, len(prompt)))
    rows = []
    for length in (7, 1, len(prompt) - 8):
        steps = [sequence.next(length) for sequence in (stranger, ours)]
        targets = [array("I", [0] * length)] * 2
        both = [replace(s, prompt_targets=t) for s, t in zip(steps, targets, strict=True)]
        rows.append(bench.logits(*both)[length:])
    away = (torch.cat(rows).double() - expected).square().mean(1).sqrt() / expected.std(1)
    assert away.median() <= 0.05


@pytest.mark.parametrize(("name", "most"), [("int8", 0.6), ("int4", 0.45)])
def test_nothing_but_codes_and_embeddings_is_in_memory(checkpoints: Checkpoints, name, most):
    """Of all weights in bfloat16, and of the embedding, which is looked up in it."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
    path = checkpoints.path("llama", **sizes)
    plain = load_model(path, "bfloat16")
    loaded = load_model(path, "bfloat16", quantization=name)
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    assert weight_bytes(loaded.model) - embedding.nbytes <= most * (
        weight_bytes(plain.model) - embedding.nbytes
    )
    assert not [p for p in loaded.model.parameters() if p.ndim > 1 and p is not embedding]
    assert "in groups of" in loaded.weight_format


@pytest.mark.parametrize("name", ["auto", *NAMES, "gptq", "awq", "compressed-tensors"])
def test_the_lab_expects_the_bytes_that_weights_take(
    checkpoints: Checkpoints, tmp_path: Path, name: Any
):
    """But for norms, which it leaves out."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    asked = name if name in ("auto", *NAMES) else "auto"
    path = checkpoints.path("llama", **sizes) if name in ("auto", *NAMES) else tmp_path
    if name == "compressed-tensors":
        save_w4a16(path, group_size=128, has_zeros=True, dtype="bfloat16", **sizes)
    elif path == tmp_path:
        settings = {"zero_point": True} if name == "awq" else {}
        save_words(path, name, group_size=128, dtype="bfloat16", changes=sizes, **settings)
    loaded = load_model(path, "bfloat16", quantization=None if asked == "auto" else asked)
    config = json.loads((path / "config.json").read_text())
    expected = model_work(config, asked).weight_bytes
    assert weight_bytes(loaded.model) == pytest.approx(expected, rel=0.01)


def test_a_cached_prefix_is_never_found_by_another_format(checkpoints: Checkpoints):
    path = str(checkpoints.path("llama"))
    llms = [LLM(path, num_blocks=8, dtype="float32", quantization=q) for q in (None, *ALL_NAMES)]
    assert len({llm.engine.identities.of_prompt(Prompt(), array("I")).encoded for llm in llms}) == 5

    llms[1].update_weights(path)

    assert llms[1].engine.loaded.fingerprint == load_model(path, quantization="int8").fingerprint
    for llm in llms:
        llm.close()


def test_new_weights_are_quantized(checkpoints: Checkpoints):
    loaded = load_model(checkpoints.path("llama"), "float32", quantization="int8")
    name = "model.layers.0.mlp.down_proj.weight"
    before = loaded.model.state_dict()[name]
    loaded.model.load_state_dict({name: -2 * before}, strict=False)
    assert torch.allclose(loaded.model.state_dict()[name], -2 * before, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "int3"}, "quantization='int3': must be one of int8, int4, w8a8, w4a8"),
        ({"quantization": "int8", "forward": "plain"}, "set forward='auto'"),
        ({"quantization": "int8", "device": "cuda"}, "set device='cpu'"),
        ({"quantization": "int8", "dtype": "float64"}, "float64 weights are not packed"),
    ],
)
def test_settings_that_quantized_weights_cannot_be_had_with_are_refused(
    checkpoints: Checkpoints, given: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoints.path("llama")), **given)


def test_a_model_whose_weights_are_not_in_linear_layers_is_refused(checkpoints: Checkpoints):
    with pytest.raises(UnsupportedModel, match=r"only \d+% are in linear .*quantization=None"):
        load_model(checkpoints.path("gpt2"), "float32", quantization="int8")


# --- quality ---

VERSE = """First Citizen:
Before we proceed any further, hear me speak.

All:
Speak, speak.

First Citizen:
You are all resolved rather to die than to famish?
"""


def mean_loss(llm: LLM, text: str) -> float:
    """Return the mean of the negative log-probabilities of a text's tokens."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [answer] = llm.generate([text], params, use_tqdm=False)
    assert answer.prompt_logprobs is not None and answer.prompt_token_ids is not None
    pairs = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
    losses = [-place[token].logprob for token, place in pairs if place is not None]
    return sum(losses) / len(losses)


def test_fewer_bits_predict_a_text_nearly_as_well():
    """Perplexities of the embedded model: within 1 % at 8 bits, within 4 % at 4."""
    losses = []
    for name in (None, "w8a8", "w4a8"):
        llm = LLM("tiny-shakespeare", dtype="float32", quantization=name, num_blocks=16)
        losses.append(mean_loss(llm, VERSE))
        llm.close()
    assert math.exp(losses[1] - losses[0]) <= 1.01
    assert math.exp(losses[2] - losses[0]) <= 1.04

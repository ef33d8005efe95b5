"""A GGUF file's own codes are multiplied with: the very numbers that the file has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.checkpoints.gguf_file import open_gguf
from ostinato.runner.forward.codes import CodeFormat, Codes, encode, joined
from ostinato.runner.forward.gguf_codes import BlockRows, dequantized
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.gguf_source import codes_of_file, equal_codes
from ostinato.runner.model_loader import load_model
from tests.runner.bench import has_same_weights, own_logits, random_prompt
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.gguf_files import save_gguf

pytestmark = needs_library

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 128}
"""Rows that blocks of 32 divide; heads as Qwen3 has them, which files do not say."""


def quantized_layers(loaded: LoadedModel) -> list[QuantizedWeight]:
    layers = [m.packed for m in loaded.model.modules() if isinstance(m, PackedLinear)]
    return [packed for packed in layers if isinstance(packed, QuantizedWeight)]


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q8_0", 8), ("Q5_0", 8), ("Q5_1", 8), ("Q4_0", 4), ("Q4_1", 4)]
)
def test_a_file_runs_from_its_own_codes(checkpoints: Checkpoints, tmp_path: Path, kind, bits):
    """The probe's difference from the modules with the file's numbers is none but of sums."""
    file = save_gguf(tmp_path / "tiny.gguf", checkpoints.path("qwen3", **SIZES), kind)
    plain = load_model(file, "float32", forward="plain")
    loaded = load_model(file, "float32")

    layers = quantized_layers(loaded)
    assert layers and all(layer.format.bits == bits for layer in layers)
    assert loaded.weight_format == f"codes of the file (GGUF {kind})"
    assert loaded.fingerprint != plain.fingerprint
    assert has_same_weights(loaded, plain)
    prompt = random_prompt(1, 12)
    assert torch.allclose(own_logits(loaded, prompt), own_logits(plain, prompt), atol=1e-4)


def test_weights_that_no_codes_give_exactly_take_the_nearest_of_8_bits(
    checkpoints: Checkpoints, tmp_path: Path
):
    """As Q6_K's do, in models that are read as a whole."""
    file = save_gguf(tmp_path / "tiny.gguf", checkpoints.path("qwen3", **SIZES), "Q4_0")
    model = load_model(file, "float32", forward="plain").model
    with torch.no_grad(), open_gguf(file):
        for weight in model.parameters():
            weight.add_(1e-3)
        quantization = codes_of_file(file, model)
    assert quantization is not None and quantization.stored
    assert {codes.format.bits for (codes,) in quantization.stored.values()} == {8}


def test_a_file_with_plain_weights_has_no_codes(checkpoints: Checkpoints, tmp_path: Path):
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf", checkpoints.path("qwen3", **SIZES)))
    assert loaded.quantization is None and not quantized_layers(loaded)


EXACT = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
]  # fmt: skip
FOUR_BITS = {"Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
SCALES = {"Q2_K": slice(-4, None), "Q3_K": slice(-2, None), "Q6_K": slice(-2, None)}


def random_blocks(kind: str, num_rows: int) -> tuple[Any, gguf.GGMLQuantizationType]:
    """Return rows of 512 random numbers: every bit of their codes, and finite scales."""
    type_ = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (num_rows * 512 // numbers, size), dtype=np.uint8)
    if kind == "MXFP4":  # an exponent
        blocks[:, 0] = random.integers(120, 130, len(blocks))
        return blocks.reshape(num_rows, -1), type_
    two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    where = SCALES.get(kind, slice(0, 4 if two else 2))
    count = len(range(*where.indices(size))) // 2
    scales = random.standard_normal((len(blocks), count)).astype(np.float16)
    blocks[:, where] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1), type_


def rows_of(data: Any, type_: gguf.GGMLQuantizationType, order: Any = None) -> BlockRows:
    """Return rows of 512 numbers as a weight, which is read from memory."""
    return BlockRows(type_.name, len(data), 512, lambda first, last: data[first:last], order)


@pytest.mark.parametrize(
    "kinds", [EXACT, ["Q4_0"] * 2, ["Q4_K", "Q6_K"], ["Q4_0", "Q3_K"], ["IQ2_S", "Q6_K"]]
)
def test_parts_of_several_formats_are_packed_without_loss(kinds: list[str]):
    """Each of 37 rows, so that they share tiles; the last one in another order."""
    blocks = [random_blocks(kind, 37) for kind in kinds]
    order = torch.randperm(37)
    rows = [rows_of(*each) for each in blocks[:-1]] + [rows_of(*blocks[-1], order)]

    packed = QuantizedWeight.of_rows(rows, torch.float32)

    alone = [QuantizedWeight.of_rows([rows_of(*each)], torch.float32).plain() for each in blocks]
    alone[-1] = alone[-1][order]
    assert torch.equal(packed.plain(), torch.cat(alone))
    assert packed.format.bits == (4 if len(set(kinds)) == 1 else 8)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_blocks_are_the_numbers_of_the_reference(kind: str, dtype: torch.dtype):
    data, type_ = random_blocks(kind, 9)
    reference = torch.from_numpy(gguf.dequantize(data, type_)).to(dtype)

    packed = QuantizedWeight.of_rows([rows_of(data, type_)], dtype)

    assert packed.format.bits == (4 if kind in FOUR_BITS else 8)
    assert torch.equal(packed.plain(), reference)
    assert torch.equal(dequantized(data, type_, dtype), reference)
    again = QuantizedWeight(packed.codes(), dtype)
    assert torch.equal(again.plain(), reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_rare_formats_become_the_nearest_codes(dtype: torch.dtype):
    data, type_ = random_blocks("IQ2_S", 9)
    reference = torch.from_numpy(gguf.dequantize(data, type_))

    packed = QuantizedWeight.of_rows([rows_of(data, type_)], dtype).codes()

    nearest = encode(reference.to(dtype), CodeFormat(8, 32))
    assert torch.equal(packed.codes, nearest.codes) and torch.equal(packed.scales, nearest.scales)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_scales_of_k_blocks_take_9_bits_of_a_group(kind: str):
    """As in the file: a byte of each group, and a float16 factor of each 256 inputs."""
    data, type_ = random_blocks(kind, 64)
    packed = QuantizedWeight.of_rows([rows_of(data, type_)], torch.bfloat16)

    form = packed.format
    per_scale = 512 // form.group_size + 2 * 2
    num_scales = 2 if form.has_minima else 1
    assert packed.nbytes == 64 * (512 * form.bits // 8 + num_scales * per_scale)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_product_with_k_blocks_is_that_of_plain_scales_to_the_bit(kind: str, num_rows: int):
    data, type_ = random_blocks(kind, 45)
    packed = QuantizedWeight.of_rows([rows_of(data, type_)], torch.bfloat16)
    plain = QuantizedWeight(packed.codes(), torch.bfloat16)
    rows = torch.randn(num_rows, 512).bfloat16()

    assert torch.equal(packed.multiply(rows), plain.multiply(rows))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ4_NL", "MXFP4"])
def test_other_numbers_in_blocks_are_near(kind: str):
    """The rows beside them keep theirs."""
    data, type_ = random_blocks(kind, 70)
    packed = QuantizedWeight.of_rows([rows_of(data, type_)], torch.float32)
    before, rows = packed.plain(), torch.randn(35, 512)

    packed.replace(20, rows)

    after = packed.plain()
    assert torch.equal(after[:20], before[:20]) and torch.equal(after[55:], before[55:])
    steps = 2 ** (packed.format.bits - 1)
    assert (after[20:55] - rows).abs().max() <= 1.5 * rows.abs().max() / steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_of_blocks_looks_up_the_numbers_of_the_reference(dtype: torch.dtype):
    data, type_ = random_blocks("Q6_K", 9)
    reference = torch.from_numpy(gguf.dequantize(data, type_)).to(dtype)
    embedding = BlockEmbedding(data, type_.name, dtype)

    ids = torch.tensor([[8, 0, 3, 3]])
    assert torch.equal(embedding(ids), reference[ids])
    assert torch.equal(embedding.weight, reference) and embedding.nbytes == data.nbytes
    for wrong in (9, -1):
        with pytest.raises(IndexError, match="of 9"):
            embedding(torch.tensor([wrong]))
    embedding.load(reference + 1)
    assert torch.equal(embedding(ids), reference[ids] + 1) and embedding.is_replaced


@pytest.mark.parametrize("turned", [False, True])
def test_codes_are_taken_in_the_order_of_rows_that_was_read(turned: bool):
    """Of a model that ``transformers`` has read, the order of queries and keys is not known."""
    data, type_ = random_blocks("Q4_K", 16)
    weight = torch.from_numpy(gguf.dequantize(data, type_))
    if turned:
        weight = weight.view(4, 2, 2, -1).transpose(1, 2).reshape(weight.shape)
    tensor = SimpleNamespace(tensor_type=type_, data=data, shape=np.array([512, 16]))

    found = equal_codes(tensor, weight, [2, 4])

    assert found is not None and torch.equal(found.plain(), weight)
    assert equal_codes(tensor, weight.bfloat16(), [4]) is not None, "as it was rounded"
    assert equal_codes(tensor, weight + 1, [4]) is None, "other numbers"


def test_codes_of_several_formats_are_joined_without_loss():
    """As where a file keeps values in more bits than queries and keys."""
    formats = [CodeFormat(4, 32), CodeFormat(4, 64, has_minima=True), CodeFormat(8, 128)]
    parts: list[Codes] = [encode(torch.randn(3, 200), format) for format in formats]
    plain = torch.cat([part.plain() for part in parts])

    for some in (parts, parts[:1] * 2, parts[1:]):
        found = joined(some)
        assert torch.equal(found.plain(), torch.cat([part.plain() for part in some]))
    assert torch.equal(QuantizedWeight(joined(parts), torch.float32).plain(), plain)

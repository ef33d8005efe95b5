"""Files of random weights have the tensors, formats and sizes of the real ones."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from benchmarks.peers.checkpoint import make_checkpoint, words
from benchmarks.peers.shapes import BLOCK_FORMATS, SHAPES, SMALL, Shape, tensors_of, write_gguf

MIXTURE = Shape(
    "qwen3_moe",
    SMALL.sizes | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
                   "hidden_size": 256, "tie_word_embeddings": False},
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.6), ("qwen3-4b", 4.0), ("llama-3.1-8b", 8.0), ("gemma-3-4b", 3.9),
     ("qwen3-30b-a3b", 30.5)],
)  # fmt: skip
def test_a_shape_has_as_many_weights_as_the_model_it_is_named_after(name, billions):
    count = sum(int(np.prod(shape)) for _, shape in tensors_of(SHAPES[name].config()))
    assert count / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_checkpoint_loads_with_every_tensor_in_its_place(tmp_path):
    folder = make_checkpoint(tmp_path / "mixture", MIXTURE)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.abs().min() >= 2**-6 and weight.abs().max() < 2**-5
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 1e6
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_a_gguf_file_has_the_formats_that_llama_cpp_chooses(tmp_path, kind):
    path = tmp_path / "mixture.gguf"
    write_gguf(path, MIXTURE.config(), kind, words(MIXTURE.vocab_size))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    formats = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    fine = "Q8_0" if kind == "Q8_0" else "Q6_K"
    coarse = {"Q4_0": "Q4_0", "Q8_0": "Q8_0", "Q4_K_M": "Q4_K"}[kind]
    assert formats["output.weight"] == fine and formats["blk.1.attn_q.weight"] == coarse
    assert formats["blk.0.ffn_gate_inp.weight"] == formats["blk.0.attn_norm.weight"] == "F32"
    assert list(tensors["blk.0.ffn_up_exps.weight"].shape) == [256, 256, 4]
    end = max(tensor.data_offset + tensor.n_bytes for tensor in tensors.values())
    assert path.stat().st_size == end, "nothing is cut off, and nothing follows"


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_random_blocks_have_the_magnitude_of_weights(name):
    blocks = BLOCK_FORMATS[name].draw(np.random.default_rng(0), 200)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert 0.015 < values.std() < 0.035 and abs(values.mean()) < 0.005


def test_a_kind_of_file_that_is_not_written_is_refused_before_a_file_is_made(tmp_path):
    with pytest.raises(ValueError, match="'Q2_K': there are Q4_0, Q8_0, Q4_K_M"):
        write_gguf(tmp_path / "file", MIXTURE.config(), "Q2_K", [])
    assert not list(tmp_path.iterdir())

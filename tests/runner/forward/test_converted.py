"""Weights of 16 bits are multiplied in float32 where the processor cannot multiply them."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ostinato import LLM, SamplingParams
from ostinato.runner.forward import choose
from ostinato.runner.forward.converted import ConvertedLinear, convert_linears
from ostinato.runner.model_loader import load_model
from tests.support.checkpoints import FAMILIES, Checkpoints

HALVES = [torch.float16, torch.bfloat16]
PROMPTS = [[(i * i) % 300 + 5 for i in range(40)], [7, 8, 9]]
LOAD_BOTH = """
import sys
from ostinato import LLM, SamplingParams
greedy = SamplingParams(temperature=0.0, max_tokens=3, detokenize=False)
for dtype in ("float16", "bfloat16"):
    llm = LLM(sys.argv[1], dtype=dtype, num_blocks=64)
    for _ in range(2):
        [output] = llm.generate([list(range(5, 45))], greedy, use_tqdm=False)
    print(dtype, len(output.outputs[0].token_ids), output.num_cached_tokens)
"""


@pytest.fixture
def nothing_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies float32 alone."""
    monkeypatch.setattr(choose, "can_pack", lambda dtype, device: False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 40])
def test_a_converted_layer_computes_what_a_plain_one_does(
    dtype: torch.dtype, num_rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    """In pieces of 16 outputs of 70, the last one smaller."""
    monkeypatch.setattr("ostinato.runner.forward.converted._PIECE_BYTES", 16 * 24 * 4)
    torch.manual_seed(num_rows)
    linear = nn.Linear(24, 70, bias=bias).to(dtype).eval()
    rows = torch.randn(1, num_rows, 24).to(dtype)

    with torch.no_grad():
        found = ConvertedLinear(linear)(rows)
        exact = linear.double()(rows.double())

    assert (found.dtype, found.shape) == (dtype, exact.shape)
    unit = 2.0 ** (-9 if dtype == torch.float16 else -7)
    assert ((found.double() - exact).abs() <= unit * (exact.abs() + 1)).all()


def test_converting_shares_the_weights_and_leaves_their_names():
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2, bias=False))).half()
    names, pointers = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]

    replaced = convert_linears(model)

    assert [name for _, name, _ in replaced] == ["0", "0"]
    assert list(model.state_dict()) == names
    assert [p.data_ptr() for p in model.parameters()] == pointers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_served_in_16_bits_where_nothing_packs(
    family: str, dtype: str, checkpoints: Checkpoints, nothing_packs: None
):
    llm = LLM(str(checkpoints.path(family)), dtype=dtype, num_blocks=64)  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)

    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)

    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


def test_float16_is_served_whatever_the_processor(checkpoints: Checkpoints):
    """Loading raised what torch says of a processor without AVX512-FP16."""
    loaded = load_model(checkpoints.path("llama"), "float16")

    assert loaded.dtype == torch.float16


def test_a_processor_with_avx2_alone_serves_16_bits(checkpoints: Checkpoints):
    """torch, oneDNN and the native library are all held to AVX2, in a process of their own."""
    held = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OSTINATO_ISA": "avx2"}
    command = [sys.executable, "-c", LOAD_BOTH, str(checkpoints.path("llama"))]

    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **held})

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["float16", "3", "39", "bfloat16", "3", "39"]

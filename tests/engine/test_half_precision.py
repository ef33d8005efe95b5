"""16-bit weights are served on every processor, those that cannot multiply them included."""

import os
import subprocess
import sys

import pytest

from ostinato import SamplingParams
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.model_families import FAMILIES
from tests.support.pairs import pairwise

pytestmark = pytest.mark.one_case_in(3)

PROMPTS = [[(i * i) % 300 + 5 for i in range(40)], [7, 8, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)

HIT_IN_BOTH = """
import sys
from ostinato import LLM, SamplingParams
greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
for dtype in ("float16", "bfloat16"):
    llm = LLM(sys.argv[1], dtype=dtype, num_blocks=64)
    cold, hit = [llm.generate([list(range(5, 45))], greedy, use_tqdm=False)[0] for _ in range(2)]
    assert cold.outputs[0].token_ids == hit.outputs[0].token_ids
    print(dtype, hit.num_cached_tokens)
"""


@pairwise("family", FAMILIES, "dtype", ["float16", "bfloat16"])
def test_every_family_is_served_in_16_bits(family: str, dtype: str, make_llm: MakeLLM):
    llm = make_llm(family, dtype=dtype, block_size=16, num_blocks=64)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


@pytest.mark.nightly
def test_a_processor_with_avx2_alone_serves_16_bits(checkpoints: Checkpoints):
    """torch, oneDNN and the native library are held to AVX2, in a process of their own."""
    held = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OSTINATO_ISA": "avx2"}
    command = [sys.executable, "-c", HIT_IN_BOTH, str(checkpoints.path("llama"))]

    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **held})

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["float16", "39", "bfloat16", "39"]

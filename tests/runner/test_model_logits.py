"""Logits of each family, token by token, are those of the model's own attention.

In float64 they are compared with ``transformers`` through the public interface, see
``tests/exactness``; here in rounded formats, by the native library and by torch.
"""

import pytest
import torch

from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.native.library import library
from tests.runner.bench import Bench, own_logits, random_prompt
from tests.runner.conftest import Served
from tests.support.models.model_families import FAMILIES
from tests.support.pairs import pairwise

pytestmark = pytest.mark.one_case_in(3)

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2}
"""In standard deviations of a row's logits. In bfloat16 the median row is held to it, since an
expert that wins by a tie's breadth can turn a row over."""

CASES = [(attention, dtype) for attention in ("native", "torch") for dtype in TOLERANCES]


@pairwise("family", FAMILIES, "case", CASES)
def test_rounded_logits_are_those_of_the_models_own_attention(family, case, served: Served):
    """A prompt of 33 tokens: ten at once, then one by one."""
    (attention, dtype), native = case, library()
    if attention == "native" and native is None:
        pytest.skip("the native library is not built")
    prompt, loaded = random_prompt(14, 33), served(family, dtype)
    bench = Bench(loaded)
    if attention == "native" and native is not None:
        bench = Bench(loaded, num_blocks=24, block_size=16, attention=NativeAttention(native))
    sequence = bench.sequence(prompt)
    bench.step(sequence.next(10))

    found = torch.cat([bench.logits(sequence.next(1, sample=True)) for _ in range(23)]).double()

    expected = own_logits(loaded, prompt)[10:].double()
    distance = (found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)
    assert distance.quantile(0.5 if dtype == "bfloat16" else 1.0) < TOLERANCES[dtype]

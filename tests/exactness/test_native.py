"""Law 7 with the native library: in float32 and blocks of 16, tokens are those of ``generate``.

The library knows no float64. What it computes in float32 differs from the reference, in float64, by
about 1e-6 of a logit's spread, so that a token could differ only where the best two are as close
as that: among these few hundred tokens none are.
"""

import pytest

from ostinato import SamplingParams
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.native.library import Isa
from tests.exactness.conftest import ReferenceOf
from tests.exactness.reference import NUM_NEW, random_ids
from tests.exactness.test_greedy import GREEDY, assert_exact, every_family
from tests.exactness.test_states import PROMPTS as OF_STATES
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library, threads_in_use

pytestmark = [needs_library, pytest.mark.one_case_in(3)]

_BASE = random_ids(20, 70)
PROMPTS = [
    _BASE,
    _BASE[:66] + random_ids(21, 6),
    _BASE[:50] + random_ids(22, 14),
    _BASE[:50] + random_ids(23, 3),
    _BASE[:20] + random_ids(24, 20),
    random_ids(25, 25),
]
"""Relatives part within a block of sixteen: at tokens 66, 50 and 20."""

NATIVE = {"dtype": "float32", "block_size": 16, "attention": "native"}


@every_family
def test_cold_and_then_with_hits(family: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Together and in chunks, then again from the cache: trees of shared runs beside chunks."""
    llm = make_llm(family, read_once="always", max_num_batched_tokens=40, max_num_seqs=8, **NATIVE)

    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_exact(outputs, reference_of(family), PROMPTS)

    assert isinstance(llm.engine.runner.attention, NativeAttention)
    assert sum(output.num_cached_tokens for output in outputs) > 200


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_each_instruction_set_gives_the_tokens_of_generate(
    family: str, isa: Isa, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """Windows, soft caps, sinks and keys longer than values; cold in chunks, then with hits."""
    llm = make_llm(family, max_num_batched_tokens=40, max_num_seqs=8, **NATIVE)

    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_exact(outputs, reference_of(family), PROMPTS)

    assert sum(output.num_cached_tokens for output in outputs) > 200


@every_family
def test_preempted_forked_and_on_two_threads(
    family: str, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """A pool of 8 blocks; the longest sequence needs 5, and each is continued twice."""
    llm = make_llm(family, num_blocks=8, **NATIVE)
    twice = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, n=2)

    with threads_in_use(2):
        outputs = llm.generate(PROMPTS, twice, use_tqdm=False)

    assert_exact(outputs, reference_of(family), PROMPTS)
    assert llm.engine.scheduler_stats.num_preemptions > 0


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "granitemoehybrid", "mamba2"])
def test_layers_with_a_state_as_operations(
    family: str, isa: Isa, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """Chunks of 64 beside decodes, forks and strangers; cold, and then with hits."""
    llm = make_llm(family, max_num_batched_tokens=160, max_num_seqs=16, **NATIVE)
    fused = llm.engine.runner.loaded.fused
    assert fused is not None and not fused.decoder.calls

    for _ in range(2):
        outputs = llm.generate(OF_STATES, GREEDY, use_tqdm=False)
        assert_exact(outputs, reference_of(family), OF_STATES)

    assert sum(output.num_cached_tokens for output in outputs) > 500

"""Law 7 for layers that carry a state: the tokens are those of ``generate``.

States are kept at multiples of 64 tokens, and prompts part there, before and behind. By day one
family for each kind of state goes through everything on one engine; by night each family goes
through each situation, on both indexes.
"""

import pytest

from ostinato import LLM, SamplingParams
from tests.exactness.conftest import ReferenceOf
from tests.exactness.reference import NUM_NEW, random_ids
from tests.exactness.test_greedy import GREEDY, assert_exact
from tests.support.engines import MakeLLM
from tests.support.models.model_families import HYBRIDS

BASE = random_ids(0, 150)
PARTED_AT = (149, 129, 128, 127, 70, 64, 63, 6)
RELATIVES = [BASE[:at] + random_ids(at, 12) for at in PARTED_AT]
PROMPTS = [BASE, *RELATIVES, random_ids(7, 25)]
THREE = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, n=3)

BY_DAY = {
    "qwen3_5_text": "radix",
    "granitemoehybrid": "hash",
    "jamba": "radix",
    "lfm2": "hash",
    "minimax": "radix",
}

each_family = pytest.mark.parametrize("family", HYBRIDS)


def make(make_llm: MakeLLM, family: str, **settings: object) -> LLM:
    return make_llm(family, **{"max_num_seqs": 16, "max_num_batched_tokens": 256, **settings})


@pytest.mark.parametrize(("family", "index"), BY_DAY.items())
def test_hits_strangers_forks_and_a_later_turn(
    family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """A prompt; then relatives that part from it around 128, all at once; then its next turn."""
    llm, reference = make(make_llm, family, index=index), reference_of(family)
    relatives = [RELATIVES[1], RELATIVES[3], PROMPTS[-1]]
    turn = [*BASE, *reference.generated(BASE), *random_ids(9, 5)]

    cold = llm.generate([BASE], GREEDY, use_tqdm=False)
    warm = llm.generate(relatives, THREE, use_tqdm=False)
    later = llm.generate([turn, RELATIVES[3]], GREEDY, use_tqdm=False)

    assert_exact(cold, reference, [BASE])
    assert_exact(warm, reference, relatives)
    assert_exact(later, reference, [turn, RELATIVES[3]])
    cached = [output.num_cached_tokens for output in (*cold, *warm, *later)]
    assert cached == [0, 128, 0, 0, 128, 128]


@pytest.mark.nightly
@each_family
def test_cold_and_then_with_hits(family, index, make_llm: MakeLLM, reference_of: ReferenceOf):
    """One by one on a cold cache; then all at once, computing at most 64 tokens and their own."""
    llm, reference = make(make_llm, family, index=index), reference_of(family)

    cold = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    hits = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_exact(cold, reference, PROMPTS)
    assert_exact(hits, reference, PROMPTS)
    assert all(len(p) - o.num_cached_tokens <= 64 for p, o in zip(PROMPTS, hits, strict=True))


@pytest.mark.nightly
@each_family
def test_chunked_and_all_at_once(family, index, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Chunks of 64 tokens beside decodes; every prompt twice, the second behind the first."""
    llm = make(make_llm, family, index=index, max_num_batched_tokens=96, max_chunk_tokens=64)

    outputs = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False)

    assert_exact(outputs, reference_of(family), PROMPTS * 2)
    assert llm.engine.scheduler_stats.num_steps > sum(map(len, PROMPTS)) // 96


@pytest.mark.nightly
@each_family
def test_preempted(family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """A pool of 50 blocks: the longest sequence needs 40, so two of them are too many."""
    llm = make(make_llm, family, index=index, num_blocks=50)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_exact(outputs, reference_of(family), PROMPTS)
    assert llm.engine.scheduler_stats.num_preemptions > 0


@pytest.mark.nightly
@each_family
def test_few_states(family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Four slots for ten prompts: hardly a checkpoint survives, and sequences wait for a slot."""
    llm = make(make_llm, family, index=index, num_state_slots=4)

    for _ in range(2):
        outputs = llm.generate(PROMPTS, THREE, use_tqdm=False)

        assert_exact(outputs, reference_of(family), PROMPTS)


@pytest.mark.nightly
@each_family
def test_cache_off(family: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    llm = make(make_llm, family, enable_prefix_caching=False)

    for _ in range(2):
        outputs = llm.generate(PROMPTS, THREE, use_tqdm=False)

        assert_exact(outputs, reference_of(family), PROMPTS)
        assert sum(output.num_cached_tokens for output in outputs) == 0

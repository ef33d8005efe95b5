"""Law 7: whatever became of a request on its way, its tokens are those of ``generate``.

The name of a test is the situation, its parameters are the family and the index. Everything goes
through the public face, in float64, with blocks of four.
"""

from collections.abc import Sequence
from typing import Any, get_args
from unittest import mock

import pytest

from ostinato import RequestOutput, SamplingParams
from ostinato.runner.attention.shared_runs import SharedRun, shared_runs
from ostinato.settings import IndexName
from tests.exactness.conftest import ReferenceOf
from tests.exactness.reference import NUM_NEW, PROMPTS, Reference, random_ids
from tests.support.engines import MakeLLM
from tests.support.models.model_families import FAMILIES, GATED_MIXTURES, MIXTURES
from tests.support.pairs import pairwise

pytestmark = pytest.mark.one_case_in(3)

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)

_ALL = [*FAMILIES, *MIXTURES, *GATED_MIXTURES]
every_family = pytest.mark.parametrize("family", _ALL)
every_family_on_an_index = pairwise("family", _ALL, "index", get_args(IndexName))


def assert_exact(
    outputs: Sequence[RequestOutput], reference: Reference, prompts: Sequence[Sequence[int]]
) -> None:
    """Assert that every continuation of every prompt is the reference's."""
    assert len(outputs) == len(prompts)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == list(prompt)
        for completion in output.outputs:
            assert completion.token_ids == reference.generated(prompt)
            assert completion.finish_reason == "length"


@every_family
def test_the_references_hang_on_their_prompts(family: str, reference_of: ReferenceOf):
    """A model that repeats one token would agree with anything."""
    said = [reference_of(family).generated(prompt) for prompt in PROMPTS]

    assert len(set(map(tuple, said))) == len(PROMPTS)
    assert len(set().union(*said)) > NUM_NEW


@every_family
def test_cache_off(family: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Twice, since without a cache the second run must not find the first."""
    llm = make_llm(family, enable_prefix_caching=False)

    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

        assert_exact(outputs, reference_of(family), PROMPTS)
        assert sum(output.num_cached_tokens for output in outputs) == 0


@every_family_on_an_index
def test_cold_and_then_with_hits(family: str, index, make_llm: MakeLLM, reference_of: ReferenceOf):
    """One by one on a cold cache; then all at once, when each finds all but its last token."""
    llm = make_llm(family, index=index)

    cold = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert_exact(cold, reference_of(family), PROMPTS)
    assert cold[0].num_cached_tokens == 0

    hits = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_exact(hits, reference_of(family), PROMPTS)
    assert [o.num_cached_tokens for o in hits] == [len(prompt) - 1 for prompt in PROMPTS]


@every_family_on_an_index
def test_chunked(family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """A budget of 7 tokens: no chunk begins where a block does, and decodes go beside chunks."""
    llm = make_llm(family, index=index, max_num_batched_tokens=7, max_num_seqs=5)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_exact(outputs, reference_of(family), PROMPTS)
    assert llm.engine.scheduler_stats.num_steps > sum(map(len, PROMPTS)) // 7


@every_family_on_an_index
def test_preempted(family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """A pool of 15 blocks: the longest sequence needs 12, so two of them are too many."""
    llm = make_llm(family, index=index, num_blocks=15)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_exact(outputs, reference_of(family), PROMPTS)
    assert llm.engine.scheduler_stats.num_preemptions > 0


@every_family_on_an_index
def test_among_strangers_and_relatives(
    family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """All at once: they share blocks, copy the tokens up to where ways part, and decode together.

    Ways part at tokens 33, 19 and 6: one token is copied, three, and two.
    """
    llm = make_llm(family, index=index, order="fcfs")
    stranger = random_ids(5, 29)
    prompts = [stranger, *PROMPTS, PROMPTS[0][:19]]

    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)

    assert_exact(outputs, reference_of(family), prompts)
    assert [o.num_copied_tokens for o in outputs] == [0, 0, 1, 3, 2, 0, 2]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 33, 19, 6, 0, 18]


@every_family
def test_reading_shared_blocks_once(family: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Law 2: whatever two sequences share is read once for both, however little it is."""
    llm = make_llm(family, read_once="always")
    prompts = [*PROMPTS, *PROMPTS, PROMPTS[0][:19]]

    runs: list[SharedRun] = []

    def noted(*step: Any) -> tuple[SharedRun, ...]:
        runs.extend(shared_runs(*step))
        return shared_runs(*step)

    with mock.patch("ostinato.runner.attention.reads.shared_runs", noted):
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert_exact(outputs, reference_of(family), prompts)

    assert bool(runs) == (0 in llm.engine.runner.groups.of_layer)


@every_family_on_an_index
def test_forks(family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Three continuations of each prompt, which end in the middle of blocks, and are copied."""
    llm = make_llm(family, index=index)
    three = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, n=3)

    outputs = llm.generate(PROMPTS, three, use_tqdm=False)

    assert_exact(outputs, reference_of(family), PROMPTS)
    assert [len(output.outputs) for output in outputs] == [3] * len(PROMPTS)


@every_family_on_an_index
def test_single_flight(family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """The same prompts three times over on a cold cache, in chunks of at most 6 tokens.

    Each is computed once: the others compute no more of it than its last, unfinished block.
    """
    llm = make_llm(family, index=index, max_chunk_tokens=6)
    prompts = PROMPTS * 3

    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)

    assert_exact(outputs, reference_of(family), prompts)
    cached = [output.num_cached_tokens for output in outputs]
    assert all(hit > 0 for hit in cached[len(PROMPTS) :])
    computed = llm.engine.scheduler_stats.computed_prompt_tokens
    assert computed <= sum(map(len, PROMPTS)) + 2 * 4 * len(PROMPTS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_the_end_of_sequence(family: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """Two ids end a text: its third token for one prompt, its fifth for another."""
    reference = reference_of(family)
    ends = reference.generated(PROMPTS[0])[2], reference.generated(PROMPTS[4])[4]
    llm = make_llm(family, config={"eos_token_id": list(ends)})

    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)

    outputs = llm.generate(PROMPTS, params, use_tqdm=False)

    for output, prompt in zip(outputs, PROMPTS, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == reference.generated(prompt, ends)
        assert output.outputs[0].finish_reason == ("stop" if tokens[-1] in ends else "length")
    assert outputs[0].outputs[0].finish_reason == "stop"

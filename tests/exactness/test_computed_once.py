"""Law 1, counted at the model's embedding, past all bookkeeping of ours.

A hook counts every token that goes through the model. The model is one layer wide and as tiny as
they come; how many tokens it computes does not hang on that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from torch import Tensor, nn

from ostinato import LLM, SamplingParams
from ostinato.engine.requests.prompts import Prompt
from ostinato.settings import IndexName
from tests.exactness.reference import NUM_NEW, PROMPTS, random_ids
from tests.support.engines import MakeLLM
from tests.support.pairs import pairwise

NUM_PROMPTS = 60
TINIEST = {"num_hidden_layers": 1, "num_key_value_heads": 1, "max_position_embeddings": 1024}

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


class Meter:
    """Counts the tokens that go through a model's embedding."""

    def __init__(self, llm: LLM) -> None:
        """Begin at zero."""
        self._num_tokens = 0
        embedding = llm.engine.loaded.model.get_input_embeddings()
        self.remove = embedding.register_forward_pre_hook(self._count).remove

    def read(self) -> int:
        """Return the tokens since the last reading."""
        counted, self._num_tokens = self._num_tokens, 0
        return counted

    def _count(self, embedding: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._num_tokens += arguments[0].numel()


Metered = Callable[..., tuple[LLM, Meter]]


@pytest.fixture
def metered(make_llm: MakeLLM) -> Iterator[Metered]:
    """Make an engine of the tiniest model, and its meter."""
    meters: list[Meter] = []

    def make(**settings: object) -> tuple[LLM, Meter]:
        llm = make_llm("llama", config=TINIEST, **{"dtype": "float32", **settings})
        meters.append(Meter(llm))
        return llm, meters[-1]

    yield make
    for meter in meters:
        meter.remove()


def num_distinct_prefixes(prompts: Sequence[Sequence[int]], known: int) -> int:
    """Count the tokens that are computed if each prefix is computed once.

    Args:
        prompts: They agree in their first ``known`` tokens.
        known: Where to begin to compare.
    """
    ends = {tuple(p[known:end]) for p in prompts for end in range(known + 1, len(p) + 1)}
    return known + len(ends)


@pairwise("block_size", [4, 16, 256], "index", get_args(IndexName))
def test_many_prompts_with_one_system_prompt(block_size: int, index: str, metered: Metered):
    """512 shared and 16 own tokens, at once, on a cold cache; then all of them again.

    By token, the own parts share a little as well: where their first tokens happen to agree.
    With blocks of 256 such a part is found only once somebody has ended, and one of a kind.
    """
    llm, meter = metered(index=index, block_size=block_size)
    shared = random_ids(0, 512)
    prompts = [shared + random_ids(seed, 16) for seed in range(1, NUM_PROMPTS + 1)]

    llm.generate(prompts, ONE_TOKEN, use_tqdm=False)
    cold = meter.read()
    llm.generate(prompts, ONE_TOKEN, use_tqdm=False)
    warm = meter.read()

    assert cold <= 512 + NUM_PROMPTS * 16
    assert warm <= NUM_PROMPTS * (16 if block_size == 256 else 1)
    if block_size < 256:
        assert cold == num_distinct_prefixes(prompts, known=512)
        assert warm == NUM_PROMPTS


def test_one_prompt_a_hundred_times_at_once(index: str, metered: Metered):
    """24 tokens fill six blocks: the first computes them all, each other one its last token."""
    llm, meter = metered(index=index)

    llm.generate([random_ids(0, 24)] * 100, ONE_TOKEN, use_tqdm=False)

    assert meter.read() == 24 + 99


def test_the_next_turn_finds_what_was_generated(index: str, metered: Metered):
    """21 tokens and 10 generated; the last of them was never put through the model."""
    llm, meter = metered(index=index)
    prompt = random_ids(0, 21)
    answer = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert meter.read() == 21 + 9

    llm.generate([prompt + answer + random_ids(1, 5)], ONE_TOKEN, use_tqdm=False)

    assert meter.read() == 1 + 5


def test_without_sealed_tails_the_next_turn_computes_from_the_block_boundary(
    index: str, metered: Metered
):
    """30 tokens are computed, seven blocks of four are kept."""
    llm, meter = metered(index=index, seal_tails=False)
    prompt = random_ids(0, 21)
    answer = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    meter.read()

    llm.generate([prompt + answer + random_ids(1, 5)], ONE_TOKEN, use_tqdm=False)

    assert meter.read() == 21 + 10 + 5 - 28


def test_the_prompt_of_several_samples_is_computed_once(index: str, metered: Metered):
    """Four samples of ten tokens; a second time all but the prompt's last token is there."""
    llm, meter = metered(index=index)
    four = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    prompt = random_ids(0, 21)

    first = llm.generate([prompt], four, use_tqdm=False)
    assert meter.read() == 21 + 4 * 9
    again = llm.generate([prompt], four, use_tqdm=False)
    assert meter.read() == 1 + 4 * 9

    texts = [[completion.token_ids for completion in o.outputs] for o in (*first, *again)]
    assert len(set(map(tuple, texts[0]))) == 4
    assert texts[0] == texts[1]


def test_a_prompt_that_leaves_a_block_in_its_middle_copies(index: str, metered: Metered):
    """Blocks of 16: ways part at token 23, so one block is shared and 7 tokens are copied."""
    llm, meter = metered(index=index, block_size=16)
    first = random_ids(0, 40)
    llm.generate([first], ONE_TOKEN, use_tqdm=False)
    meter.read()

    output = llm.generate([[*first[:23], 2, *random_ids(1, 10)]], ONE_TOKEN, use_tqdm=False)[0]

    assert (output.num_cached_tokens, output.num_copied_tokens) == (23, 7)
    assert meter.read() == 11


def test_who_was_preempted_computes_again_what_was_evicted(index: str, metered: Metered):
    """Eight blocks for two strangers of 12 tokens that generate 9 each.

    At 17 tokens the first one needs a fifth block; the second one gives its four back, of which
    the first takes the last. It comes back for three of them and computes 4 tokens again.
    """
    llm, meter = metered(index=index, num_blocks=8)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

    llm.generate([random_ids(0, 12), random_ids(1, 12)], params, use_tqdm=False)

    assert llm.engine.scheduler_stats.num_preemptions == 1
    assert meter.read() == 2 * (12 + 8) + 4


def test_every_recomputed_token_was_looked_up_and_missed(index: str, metered: Metered):
    """Five prompts in a pool for one and a quarter: nothing cached is computed again."""
    llm, meter = metered(index=index, num_blocks=15)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    misses = [len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs]
    again = llm.cache_stats.preempted
    assert again.num_requests == llm.engine.scheduler_stats.num_preemptions > 0
    recomputed = again.query_tokens - again.hit_tokens - again.num_requests
    assert meter.read() == sum(misses) + len(PROMPTS) * (NUM_NEW - 1) + recomputed


def test_who_arrives_during_a_chunked_prefill_waits_and_shares(index: str, metered: Metered):
    """40 tokens in chunks of 8; after two of them come its twin and one that parts at token 35.

    They are admitted in the step of the last chunk: the twin computes its last token, the other
    one copies three tokens that are computed in this very step, and computes five.
    """
    llm, meter = metered(index=index, max_chunk_tokens=8)
    engine = llm.engine
    leader = random_ids(0, 40)
    engine.add(engine.make_request(Prompt(token_ids=leader), ONE_TOKEN))
    engine.step()
    engine.step()
    assert meter.read() == 16

    late = [leader, [*leader[:35], 2, 3, 4, 5, 6]]
    for prompt in late:
        engine.add(engine.make_request(Prompt(token_ids=prompt), ONE_TOKEN))
    steps = [{state.request.request_id: state for state in engine.step()} for _ in range(3)]

    assert [len(step) for step in steps] == [0, 0, 3]
    outputs = [state.output() for state in steps[2].values()]
    assert [output.num_cached_tokens for output in outputs] == [0, 39, 35]
    assert meter.read() == 24 + 1 + 5


def test_an_unrelated_request_is_not_held_up_by_a_chunked_prefill(index: str, metered: Metered):
    """Only who shares more than is cached waits."""
    llm, meter = metered(index=index, max_chunk_tokens=8)
    engine = llm.engine
    engine.add(engine.make_request(Prompt(token_ids=random_ids(0, 40)), ONE_TOKEN))
    engine.step()
    engine.add(engine.make_request(Prompt(token_ids=random_ids(1, 6)), ONE_TOKEN))
    meter.read()

    assert [state.finished for state in engine.step()] == [True]
    assert meter.read() == 8 + 6
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    "changes",
    [{"cache_salt": "another tenant"}, {"cache_read": False}],
    ids=["other salt", "no reading"],
)
def test_who_may_not_share_computes_everything(index, changes, metered: Metered):
    """Nothing is found, although all of it is there."""
    llm, meter = metered(index=index)
    prompt = random_ids(0, 24)
    llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
    meter.read()

    llm.generate([{"prompt_token_ids": prompt, **changes}], ONE_TOKEN, use_tqdm=False)

    assert meter.read() == 24


def test_what_was_not_written_is_not_found(index: str, metered: Metered):
    """Two requests that leave nothing behind, then two ordinary ones."""
    llm, meter = metered(index=index)
    prompt = random_ids(0, 24)
    silent = {"prompt_token_ids": prompt, "cache_write": False}

    counts = []
    for asked in (silent, silent, prompt, prompt):
        llm.generate([asked], ONE_TOKEN, use_tqdm=False)
        counts.append(meter.read())

    assert counts == [24, 24, 24, 1]


def test_prompt_logprobs_need_every_token_once(index: str, metered: Metered):
    """Every position needs its logits, whatever is cached; others find what that computed.

    So does whoever asks for the same log-probabilities again, since they are kept; with other
    alternatives every logit is needed again.
    """
    llm, meter = metered(index=index)
    prompt = random_ids(0, 24)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    counts = []
    more = replace(params, prompt_logprobs=2)
    for asked in (params, params, ONE_TOKEN, more):
        llm.generate([prompt], asked, use_tqdm=False)
        counts.append(meter.read())

    assert counts == [24, 1, 1, 24]

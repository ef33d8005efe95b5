"""Law 1, counted at the model's embedding, past all bookkeeping of ours.

A hook counts every token that goes through the model, and the runner's own count has to agree; by
that count ``tests/sched`` and ``tests/contracts`` meet every situation. The model is one layer wide
and as tiny as they come; how many tokens it computes does not hang on that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from torch import Tensor, nn

from ostinato import LLM, SamplingParams
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


def test_every_recomputed_token_was_looked_up_and_missed(index: str, metered: Metered):
    """Five prompts in a pool for one and a quarter: nothing cached is computed again."""
    llm, meter = metered(index=index, num_blocks=15)

    before = llm.engine.runner.num_tokens_computed
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    misses = [len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs]
    again = llm.cache_stats.preempted
    assert again.num_requests == llm.engine.scheduler_stats.num_preemptions > 0
    recomputed = again.query_tokens - again.hit_tokens - again.num_requests
    num_computed = meter.read()
    assert num_computed == sum(misses) + len(PROMPTS) * (NUM_NEW - 1) + recomputed
    assert num_computed == llm.engine.runner.num_tokens_computed - before


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

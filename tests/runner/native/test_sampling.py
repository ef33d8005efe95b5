"""The sampling kernel against its definition, with sums of whole numbers, one row at a time.

The definition is ``sampling_reference``.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.core.plan import SampleTask, TokenLogprob
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.native.library import library
from ostinato.runner.native.sampling import Draws, row_logprobs, sample_rows
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.token_lists import prepare
from tests.runner.sampling.sampling_reference import check, random_logits, random_task
from tests.support.instruction_sets import threads_in_use

NATIVE = library()
pytestmark = pytest.mark.usefixtures("isa")

WIDTHS = (1, 7, 63, 64, 65, 400, 2000)


def sampled(logits: torch.Tensor, tasks: Sequence[SampleTask]) -> Draws:
    """Sample with the library."""
    assert NATIVE is not None
    lists = [prepare(task.params, logits.shape[1]) for task in tasks]
    numbers = [[uniform(seed, len(task.output)) for seed in task.seeds] for task in tasks]
    return sample_rows(NATIVE, logits, tasks, lists, numbers)


@pytest.mark.parametrize("vocab", WIDTHS)
def test_rows_of_all_kinds_get_what_the_definition_says(vocab: int):
    random = np.random.default_rng(vocab)
    for _ in range(1 if vocab > 1000 else 4):
        logits = random_logits(random, 16, vocab)
        check(sampled, logits, [random_task(random, vocab) for _ in logits])


@pytest.mark.parametrize(
    "how", [{}, {"top_p": 0.95}, {"top_k": 300, "top_p": 0.9}, {"min_p": 1e-4}]
)
def test_a_vocabulary_of_262_144_gets_what_the_definition_says(how: dict[str, Any]):
    random = np.random.default_rng(7)
    logits = torch.from_numpy(3 * random.normal(size=(2, 262_144))).to(torch.bfloat16)
    none = array("I")
    check(sampled, logits, [SampleTask(SamplingParams(**how), (1, 2), none, none)] * 2)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_alone_gets_what_it_gets_in_a_batch(num_threads: int):
    random = np.random.default_rng(num_threads)
    logits = random_logits(random, 16, 9000)
    tasks = [random_task(random, 9000) for _ in logits]
    with threads_in_use(num_threads):
        together = sampled(logits, tasks)
    alone = [sampled(logits[row : row + 1], tasks[row : row + 1]) for row in range(16)]

    assert together.ids == [each.ids[0] for each in alone]
    assert together.logprobs == [each.logprobs[0] for each in alone]


def test_a_flat_distribution_in_one_bucket_is_cut_exactly():
    """Scores so close, or a temperature so high, that the histogram of mass tells nothing."""
    random = np.random.default_rng(5)
    rows = np.stack([random.permutation(3000) / 1e6, random.permutation(3000) * 1.0])
    none, seeds = array("I"), tuple(range(300))
    tasks = [
        SampleTask(SamplingParams(top_p=0.3, temperature=temperature), seeds, none, none)
        for temperature in (1.0, 1e300)
    ]
    draws = check(sampled, torch.from_numpy(rows).float(), tasks)

    best = [set(np.argsort(-row)[:901].tolist()) for row in rows]
    assert all(set(ids) <= kept for ids, kept in zip(draws.ids, best, strict=True))


def test_log_probabilities_of_a_prompt_need_no_task():
    """Any rows in any order, transposed or not, and a row that is no distribution."""
    assert NATIVE is not None
    logits = torch.tensor([[0.0, 1.0, 1.0], [5.0, float("nan"), 0.0], [0.0, -torch.inf, 0.0]])
    lines = row_logprobs(
        NATIVE, logits.t().contiguous().t(), [2, 1, 0, 0], [1, 0, 2, 0], [1, 1, 3, 0]
    )

    assert lines[0] == (
        TokenLogprob(1, -math.inf, 3),
        TokenLogprob(0, pytest.approx(-math.log(2)), 1),
    )
    assert lines[1] is None and lines[2] is not None and lines[3] is not None
    assert [(e.token_id, e.rank) for e in lines[2]] == [(2, 2), (1, 1), (2, 2), (0, 3)]
    assert lines[3] == (TokenLogprob(0, pytest.approx(-math.log(1 + 2 * math.e)), 3),)

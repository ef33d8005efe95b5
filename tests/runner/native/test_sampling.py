"""The sampling kernel against its definition, with sums of whole numbers, one row at a time.

The definition is that of ``runner/torch_draws`` and ``runner/logit_edits``, slow and obvious.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ostinato.core.plan import SampleTask, TokenLogprob
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.native.library import library
from ostinato.runner.native.sampling import Draws, row_logprobs, sample_rows
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.sampling.torch_draws import draw_rows
from ostinato.runner.token_lists import prepare
from tests.support.instruction_sets import threads_in_use

NATIVE = library()
pytestmark = pytest.mark.usefixtures("isa")

WIDTHS = (1, 7, 63, 64, 65, 400, 2000)
Floats = NDArray[np.float32]


def random_task(random: np.random.Generator, vocab: int) -> SampleTask:
    """Draw a row of any parameters; now and then nothing can be sampled from it."""

    def ids(max_ids: int) -> list[int]:
        return random.integers(vocab + 2, size=random.integers(max_ids + 1)).tolist()

    def pick(*values: Any) -> Any:
        return values[random.integers(len(values))]

    allowed = pick(None, None, [token for token in ids(vocab) if token < vocab] or None)
    params = SamplingParams(
        temperature=pick(1.0, 1.0, 0.0, 0.37, 2.9, 1e-300, 1e300),
        top_k=pick(0, 0, 1, 2, 20, 70, vocab, vocab + 1),
        top_p=pick(1.0, 0.951, 0.713, 0.013),
        min_p=pick(0.0, 0.0, 0.0517, 1.0),
        logit_bias={token: pick(-100.0, 1.7, 50.0) for token in ids(3) if token < vocab},
        presence_penalty=pick(0.0, 0.0, 0.75, -2.0),
        frequency_penalty=pick(0.0, 0.0, 0.31),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
        allowed_token_ids=allowed,
        bad_words_ids=[word for word in (ids(1), ids(2), ids(3)) if word],
        stop_token_ids=ids(2),
        min_tokens=pick(0, 3),
        logprobs=pick(None, 0, 5, vocab),
    )
    seeds = tuple(random.integers(2**63, size=pick(1, 1, 9)).tolist())
    text = array("I", ids(6)), array("I", ids(8))
    return SampleTask(params, seeds, *text, banned=tuple(ids(2)))


def scores_of(logits: Floats, task: SampleTask) -> Floats:
    """Bias, penalties and bans, token by token."""
    params, output, scores = task.params, task.output.tolist(), logits.copy()
    vocab, single = len(scores), np.float32
    for token, bias in params.logit_bias.items():
        scores[token] += single(bias)
    if params.repetition_penalty != 1.0:
        penalty = single(params.repetition_penalty)
        for token in {*task.prompt, *output} & set(range(vocab)):
            seen = scores[token]
            scores[token] = seen / penalty if seen > 0 else seen * penalty
    for token in set(output) & set(range(vocab)):
        once = single(params.frequency_penalty) * single(output.count(token))
        scores[token] -= once + single(params.presence_penalty)
    held = {*task.banned, *(params.stop_token_ids if len(output) < params.min_tokens else ())}
    for *first, last in params.bad_words_ids:
        if output[len(output) - len(first) :] == first or not first:
            held.add(last)
    if params.allowed_token_ids is not None:
        held |= set(range(vocab)) - set(params.allowed_token_ids)
    scores[[token for token in held if token < vocab]] = -np.inf
    return scores


def drawn(scores: Floats, task: SampleTask) -> list[int]:
    """One id per seed; -1 where nothing can be sampled."""
    params, vocab = task.params, len(scores)
    if not np.isfinite(scores.max()):
        return [-1] * len(task.seeds)
    if params.temperature == 0:
        return [int(scores.argmax())] * len(task.seeds)
    with np.errstate(over="ignore"):
        distances = (scores.astype(np.float64) - float(scores.max())) / params.temperature
    weights = np.exp(distances)
    weights[weights < params.min_p] = 0
    masses = np.floor(weights * 2.0 ** (62 - vocab.bit_length())).astype(np.int64)
    order = np.lexsort((np.arange(vocab), -scores))
    if 0 < params.top_k < vocab:
        masses[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(masses[order]) - masses[order]
        masses[order[before >= params.top_p * float(masses.sum())]] = 0
    up_to = np.cumsum(masses)
    numbers = (uniform(seed, len(task.output)) for seed in task.seeds)
    targets = [int(number * float(up_to[-1])) for number in numbers]
    return [int(np.searchsorted(up_to, target, side="right")) for target in targets]


def logprobs_of(logits: Floats, ids: Sequence[int], count: int) -> list[list[TokenLogprob]]:
    """The sampled token, then the most likely ones."""
    wide = logits.astype(np.float64)
    total = wide.max() + math.log(np.exp(wide - wide.max()).sum())
    order = np.lexsort((np.arange(len(wide)), -wide)).tolist()
    others = [TokenLogprob(i, wide[i] - total, n) for n, i in enumerate(order[:count], 1)]
    return [[TokenLogprob(i, wide[i] - total, order.index(i) + 1), *others] for i in ids]


def random_logits(random: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Draw rows with ties, with infinities, with NaN, and some that are -inf throughout."""
    coarse, fine = random.integers(-9, 9, size=(rows, vocab)) / 4, random.normal(size=(rows, vocab))
    logits = np.where(random.random((rows, 1)) < 0.5, coarse, 5 * fine)
    for row in logits[random.random(rows) < 0.3]:
        row[random.integers(vocab, size=1 + vocab // 9)] = -np.inf
    for odd in (np.nan, -np.nan, np.inf):
        for row in np.flatnonzero(random.random(rows) < 0.04):
            logits[row, random.integers(vocab)] = odd
    logits[random.random(rows) < 0.04] = -np.inf
    dtype = (torch.float32, torch.bfloat16, torch.float16)[random.integers(3)]
    return torch.from_numpy(logits).to(dtype)


def sampled(logits: torch.Tensor, tasks: Sequence[SampleTask]) -> Draws:
    """Sample with the library."""
    assert NATIVE is not None
    lists = [prepare(task.params, logits.shape[1]) for task in tasks]
    numbers = [[uniform(seed, len(task.output)) for seed in task.seeds] for task in tasks]
    return sample_rows(NATIVE, logits, tasks, lists, numbers)


def check(logits: torch.Tensor, tasks: Sequence[SampleTask]) -> Draws:
    """Compare a batch with the definition."""
    draws = sampled(logits, tasks)
    for row, task, ids, entries in zip(logits, tasks, draws.ids, draws.logprobs, strict=True):
        raw, count = row.float().numpy(), task.params.logprobs
        assert ids == drawn(scores_of(raw, task), task), task
        if count is None or -1 in ids or not np.isfinite(raw.max()):
            assert entries is None
            continue
        assert entries is not None
        expected = logprobs_of(raw, ids, count)
        assert [[(e.token_id, e.rank) for e in line] for line in entries] == [
            [(e.token_id, e.rank) for e in line] for line in expected
        ]
        assert [e.logprob for line in entries for e in line] == pytest.approx(
            [e.logprob for line in expected for e in line], abs=1e-6
        )
    return draws


@pytest.mark.parametrize("vocab", WIDTHS)
def test_rows_of_all_kinds_get_what_the_definition_says(vocab: int):
    random = np.random.default_rng(vocab)
    for _ in range(1 if vocab > 1000 else 4):
        logits = random_logits(random, 16, vocab)
        check(logits, [random_task(random, vocab) for _ in logits])


@pytest.mark.parametrize(
    "how", [{}, {"top_p": 0.95}, {"top_k": 300, "top_p": 0.9}, {"min_p": 1e-4}]
)
def test_a_vocabulary_of_262_144_gets_what_the_definition_says(how: dict[str, Any]):
    random = np.random.default_rng(7)
    logits = torch.from_numpy(3 * random.normal(size=(2, 262_144))).to(torch.bfloat16)
    none = array("I")
    check(logits, [SampleTask(SamplingParams(**how), (1, 2), none, none)] * 2)


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


def test_torch_draws_the_same_tokens():
    """What serves a GPU, float64, and a machine without the library."""
    random = np.random.default_rng(3)
    for vocab in (5, 700):
        logits = random_logits(random, 40, vocab)
        tasks = [random_task(random, vocab) for _ in logits]
        lists = [prepare(task.params, vocab) for task in tasks]
        numbers = [[uniform(seed, len(task.output)) for seed in task.seeds] for task in tasks]

        assert draw_rows(logits, tasks, lists, numbers).ids == sampled(logits, tasks).ids


def test_a_flat_distribution_in_one_bucket_is_cut_exactly():
    """Scores so close, or a temperature so high, that the histogram of mass tells nothing."""
    random = np.random.default_rng(5)
    rows = np.stack([random.permutation(3000) / 1e6, random.permutation(3000) * 1.0])
    none, seeds = array("I"), tuple(range(300))
    tasks = [
        SampleTask(SamplingParams(top_p=0.3, temperature=temperature), seeds, none, none)
        for temperature in (1.0, 1e300)
    ]
    draws = check(torch.from_numpy(rows).float(), tasks)

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

"""The sampler's definition, slow and obvious: one row at a time, with sums of whole numbers.

It is that of ``runner/sampling/torch_draws`` and ``runner/sampling/logit_edits``, and of the native
library.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ostinato.core.plan import SampleTask, TokenLogprob
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.native.sampling import Draws
from ostinato.runner.sampling.randomness import uniform

Floats = NDArray[np.float32]


def task(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
    seeds: Sequence[int] = (1,),
    **params: object,
) -> SampleTask:
    """A sample task from plain lists."""
    return SampleTask(
        SamplingParams(**params),
        tuple(seeds),
        array("I", prompt),
        array("I", output),
        tuple(banned),
    )


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


def check(
    draw: Callable[[torch.Tensor, Sequence[SampleTask]], Draws],
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
) -> Draws:
    """Compare what is drawn for a batch with the definition."""
    draws = draw(logits, tasks)
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
            [e.logprob for line in expected for e in line], abs=1e-5
        )
    return draws

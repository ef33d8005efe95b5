"""Draws tokens in torch: on a GPU, in float64, and without the native library.

Rows of a batch are grouped by what they need, and each need is one tensor operation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.core.plan import SampleTask, TokenLogprob
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.native.argmax import NONE, argmax
from ostinato.runner.native.sampling import Draws
from ostinato.runner.sampling.logit_edits import edit_logits
from ostinato.runner.sampling.logprobs import are_distributions, rows_at_once, token_logprobs
from ostinato.runner.sampling.truncation import truncated
from ostinato.runner.token_lists import TokenLists


def draw_rows(
    logits: Tensor,
    tasks: Sequence[SampleTask],
    lists: Sequence[TokenLists],
    numbers: Sequence[Sequence[float]],
) -> Draws:
    """Sample rows.

    Args:
        logits: Raw logits, shape (num_rows, vocab).
        tasks: One per row.
        lists: The prepared lists of each task's parameters.
        numbers: Each row's uniform random numbers, one per seed.
    """
    ids = _choose(edit_logits(logits, tasks, lists), tasks, numbers)
    return Draws(ids, _logprobs(logits, tasks, ids))


def _choose(
    scores: Tensor, tasks: Sequence[SampleTask], numbers: Sequence[Sequence[float]]
) -> list[list[int]]:
    """Return one id per row and seed, ``NONE`` where a row has no distribution."""
    ids: list[list[int]] = [[] for _ in tasks]
    greedy = [row for row, task in enumerate(tasks) if task.params.greedy]
    random = [row for row, task in enumerate(tasks) if not task.params.greedy]
    if greedy:
        for row, token in zip(greedy, argmax(_select(scores, greedy)), strict=True):
            ids[row] = [token] * len(tasks[row].seeds)
    step = rows_at_once(scores.shape[1])
    for rows in (random[start : start + step] for start in range(0, len(random), step)):
        params = [tasks[row].params for row in rows]
        drawn = _draw(_select(scores, rows), params, [numbers[row] for row in rows])
        for row, tokens in zip(rows, drawn, strict=True):
            ids[row] = tokens[: len(tasks[row].seeds)]
    return ids


def _select(scores: Tensor, rows: list[int]) -> Tensor:
    """Return some rows in order, without a copy if they are all."""
    if len(rows) == len(scores):
        return scores
    return scores[torch.tensor(rows, device=scores.device)]


def _draw(
    scores: Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]
) -> list[list[int]]:
    """Draw each row's ids by inverse CDF.

    Args:
        scores: Edited logits, shape (num_rows, vocab).
        params: One per row, none of them greedy.
        numbers: The random numbers of each row.

    Returns:
        Ids, shape (num_rows, most numbers of a row): one per number, then padding.
    """
    vocab, min_p = scores.shape[1], [p.min_p for p in params]
    masses = token_masses(
        scores,
        _column([p.temperature for p in params], scores),
        _column(min_p, scores) if any(p > 0.0 for p in min_p) else None,
    )
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_p = [p.top_p for p in params]
    if min(top_k) < vocab or min(top_p) < 1.0:
        masses = truncated(scores, masses, _column(top_k, scores), _column(top_p, scores))
    ids = draw_ids(masses, _padded(numbers, scores))
    sound = scores.amax(-1, keepdim=True).isfinite()
    return torch.where(sound, ids, NONE).tolist()


def draw_ids(masses: Tensor, numbers: Tensor) -> Tensor:
    """Draw ids by inverse CDF.

    Args:
        masses: Weight of each token, int64, shape (num_rows, vocab).
        numbers: Uniform random numbers, float64, shape (num_rows, num_samples).

    Returns:
        Shape (num_rows, num_samples), int64.
    """
    up_to = masses.cumsum(-1)  # (num_rows, vocab)
    # Always below the total: as a float64 it is rounded by half an ulp at most, and the largest
    # uniform, 1 - 2**-53, takes a whole one off.
    targets = (numbers * up_to[:, -1:]).long()
    return torch.searchsorted(up_to, targets, right=True)  # first id with up_to > target


def token_masses(scores: Tensor, temperatures: Tensor, min_p: Tensor | None) -> Tensor:
    """Return the weight of each token after temperature and ``min_p``, int64, shaped as ``scores``.

    The weight of the most likely token is a power of two such that a row's sum is below 2**62.

    Args:
        scores: Edited logits, shape (num_rows, vocab).
        temperatures: Above 0, float64, shape (num_rows, 1).
        min_p: Likewise, from 0 on; None where no row sets it.
    """
    best = scores.amax(-1, keepdim=True).double()
    weights = scores.to(torch.float64, copy=True).sub_(best).div_(temperatures).exp_()  # at most 1
    if min_p is not None:
        weights.masked_fill_(weights < min_p, 0.0)
    scale = 2.0 ** (62 - scores.shape[1].bit_length())
    return weights.mul_(scale).long()


def _padded(numbers: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Return the random numbers of all rows, float64, shape (num_rows, most numbers)."""
    width = max(len(line) for line in numbers)
    padded = [[*line, *[0.0] * (width - len(line))] for line in numbers]
    return torch.tensor(padded, dtype=torch.float64, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one float64 per row where ``like`` is, shape (num_rows, 1)."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _logprobs(
    logits: Tensor, tasks: Sequence[SampleTask], ids: list[list[int]]
) -> list[list[tuple[TokenLogprob, ...]] | None]:
    """Return the log-probabilities asked for; None for rows that have none."""
    logprobs: list[list[tuple[TokenLogprob, ...]] | None] = [None] * len(tasks)
    rows = [
        row
        for row, task in enumerate(tasks)
        if task.params.logprobs is not None and NONE not in ids[row]
    ]
    if not rows:
        return logprobs
    sound = are_distributions(_select(logits, rows))
    rows = [row for row, is_sound in zip(rows, sound, strict=True) if is_sound]
    places = [row for row in rows for _ in ids[row]]
    entries = iter(
        token_logprobs(
            logits,
            places,
            [token for row in rows for token in ids[row]],
            [tasks[row].params.logprobs or 0 for row in places],
        )
    )
    for row in rows:
        logprobs[row] = [next(entries) for _ in ids[row]]
    return logprobs

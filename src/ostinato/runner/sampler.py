"""Chooses the next token.

Rows of a batch are grouped by what they need, and each need is one tensor operation::

    raw logits ─► bias, penalties, bans ─┬─► temperature 0: argmax
      │           (logit_edits)          └─► else: weights ─► truncate ─► inverse CDF ─► ids
      └─► log-probabilities (logprobs)                        (truncation)   ▲
                                                    uniform(seed, position) ─┘ (randomness)

**Same seed, same text.** Given the same logits, a row's token does not depend on the batch:

* its random number is a function of its seed and its number of tokens;
* weights are float64 truncated to integers, 2**44 for the most likely token of a vocabulary of
  150,000, so that the sums of the inverse CDF are exact. Sums of floats depend on the order of
  addition, hence on the batch's shape and the device. Truncation moves less than 1e-8 of the mass,
  less than the error of float32 logits;
* tokens are ordered by id in the CDF, so nothing needs to be sorted, and ties go to the lower id.

A token that was banned or truncated has weight zero exactly and cannot be drawn.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import SampledToken, SampleTask, TokenConstraint, TokenLogprob
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.logit_edits import asks_for_edits, edit_logits
from ostinato.runner.logprobs import rows_at_once, token_logprobs
from ostinato.runner.native.argmax import best_places, takes
from ostinato.runner.native.library import library
from ostinato.runner.randomness import uniform
from ostinato.runner.truncation import truncate

MODEL_FAULT = "the model gave"
"""How errors begin that are not the fault of a request's parameters."""

_NONE = -1
"""The token of a row from which none can be sampled."""


class Sampler:
    """Chooses the next tokens of a batch; has no state."""

    def sample(self, logits: Tensor, tasks: Sequence[SampleTask]) -> list[tuple[SampledToken, ...]]:
        """Sample each row.

        Args:
            logits: Raw logits of any float dtype, shape (num_rows, vocab).
            tasks: One per row.

        Returns:
            One tuple per row, with one token per seed of its task. If no token can be sampled from
            a row, its tokens have an error that says why; other rows are not affected.

        Effects: none, neither on the logits nor on the tasks.
        Cost: one argmax for greedy rows; O(vocab) for each other row. Only the best tokens are
            sorted, and only for ``top_k`` and ``top_p``.
        """
        assert logits.ndim == 2 and len(logits) == len(tasks), "one row of logits per task"
        if all(map(_is_plain, tasks)):
            ids = _argmax(logits)
            if _NONE not in ids:
                pairs = zip(ids, tasks, strict=True)
                return [(SampledToken(token),) * len(task.seeds) for token, task in pairs]
        return self._sample(logits, tasks)

    @torch.inference_mode()
    def _sample(
        self, logits: Tensor, tasks: Sequence[SampleTask]
    ) -> list[tuple[SampledToken, ...]]:
        """Sample rows of all kinds."""
        scores = edit_logits(logits, tasks)
        ids = _choose(scores, tasks)
        failed = {
            row: f"no token can be sampled: {_explain(logits[row], scores[row], tasks[row])}"
            for row, chosen in enumerate(ids)
            if _NONE in chosen
        }
        for row in failed:
            ids[row] = [0] * len(tasks[row].seeds)
        logprobs = _logprobs(logits, tasks, ids)
        return [
            tuple(
                SampledToken(token, logprobs.get((row, place), ()), failed.get(row, ""))
                for place, token in enumerate(chosen)
            )
            for row, chosen in enumerate(ids)
        ]


def _is_plain(task: SampleTask) -> bool:
    """Return whether a row only asks for its most likely token, as most greedy rows do."""
    return task.params.greedy and task.params.logprobs is None and not asks_for_edits(task)


def _choose(scores: Tensor, tasks: Sequence[SampleTask]) -> list[list[int]]:
    """Return one id per row and seed, ``_NONE`` where a row has no distribution."""
    ids: list[list[int]] = [[] for _ in tasks]
    greedy = [row for row, task in enumerate(tasks) if task.params.greedy]
    random = [row for row, task in enumerate(tasks) if not task.params.greedy]
    if greedy:
        for row, token in zip(greedy, _argmax(_select(scores, greedy)), strict=True):
            ids[row] = [token] * len(tasks[row].seeds)
    step = rows_at_once(scores.shape[1])
    for rows in (random[start : start + step] for start in range(0, len(random), step)):
        drawn = _draw(_select(scores, rows), [tasks[row] for row in rows])
        for row, tokens in zip(rows, drawn, strict=True):
            ids[row] = tokens[: len(tasks[row].seeds)]
    return ids


def _select(scores: Tensor, rows: list[int]) -> Tensor:
    """Return some rows in order, without a copy if they are all."""
    if len(rows) == len(scores):
        return scores
    return scores[torch.tensor(rows, device=scores.device)]


def _argmax(scores: Tensor) -> list[int]:
    """Return each row's most likely id, the lowest of several; ``_NONE`` if it is not finite."""
    native = library()
    if native is not None and takes(scores):
        return best_places(native, scores)  # -1 is _NONE
    if scores.device.type == "cpu":
        return _argmax_by_numpy(scores)
    best = scores.argmax(-1, keepdim=True)
    return torch.where(scores.gather(1, best).isfinite(), best, _NONE)[:, 0].tolist()


def _argmax_by_numpy(scores: Tensor) -> list[int]:
    """Return the same on a CPU, where ``torch.argmax`` compares one number at a time."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).numpy()
    best = wide.argmax(-1)  # of a NaN, if there is one, as with torch
    found = np.take_along_axis(wide, best[:, None], -1)[:, 0]
    ids: list[int] = np.where(np.isfinite(found), best, _NONE).tolist()
    return ids


def _draw(scores: Tensor, tasks: Sequence[SampleTask]) -> list[list[int]]:
    """Draw each row's ids by inverse CDF.

    Args:
        scores: Edited logits, shape (num_rows, vocab).
        tasks: One per row, none of them greedy.

    Returns:
        Ids, shape (num_rows, most seeds of a task): one per seed, then padding.
    """
    masses = _masses(scores, [task.params for task in tasks])
    truncate(scores, masses, [task.params for task in tasks])
    up_to = masses.cumsum(-1)  # (num_rows, vocab)
    totals = up_to[:, -1:]
    # Always below the total: as a float64 it is rounded by half an ulp at most, and the largest
    # uniform, 1 - 2**-53, takes a whole one off.
    targets = (_uniforms(tasks, scores) * totals).long()
    ids = torch.searchsorted(up_to, targets, right=True)  # first id with up_to > target
    sound = scores.amax(-1, keepdim=True).isfinite()
    return torch.where(sound, ids, _NONE).tolist()


def _masses(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weight of each token after temperature and ``min_p``, int64, shaped as ``scores``.

    The weight of the most likely token is a power of two such that a row's sum is below 2**62.
    """
    temperatures = _column([p.temperature for p in params], scores)
    best = scores.amax(-1, keepdim=True).double()
    weights = scores.to(torch.float64, copy=True).sub_(best).div_(temperatures).exp_()  # at most 1
    min_p = _column([p.min_p for p in params], scores)
    if any(p.min_p > 0.0 for p in params):
        weights.masked_fill_(weights < min_p, 0.0)
    scale = 2.0 ** (62 - scores.shape[1].bit_length())
    return weights.mul_(scale).long()


def _uniforms(tasks: Sequence[SampleTask], like: Tensor) -> Tensor:
    """Return the random numbers of all seeds, float64, shape (num_rows, most seeds)."""
    width = max(len(task.seeds) for task in tasks)
    numbers = [[uniform(seed, len(task.output)) for seed in task.seeds] for task in tasks]
    padded = [line + [0.0] * (width - len(line)) for line in numbers]
    return torch.tensor(padded, dtype=torch.float64, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one float64 per row where ``like`` is, shape (num_rows, 1)."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _logprobs(
    logits: Tensor, tasks: Sequence[SampleTask], ids: list[list[int]]
) -> dict[tuple[int, int], tuple[TokenLogprob, ...]]:
    """Return the log-probabilities asked for, by row and place among its seeds."""
    places = [
        (row, place, task.params.logprobs)
        for row, task in enumerate(tasks)
        if task.params.logprobs is not None
        for place in range(len(ids[row]))
    ]
    entries = token_logprobs(
        logits,
        [row for row, _, _ in places],
        [ids[row][place] for row, place, _ in places],
        [count for _, _, count in places],
    )
    return {(row, place): entry for (row, place, _), entry in zip(places, entries, strict=True)}


def _explain(logits: Tensor, scores: Tensor, task: SampleTask) -> str:
    """Return why nothing can be sampled from a row; logits before and after edits, (vocab,)."""
    if logits.isnan().any():
        return (
            f"{MODEL_FAULT} NaN: its weights are broken, or its activations overflow "
            f"{logits.dtype}; try dtype='float32'"
        )
    if logits.isposinf().any():
        return f"{MODEL_FAULT} +inf: its activations overflow {logits.dtype}; try dtype='float32'"
    if logits.isneginf().all():
        return f"{MODEL_FAULT} -inf for every token of the vocabulary"
    if scores.isneginf().all() and task.constraint is not None:
        return _explain_constraint(task, task.constraint)
    params = task.params
    if scores.isneginf().all() and (params.allowed_token_ids or params.bad_words_ids):
        return (
            "allowed_token_ids, bad_words and min_tokens together leave no token; allow more ids "
            "or lower min_tokens"
        )
    if scores.isneginf().all():
        return (
            f"min_tokens={task.params.min_tokens} bans {len(task.banned)} ids, which are all that "
            "the model can give; lower min_tokens or name fewer stop_token_ids"
        )
    return (
        f"repetition_penalty={task.params.repetition_penalty} overflows {scores.dtype}; "
        "bring it nearer to 1"
    )


def _explain_constraint(task: SampleTask, constraint: TokenConstraint) -> str:
    """Return why a structured output cannot continue."""
    if constraint.error:
        return f"structured_outputs failed: {constraint.error}"
    if task.banned:
        return (
            f"structured_outputs allows nothing now but {len(task.banned)} ids that are banned: "
            f"lower min_tokens={task.params.min_tokens}, or switch ignore_eos off"
        )
    return (
        "structured_outputs allows no id of this model's vocabulary now: what must follow cannot "
        "be written with it"
    )

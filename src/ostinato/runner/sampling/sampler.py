"""Chooses the next token.

Each row goes through the same steps, in the native library (``native/sampling``) or, where that
cannot run, in torch (``torch_draws``)::

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

import torch
from torch import Tensor

from ostinato.core.plan import SampledToken, SampleTask, TokenConstraint
from ostinato.runner.native.argmax import argmax, takes
from ostinato.runner.native.library import library
from ostinato.runner.native.sampling import Draws, sample_rows
from ostinato.runner.sampling.logit_edits import asks_for_edits, edit_logits
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.sampling.torch_draws import draw_rows
from ostinato.runner.token_lists import PreparedLists, TokenLists

MODEL_FAULT = "the model gave"
"""How errors begin that are not the fault of a request's parameters."""


class Sampler:
    """Chooses the next tokens of a batch; keeps nothing but the prepared lists of parameters."""

    def __init__(self) -> None:
        self._lists = PreparedLists()

    def sample(self, logits: Tensor, tasks: Sequence[SampleTask]) -> list[tuple[SampledToken, ...]]:
        """Sample each row.

        Args:
            logits: Raw logits of any float dtype, shape (num_rows, vocab).
            tasks: One per row.

        Returns:
            One tuple per row, with one token per seed of its task. If no token can be sampled from
            a row, its tokens have an error that says why; other rows are not affected.

        Effects: none, neither on the logits nor on the tasks.
        Cost: one argmax for greedy rows; O(vocab) for each other row, which torch sorts where
            ``top_k`` or ``top_p`` is set, and the library does not. Lists of sampling parameters
            are prepared at their first use.
        """
        assert logits.ndim == 2 and len(logits) == len(tasks), "one row of logits per task"
        if all(map(_is_plain, tasks)):
            ids = argmax(logits)
            if -1 not in ids:
                pairs = zip(ids, tasks, strict=True)
                return [(SampledToken(token),) * len(task.seeds) for token, task in pairs]
        return self._sample(logits, tasks)

    @torch.inference_mode()
    def _sample(
        self, logits: Tensor, tasks: Sequence[SampleTask]
    ) -> list[tuple[SampledToken, ...]]:
        """Sample rows of all kinds."""
        lists = [self._lists.of(task.params, logits.shape[1]) for task in tasks]
        draws = _draw(logits, tasks, lists)
        results = []
        for row, (task, ids, logprobs) in enumerate(
            zip(tasks, draws.ids, draws.logprobs, strict=True)
        ):
            if -1 in ids or (logprobs is None and task.params.logprobs is not None):
                edited = edit_logits(logits[row : row + 1], [task], [lists[row]])[0]
                error = f"no token can be sampled: {_explain(logits[row], edited, task)}"
                results.append((SampledToken(0, error=error),) * len(ids))
            else:
                entries = logprobs or [()] * len(ids)
                results.append(tuple(map(SampledToken, ids, entries)))
        return results


def _is_plain(task: SampleTask) -> bool:
    """Return whether a row only asks for its most likely token, as most greedy rows do."""
    params = task.params
    return params.temperature == 0.0 and params.logprobs is None and not asks_for_edits(task)


def _draw(logits: Tensor, tasks: Sequence[SampleTask], lists: Sequence[TokenLists]) -> Draws:
    """Draw each row's ids, in the native library where it can."""
    numbers = [[uniform(seed, len(task.output)) for seed in task.seeds] for task in tasks]
    native = library()
    if native is not None and takes(logits):
        return sample_rows(native, logits, tasks, lists, numbers)
    return draw_rows(logits, tasks, lists, numbers)


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
            f"min_tokens={params.min_tokens} bans {_num_held_back(task)} ids, which are all that "
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
    if num_banned := _num_held_back(task):
        return (
            f"structured_outputs allows nothing now but {num_banned} ids that are banned: "
            f"lower min_tokens={task.params.min_tokens}, or switch ignore_eos off"
        )
    return (
        "structured_outputs allows no id of this model's vocabulary now: what must follow cannot "
        "be written with it"
    )


def _num_held_back(task: SampleTask) -> int:
    """Return how many ids may not come now because they would end the text."""
    is_short = len(task.output) < task.params.min_tokens
    return len({*task.banned, *(task.params.stop_token_ids if is_short else ())})

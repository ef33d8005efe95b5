"""Samples within a step: only token ids are copied to the host, and nothing waits for the device.

The draws are those of ``sampling.torch_draws``, to the bit, for rows that need no edits of their
logits, one sample, and no log-probabilities. What a row asks for is in the tables of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import SampleTask
from ostinato.runner.gpu.step_tables import Arrays
from ostinato.runner.native.argmax import NONE
from ostinato.runner.sampling.logit_edits import asks_for_edits
from ostinato.runner.sampling.logprobs import rows_at_once
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.sampling.torch_draws import draw_ids, token_masses
from ostinato.runner.sampling.truncation import truncated

_COLUMNS = ("temperature", "number", "min_p", "top_p", "top_k")
_TEMPERATURE, _NUMBER, _MIN_P, _TOP_P, _TOP_K = _COLUMNS


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """Which operations sampling takes; the same for all rows of a step.

    Attributes:
        is_random: Whether any row is not greedy.
        has_min_p: Whether any row sets ``min_p``.
        is_truncated: Whether any row sets ``top_k`` or ``top_p``.
    """

    is_random: bool
    has_min_p: bool
    is_truncated: bool


def sampling_kind(tasks: Sequence[SampleTask], vocab: int) -> SamplingKind | None:
    """Return how a step samples these tasks; None if it cannot."""
    if any(
        len(task.seeds) != 1
        or task.params.logprobs is not None
        or task.params.readout is not None
        or asks_for_edits(task)
        for task in tasks
    ):
        return None
    random = [task.params for task in tasks if not task.params.greedy]
    if random and len(tasks) > rows_at_once(vocab):
        return None
    return SamplingKind(
        bool(random),
        any(params.min_p > 0.0 for params in random),
        any(0 < params.top_k < vocab or params.top_p < 1.0 for params in random),
    )


def sampling_tables(
    kind: SamplingKind, tasks: Sequence[SampleTask], vocab: int, num_rows: int
) -> Arrays:
    """Return what rows ask for, shape (num_rows,) each; rows beyond the tasks are greedy."""
    if not kind.is_random:
        return {}
    given = [task.params for task in tasks]
    numbers = [
        0.0 if task.params.greedy else uniform(task.seeds[0], len(task.output)) for task in tasks
    ]
    columns: dict[str, tuple[Sequence[float], float]] = {
        _TEMPERATURE: ([params.temperature for params in given], 0.0),
        _NUMBER: (numbers, 0.0),
    }
    if kind.has_min_p:
        columns[_MIN_P] = [params.min_p for params in given], 0.0
    if kind.is_truncated:
        columns[_TOP_P] = [params.top_p for params in given], 1.0
        top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in given]
        columns[_TOP_K] = top_k, vocab
    return {
        name: np.array([*values, *[rest] * (num_rows - len(values))], dtype=np.float64)
        for name, (values, rest) in columns.items()
    }


def sample_in_step(logits: Tensor, kind: SamplingKind, tables: dict[str, Tensor]) -> Tensor:
    """Return each row's id, ``NONE`` where a row has no distribution, shape (num_rows,)."""
    best = logits.argmax(-1, keepdim=True)
    ids = best
    if kind.is_random:
        columns = {name: tables[name][:, None] for name in tables.keys() & set(_COLUMNS)}
        is_greedy = columns[_TEMPERATURE] == 0.0
        masses = token_masses(
            logits,
            columns[_TEMPERATURE].masked_fill(is_greedy, 1.0),
            columns[_MIN_P] if kind.has_min_p else None,
        )
        if kind.is_truncated:
            masses = truncated(logits, masses, columns[_TOP_K], columns[_TOP_P])
        ids = torch.where(is_greedy, best, draw_ids(masses, columns[_NUMBER]))
    return torch.where(logits.gather(1, best).isfinite(), ids, NONE)[:, 0]

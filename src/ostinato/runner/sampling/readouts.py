"""Hidden states and logits that requests read, besides tokens.

A mean is a sum that goes from step to step by way of the plan. Rows are added one by one in
float64, so that it has the same bits however the prompt is cut into steps.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import SampledToken, SampleTask, StepPlan
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.sampling.sampler import MODEL_FAULT

HIDDEN_STATE: tuple[int, ...] = ()
"""The readout of a hidden state."""


def hidden_sums(
    plan: StepPlan, rows: Sequence[range], hidden: HiddenRows
) -> dict[int, "array[float]"]:
    """Return the sums of sequences whose mean is read, by their place in the plan.

    Args:
        plan: The step.
        rows: The range of logit rows of each sequence's prompt.
        hidden: Of all rows with logits.
    """
    sums = {}
    for index, sequence in enumerate(plan.sequences):
        if sequence.hidden_sum is not None:
            added = hidden.rows[rows[index].start : rows[index].stop].double().cpu().numpy()
            total = np.array(sequence.hidden_sum or [0.0] * added.shape[1])
            for row in added:
                total += row
            sums[index] = array("d", total.tobytes())
    return sums


def with_mean(
    tokens: tuple[SampledToken, ...], total: "array[float]", count: int
) -> tuple[SampledToken, ...]:
    """Return a sampled token with the mean of ``count`` hidden states; one that failed as it is."""
    mean = torch.tensor(total, dtype=torch.float64) / count
    return tuple(token if token.error else _with_numbers(token, mean) for token in tokens)


def read_rows(
    outcomes: Sequence[tuple[SampledToken, ...]],
    tasks: Sequence[SampleTask],
    logits: Tensor,
    hidden: HiddenRows | None,
    rows: Ints,
) -> list[tuple[SampledToken, ...]]:
    """Add what was read to the tokens of those that asked.

    Args:
        outcomes: Sampled tokens, one tuple per task.
        tasks: One per sampled row.
        logits: Of the sampled rows, shape (num_tasks, num_outputs).
        hidden: Of all rows with logits; None if no task reads them.
        rows: Which of those rows are sampled, shape (num_tasks,).
    """
    read = []
    for index, (tokens, task) in enumerate(zip(outcomes, tasks, strict=True)):
        readout = task.params.readout
        if readout is None or any(token.error for token in tokens):
            read.append(tokens)
            continue
        if readout != HIDDEN_STATE:
            numbers = logits[index][list(readout)]
        else:
            assert hidden is not None, "the runner keeps what is read"
            numbers = hidden.rows[int(rows[index])]
        read.append(tuple(_with_numbers(token, numbers) for token in tokens))
    return read


def _with_numbers(token: SampledToken, numbers: Tensor) -> SampledToken:
    if not numbers.isfinite().all():
        return SampledToken(0, error=f"{MODEL_FAULT} NaN or inf: try dtype='float32'")
    return replace(token, readout=array("d", numbers.double().tolist()))

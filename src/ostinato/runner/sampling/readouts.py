"""Hidden states and logits that requests read, besides tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ostinato.core.plan import SampledToken, SampleTask, StepPlan
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.sampling.sampler import MODEL_FAULT

HIDDEN_STATE: tuple[int, ...] = ()
"""The readout of a hidden state."""


def reads_hidden(plan: StepPlan) -> bool:
    """Return whether a sequence of a step reads its hidden state."""
    return any(
        sequence.sample is not None and sequence.sample.params.readout == HIDDEN_STATE
        for sequence in plan.sequences
    )


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
            assert hidden is not None, "see reads_hidden"
            numbers = hidden.rows[int(rows[index])]
        read.append(tuple(_with_numbers(token, numbers) for token in tokens))
    return read


def _with_numbers(token: SampledToken, numbers: Tensor) -> SampledToken:
    if not numbers.isfinite().all():
        return SampledToken(0, error=f"{MODEL_FAULT} NaN or inf: try dtype='float32'")
    return replace(token, readout=array("d", numbers.double().tolist()))

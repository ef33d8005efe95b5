"""Turns a plan into input tensors.

The sequences of a step are concatenated to one row, as in Orca's selective batching (Yu et al.,
OSDI 2022), and NumPy does everything that is per token::

    sequence        A        B            C
    row             a   b b b b b b   c c c
    position        9   0 1 2 3 4 5   4 5 6
    starts          0   1             7       10      (num_sequences + 1,)
    logit rows      ^             ^         ^         last rows that sample, prompt targets

A decode with drafts is a chunk whose last rows sample, each for the draft after it.

Cost: a few Python steps per sequence, none per token. A step of decodes uses little NumPy, and
nothing here calls torch: after a forward pass that has read a gigabyte, the code of neither is in
the processor's caches, and each operation takes as long as fetching its code.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ostinato.core.plan import CopyRun, ScheduledSequence, StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step are written to, and which tokens they see.

    Attributes:
        slots: Slot of each new token, shape (num_tokens,), int64.
        copy_sources: Slots to copy from in every layer, shape (num_copied,).
        copy_targets: Slots to copy to, likewise.
        starts: First row of each sequence, and the end, shape (num_sequences + 1,).
        first_positions: Position of each sequence's first new token, shape (num_sequences,).
        blocks: All block tables, concatenated, shape (num_table_entries,).
        table_starts: First entry of each sequence's table, and the end, shape
            (num_sequences + 1,).
        block_size: Tokens per block.
        device: Where tensors go.
    """

    slots: Ints
    copy_sources: Ints
    copy_targets: Ints
    starts: Ints
    first_positions: Ints
    blocks: Ints
    table_starts: Ints
    block_size: int
    device: torch.device

    def at_rows(self, rows: Ints) -> "AttentionMetadata":
        """Return what some rows read: neighbours of one sequence are a sequence of their own.

        Args:
            rows: Ascending, shape (num_rows,); row i of the result is ``rows[i]``.
        """
        sequences = np.searchsorted(self.starts, rows, side="right") - 1
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = (np.diff(rows) > 1) | (np.diff(sequences) > 0)
        starts, of = np.append(np.flatnonzero(is_first), len(rows)), sequences[is_first]
        table_starts = self.table_starts
        tables = [self.blocks[table_starts[i] : table_starts[i + 1]] for i in of.tolist()]
        return replace(
            self,
            starts=starts,
            first_positions=self.first_positions[of] + rows[is_first] - self.starts[of],
            blocks=np.concatenate(tables),
            table_starts=_offsets(np.diff(table_starts)[of]),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, its sequences concatenated.

    Attributes:
        input_ids: Shape (num_tokens,), int64.
        position_ids: Shape (num_tokens,), int64.
        logit_rows: Rows whose logits are computed, ascending, shape (num_logit_rows,), int64.
        sample_rows: Which of the logit rows are sampled from, shape (num_sampled,), int64.
        prompt_rows: For each sequence, the range of logit rows that its prompt targets or its mean
            need.
        groups: What attention needs to know, per group of layers.
        state_slots: State slot of each sequence, shape (num_sequences,), int64; None if no layer
            has a state.
    """

    input_ids: Ints
    position_ids: Ints
    logit_rows: Ints
    sample_rows: Ints
    prompt_rows: tuple[range, ...]
    groups: tuple[AttentionMetadata, ...]
    state_slots: Ints | None = None


def build_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """Turn a plan into arrays.

    Args:
        plan: At least one sequence, each with as many block tables as there are groups.
        block_size: Tokens per block.
        device: Where tensors go.
    """
    sequences = plan.sequences
    are_decodes = all(map(_is_decode, sequences))
    parts = [(s.tokens, s.start, s.tables) for s in sequences]
    tokens, firsts, tables_of_each = zip(*parts, strict=True)
    first_positions = np.array(firsts, dtype=np.int64)
    if are_decodes:
        starts, positions = np.arange(len(sequences) + 1), first_positions
        rows = starts[:-1], starts[:-1], (range(0),) * len(sequences)
    else:
        lengths = _ints(len(s.tokens) for s in sequences)
        starts = _offsets(lengths)
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        positions = within + np.repeat(first_positions, lengths)
        rows = _logit_rows(sequences, starts)

    groups = list[AttentionMetadata]()
    for group, tables in enumerate(zip(*tables_of_each, strict=True)):
        blocks, table_starts = _concatenate(tables)
        if are_decodes:
            pairs, size = zip(tables, firsts, strict=True), block_size
            new = [table[first // size] * size + first % size for table, first in pairs]
            slots = np.array(new, dtype=np.int64)
        else:
            entries = np.repeat(table_starts[:-1], lengths) + positions // block_size
            slots = blocks[entries] * block_size + positions % block_size
        copied = _copied_slots(plan.copies, group)
        groups.append(
            AttentionMetadata(
                slots, *copied, starts, first_positions, blocks, table_starts, block_size, device
            )
        )
    return StepInputs(
        _concatenate(tokens)[0],
        positions,
        *rows,
        groups=tuple(groups),
        state_slots=None
        if sequences[0].state_slot is None
        else _ints(s.state_slot for s in sequences),
    )


def _is_decode(sequence: ScheduledSequence) -> bool:
    """Return whether a sequence has one new token, and only samples the next one."""
    return (
        len(sequence.tokens) == 1
        and sequence.sample is not None
        and sequence.hidden_sum is None
        and not sequence.prompt_targets
    )


def _logit_rows(
    sequences: Sequence[ScheduledSequence], starts: Ints
) -> tuple[Ints, Ints, tuple[range, ...]]:
    """Return the rows that need logits, which of them are sampled, and those of prompt targets."""
    logit_rows, sampled, prompt_rows = list[int](), list[int](), list[range]()
    for sequence, start, end in zip(sequences, starts.tolist(), starts[1:].tolist(), strict=False):
        # Rows of prompt targets, of a mean all; then the last ones, which are sampled.
        has_mean, num_rows = sequence.hidden_sum is not None, len(logit_rows)
        num_targets = len(sequence.tokens if has_mean else sequence.prompt_targets)
        num_samples = 0 if sequence.sample is None else 1 + len(sequence.drafted)
        first = start + sequence.first_target
        logit_rows += range(first, first + num_targets)
        prompt_rows.append(range(num_rows, num_rows + num_targets))
        if first + num_targets < end:
            logit_rows += range(end - num_samples, end)
        sampled += range(len(logit_rows) - num_samples, len(logit_rows))
    return _ints(logit_rows), _ints(sampled), tuple(prompt_rows)


def _copied_slots(copies: Sequence[CopyRun], group: int) -> tuple[Ints, Ints]:
    """Return a group's copies slot by slot, so that all can be read before any is written."""
    runs = [(c.num_tokens, c.source, c.target) for c in copies if c.group == group]
    if not runs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    lengths, sources, targets = np.array(runs, dtype=np.int64).T
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sources, targets = np.repeat(sources, lengths) + within, np.repeat(targets, lengths) + within
    assert set(sources.tolist()).isdisjoint(targets.tolist()), "chains are followed by the manager"
    return sources, targets


def _ints(values: Iterable[Any]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _offsets(lengths: Ints) -> Ints:
    """Return the start of each run, and the end of the last, shape (len(lengths) + 1,)."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _concatenate(runs: Sequence["array[int]"]) -> tuple[Ints, Ints]:
    """Return packed ids as one array, shape (num_ids,), and the start of each run."""
    packed = np.frombuffer(b"".join(map(memoryview, runs)), dtype=np.uint32)
    return packed.astype(np.int64), np.array([0, *accumulate(map(len, runs))], dtype=np.int64)

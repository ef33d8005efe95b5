"""Turns a plan into input tensors.

The sequences of a step are laid end to end in one row, as in Orca's selective batching
(Yu et al., OSDI 2022), and NumPy does everything that is per token::

    sequence        A        B            C
    row             a   b b b b b b   c c c
    position        9   0 1 2 3 4 5   4 5 6
    starts          0   1             7       10      (num_sequences + 1,)
    logits wanted   ^             ^         ^         last rows that sample, prompt targets

Cost: a few Python steps per sequence, none per token. A step of decodes goes without NumPy where it
can, and nothing here calls torch: behind a forward that has read a gigabyte, nothing of either is
in the processor's caches, and each operation takes as long as fetching its code.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ostinato.core.plan import CopyRun, ScheduledSequence, StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step are written to and which they see.

    Attributes:
        slots: Where each new token goes, shape (num_tokens,), int64.
        copy_sources: Slots to copy from in every layer, shape (num_copied,).
        copy_targets: Slots to copy to, likewise.
        starts: First row of each sequence, and the end, shape (num_sequences + 1,).
        first_positions: Position of each sequence's first new token, shape (num_sequences,).
        blocks: All block tables end to end, shape (num_table_entries,).
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


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Where the sequences of a step keep their states.

    Attributes:
        slots: Slot of each sequence, shape (num_sequences,), int64.
        starts: First row of each sequence, and the end, shape (num_sequences + 1,).
        first_positions: Position of each sequence's first new token, shape (num_sequences,).
        device: Where tensors go.
    """

    slots: Ints
    starts: Ints
    first_positions: Ints
    device: torch.device


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, its sequences end to end.

    Attributes:
        input_ids: Shape (num_tokens,), int64.
        position_ids: Shape (num_tokens,), int64.
        logit_rows: Rows whose logits are wanted, ascending, shape (num_wanted,), int64.
        sample_rows: Which of the wanted rows are sampled from, shape (num_sampled,), int64.
        prompt_rows: For each sequence, the range of wanted rows that its prompt targets need.
        groups: What attention needs to know, per group of layers.
        states: What layers with a state need to know; None where no layer has one.
    """

    input_ids: Ints
    position_ids: Ints
    logit_rows: Ints
    sample_rows: Ints
    prompt_rows: tuple[range, ...]
    groups: tuple[AttentionMetadata, ...]
    states: StateInputs | None = None


def build_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """Lay a plan out.

    Args:
        plan: At least one sequence, each with as many block tables as there are groups.
        block_size: Tokens per block.
        device: Where tensors go.
    """
    sequences = plan.sequences
    if all(map(_is_decode, sequences)):
        return _build_decodes(plan, block_size, device)
    lengths = _ints(len(s.tokens) for s in sequences)
    starts = _offsets(lengths)
    first_positions = _ints(s.start for s in sequences)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    positions = within + np.repeat(first_positions, lengths)
    wanted, sampled, prompt_rows = _wanted_rows(sequences, starts)

    def group_metadata(group: int) -> AttentionMetadata:
        blocks, table_starts = _concatenate([s.tables[group] for s in sequences])
        entries = np.repeat(table_starts[:-1], lengths) + positions // block_size
        sources, targets = _copied_slots([c for c in plan.copies if c.group == group])
        return AttentionMetadata(
            slots=blocks[entries] * block_size + positions % block_size,
            copy_sources=sources,
            copy_targets=targets,
            starts=starts,
            first_positions=first_positions,
            blocks=blocks,
            table_starts=table_starts,
            block_size=block_size,
            device=device,
        )

    return StepInputs(
        input_ids=_concatenate([s.tokens for s in sequences])[0],
        position_ids=positions,
        logit_rows=wanted,
        sample_rows=sampled,
        prompt_rows=prompt_rows,
        groups=tuple(group_metadata(group) for group in range(len(sequences[0].tables))),
        states=_states(plan, starts, first_positions, device),
    )


def _states(plan: StepPlan, starts: Ints, first: Ints, device: torch.device) -> StateInputs | None:
    """Return where states are kept; None where sequences have none."""
    if plan.sequences[0].state_slot < 0:
        return None
    slots = _ints(sequence.state_slot for sequence in plan.sequences)
    return StateInputs(slots, starts, first, device)


def _is_decode(sequence: ScheduledSequence) -> bool:
    """Whether a sequence has one new token, and asks for the next and nothing else."""
    is_single = len(sequence.tokens) == 1 and not sequence.prompt_targets
    return is_single and sequence.sample is not None


def _build_decodes(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """Do the work of ``build_inputs`` where each row is a decode."""
    sequences = plan.sequences
    starts = np.arange(len(sequences) + 1)
    positions = [s.start for s in sequences]
    first_positions = np.array(positions, dtype=np.int64)

    def group_metadata(group: int) -> AttentionMetadata:
        tables = [s.tables[group] for s in sequences]
        blocks, table_starts = _concatenate(tables)
        sources, targets = _copied_slots([c for c in plan.copies if c.group == group])
        places = [
            table[position // block_size] * block_size + position % block_size
            for table, position in zip(tables, positions, strict=True)
        ]
        return AttentionMetadata(
            slots=np.array(places, dtype=np.int64),
            copy_sources=sources,
            copy_targets=targets,
            starts=starts,
            first_positions=first_positions,
            blocks=blocks,
            table_starts=table_starts,
            block_size=block_size,
            device=device,
        )

    rows = starts[:-1]
    return StepInputs(
        input_ids=np.array([s.tokens[0] for s in sequences], dtype=np.int64),
        position_ids=first_positions,
        logit_rows=rows,
        sample_rows=rows,
        prompt_rows=(range(0),) * len(sequences),
        groups=tuple(group_metadata(group) for group in range(len(sequences[0].tables))),
        states=_states(plan, starts, first_positions, device),
    )


def _wanted_rows(
    sequences: Sequence[ScheduledSequence], starts: Ints
) -> tuple[Ints, Ints, tuple[range, ...]]:
    """Say which rows need logits, which of those are sampled from, which serve prompt targets."""
    if not any(sequence.prompt_targets for sequence in sequences):
        return _last_rows(sequences, starts)
    wanted: list[Ints] = []
    sampled: list[int] = []
    prompt_rows: list[range] = []
    num_wanted = 0
    for sequence, start, end in zip(sequences, starts[:-1], starts[1:], strict=True):
        num_targets = len(sequence.prompt_targets)
        rows = np.arange(start, start + num_targets)
        if sequence.sample is not None and start + num_targets < end:
            rows = np.append(rows, end - 1)
        prompt_rows.append(range(num_wanted, num_wanted + num_targets))
        wanted.append(rows)
        num_wanted += len(rows)
        if sequence.sample is not None:
            sampled.append(num_wanted - 1)
    return np.concatenate(wanted), np.array(sampled, dtype=np.int64), tuple(prompt_rows)


def _last_rows(
    sequences: Sequence[ScheduledSequence], starts: Ints
) -> tuple[Ints, Ints, tuple[range, ...]]:
    """Do the work of ``_wanted_rows`` in steps without prompt log-probs: nearly always."""
    samples = np.fromiter((s.sample is not None for s in sequences), dtype=np.bool_)
    wanted = starts[1:][samples] - 1
    return wanted, np.arange(len(wanted)), (range(0),) * len(sequences)


def _copied_slots(copies: Sequence[CopyRun]) -> tuple[Ints, Ints]:
    """Spell copies out slot by slot, so that all can be read before any is written.

    A run may copy what another run of the step brings; its source is then replaced by where
    that one came from, until no source is also a target.
    """
    if not copies:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    lengths = _ints(run.num_tokens for run in copies)
    within = np.arange(lengths.sum()) - np.repeat(_offsets(lengths)[:-1], lengths)
    sources = np.repeat(_ints(run.source for run in copies), lengths) + within
    targets = np.repeat(_ints(run.target for run in copies), lengths) + within
    order = np.argsort(targets)
    for _ in range(len(copies)):
        found = np.searchsorted(targets, sources, sorter=order).clip(max=len(targets) - 1)
        chained = targets[order[found]] == sources
        if not chained.any():
            break
        sources = np.where(chained, sources[order[found]], sources)
    return sources, targets


def _ints(values: Iterable[Any]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _offsets(lengths: Ints) -> Ints:
    """Where each of several runs begins, and where the last ends, shape (len(lengths) + 1,)."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _concatenate(runs: Sequence["array[int]"]) -> tuple[Ints, Ints]:
    """Lay packed ids end to end, shape (num_ids,); and say where each run begins."""
    packed = np.frombuffer(b"".join(map(memoryview, runs)), dtype=np.uint32)
    return packed.astype(np.int64), np.array([0, *accumulate(map(len, runs))], dtype=np.int64)

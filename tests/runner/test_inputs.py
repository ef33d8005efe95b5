"""A plan becomes the tensors of a step."""

from array import array

import numpy as np
import torch

from ostinato.core.ids import SequenceId, SlotId
from ostinato.core.plan import CopyRun, ScheduledSequence, StepPlan
from ostinato.runner.inputs import StepInputs, build_inputs
from tests.runner.bench import greedy

CPU = torch.device("cpu")


def scheduled(
    tokens: list[int],
    start: int,
    blocks: list[int],
    sample: bool = False,
    targets: tuple[int, ...] = (),
) -> ScheduledSequence:
    return ScheduledSequence(
        SequenceId(0),
        array("I", tokens),
        start,
        (array("I", blocks),),
        greedy() if sample else None,
        array("I", targets),
    )


def inputs(*sequences: ScheduledSequence, copies: tuple[CopyRun, ...] = ()) -> StepInputs:
    return build_inputs(StepPlan(sequences, copies), block_size=4, device=CPU)


def test_sequences_are_laid_end_to_end_with_their_own_positions_and_slots():
    """The picture of the file: a decode at 9, a new prompt, a chunk from 4 on."""
    built = inputs(
        scheduled([11], 9, [5, 6, 7], sample=True),
        scheduled([21, 22, 23, 24, 25, 26], 0, [3, 1]),
        scheduled([31, 32, 33], 4, [5, 0], sample=True),
    )

    assert built.input_ids.tolist() == [11, 21, 22, 23, 24, 25, 26, 31, 32, 33]
    assert built.position_ids.tolist() == [9, 0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert built.groups[0].slots.tolist() == [29, 12, 13, 14, 15, 4, 5, 0, 1, 2]
    assert built.groups[0].starts.tolist() == [0, 1, 7, 10]
    assert built.groups[0].first_positions.tolist() == [9, 0, 4]
    assert built.groups[0].table_starts.tolist() == [0, 3, 5, 7]


def test_logits_are_wanted_of_last_rows_that_sample_and_of_rows_with_prompt_targets():
    """The third samples in its last row, which has no target; the last one's has one."""
    built = inputs(
        scheduled([1, 2], 0, [0], sample=True),
        scheduled([3, 4, 5], 0, [1]),
        scheduled([6, 7, 8], 0, [2], sample=True, targets=(7, 8)),
        scheduled([9, 10], 0, [3], targets=(10, 11)),
    )

    assert built.logit_rows.tolist() == [1, 5, 6, 7, 8, 9]
    assert built.sample_rows.tolist() == [0, 3]
    assert built.prompt_rows == (range(0, 0), range(1, 1), range(1, 3), range(4, 6))


def test_a_row_that_both_samples_and_has_a_target_is_wanted_once():
    built = inputs(scheduled([1, 2], 0, [0], sample=True, targets=(2, 3)))

    assert built.logit_rows.tolist() == [0, 1]
    assert built.sample_rows.tolist() == [1]


def test_a_step_that_samples_nothing_wants_no_logits():
    built = inputs(scheduled([1, 2], 0, [0]))

    assert built.logit_rows.tolist() == [] and built.sample_rows.tolist() == []


def test_some_rows_read_as_sequences_of_neighbours():
    """Rows 0, 4, 5 and 9 of the picture: one of A, two neighbours of B, the last one of C."""
    built = inputs(
        scheduled([11], 9, [5, 6, 7], sample=True),
        scheduled([21, 22, 23, 24, 25, 26], 0, [3, 1]),
        scheduled([31, 32, 33], 4, [8, 0], sample=True),
    )

    read = built.groups[0].at_rows(np.array([0, 4, 5, 9]))

    assert read.starts.tolist() == [0, 1, 3, 4]
    assert read.first_positions.tolist() == [9, 3, 6]
    assert read.blocks.tolist() == [5, 6, 7, 3, 1, 8, 0]
    assert read.table_starts.tolist() == [0, 3, 5, 7]


def test_neighbouring_rows_of_two_sequences_stay_apart():
    built = inputs(scheduled([1, 2], 0, [0]), scheduled([3, 4], 0, [1]))

    assert built.groups[0].at_rows(np.array([1, 2])).starts.tolist() == [0, 1, 2]


def test_copies_are_spelled_out_slot_by_slot():
    built = inputs(
        scheduled([1], 0, [0]),
        copies=(CopyRun(SlotId(8), SlotId(20), 3), CopyRun(SlotId(2), SlotId(4), 1)),
    )

    assert built.groups[0].copy_sources.tolist() == [8, 9, 10, 2]
    assert built.groups[0].copy_targets.tolist() == [20, 21, 22, 4]


def test_ids_beyond_31_bits_stay_what_they_are():
    built = inputs(scheduled([2**32 - 1], 0, [0]))

    assert built.input_ids.tolist() == [2**32 - 1]

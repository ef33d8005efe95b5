"""Which sequences a step reads together."""

from array import array
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.read_plan import ReadBatch, ReadLimits
from ostinato.runner.attention.reads import ReadPlans
from ostinato.runner.inputs import build_inputs

ROOMY = ReadLimits(max_keys=10**6, max_pairs=10**9, max_width=10**6)
BLOCK_SIZE = 4


def batches(
    *lengths: tuple[int, int],
    window: int | None = None,
    limits: ReadLimits = ROOMY,
) -> tuple[ReadBatch, ...]:
    """Plan the reads of sequences with so many cached and new tokens."""
    table = array("I", range(100))
    sequences = tuple(
        ScheduledSequence(SequenceId(i), array("I", [0] * new), cached, (table,))
        for i, (cached, new) in enumerate(lengths)
    )
    metadata = build_inputs(StepPlan(sequences), BLOCK_SIZE, torch.device("cpu")).groups[0]
    return ReadPlans(metadata, zero_block=100).plan(window, limits).alone


def real_rows(batch: ReadBatch) -> list[int]:
    """The rows of a batch that are no padding."""
    rows = batch.rows if batch.real is None else batch.rows[batch.real]
    return rows.tolist()


def picture(found: tuple[ReadBatch, ...]) -> list[str]:
    """Each batch as sequences x queries x keys."""
    return [f"{b.num_sequences}x{b.num_queries}x{b.num_keys}" for b in found]


def test_all_decodes_of_like_length_are_one_batch():
    assert picture(batches((99, 1), (80, 1), (120, 1), (90, 1))) == ["4x1x121"]


def test_decodes_of_very_different_length_are_not_padded_to_the_longest():
    assert picture(batches((20, 1), (300, 1), (25, 1))) == ["2x1x26", "1x1x301"]


def test_ragged_prompts_meet():
    assert picture(batches((0, 20), (0, 24), (0, 60))) == ["2x24x24", "1x60x60"]


def test_only_the_blocks_that_a_window_reaches_are_gathered():
    """The query at 50 sees 43 to 50; block 10 begins at 40."""
    (batch,) = batches((50, 1), window=8)

    assert batch.blocks.tolist() == [[10, 11, 12]]
    assert batch.first_keys.tolist() == [[40]] and batch.num_keys == 11
    assert batch.visible(8)[0, 0].tolist() == [False] * 3 + [True] * 8


def test_a_long_chunk_is_cut_so_that_its_scores_fit():
    """100 pairs over at most 60 keys: one query at a time, but never fewer than asked."""
    limits = ReadLimits(max_keys=1000, max_pairs=100, max_width=1000, min_queries=8)

    assert picture(batches((40, 20), limits=limits)) == ["1x4x60", "1x8x48", "1x8x56"]


def test_a_step_is_planned_once_for_all_layers_of_a_kind():
    sequence = ScheduledSequence(SequenceId(0), array("I", [1]), 4, (array("I", [0, 1]),))
    metadata = build_inputs(StepPlan((sequence,)), BLOCK_SIZE, torch.device("cpu")).groups[0]
    plans = ReadPlans(metadata, zero_block=2)

    first = plans.plan(None, ROOMY)

    assert plans.plan(None, ROOMY) is first
    assert plans.plan(8, ROOMY) is not first


lengths = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), min_size=1, max_size=8)


@given(
    lengths,
    st.none() | st.integers(1, 40),
    st.builds(
        ReadLimits, st.integers(1, 200), st.integers(1, 400), st.integers(1, 99), st.integers(1, 8)
    ),
)
def test_every_new_token_is_in_exactly_one_batch_and_sees_just_its_own_past(
    sequences: list[tuple[int, int]], window: int | None, limits: ReadLimits
):
    """Rows are covered once; each sees its window, and gathered keys are of its own blocks."""
    found = batches(*sequences, window=window, limits=limits)

    rows = Counter(row for batch in found for row in real_rows(batch))
    assert rows == Counter(range(sum(new for _, new in sequences)))
    for batch in found:
        seen = batch.visible(window)
        past = torch.minimum(batch.positions + 1, torch.tensor(window or 10**6))
        assert torch.equal(seen.sum(dim=2), past)
        keys = batch.first_keys + torch.arange(batch.num_keys)
        tables = batch.blocks.gather(1, (keys - batch.first_keys) // BLOCK_SIZE)
        needed = keys <= batch.positions[:, -1:]
        assert torch.equal(tables[needed], (keys // BLOCK_SIZE)[needed])

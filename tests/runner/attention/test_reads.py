"""Which queries read which keys in torch."""

from array import array
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.reads import Read, ReadLimits, ReadPlans
from ostinato.runner.inputs import build_inputs

ROOMY = ReadLimits(max_keys=10**6, max_pairs=10**9, max_width=10**6)
BLOCK_SIZE = 4


def plans(*lengths: tuple[int, int]) -> ReadPlans:
    """A step of sequences with so many cached and new tokens; block n is at place n of a table."""
    table = array("I", range(100))
    sequences = tuple(
        ScheduledSequence(SequenceId(i), array("I", [0] * new), cached, (table,))
        for i, (cached, new) in enumerate(lengths)
    )
    step = StepPlan(sequences)
    return ReadPlans(build_inputs(step, BLOCK_SIZE, torch.device("cpu")).groups[0])


def test_only_the_blocks_that_a_window_reaches_are_gathered():
    """The query at 50 sees 43 to 50; block 10 begins at 40."""
    [read] = plans((50, 1)).plan(8, ROOMY).alone

    assert read.blocks.tolist() == [10, 11, 12]
    assert (read.first_key, read.num_keys) == (40, 11)
    assert read.visible(8)[0].tolist() == [False] * 3 + [True] * 8


def test_a_long_chunk_is_cut_so_that_its_scores_fit():
    """100 pairs over at most 60 keys: one query at a time, but never fewer than asked."""
    limits = ReadLimits(max_keys=1000, max_pairs=100, max_width=1000, min_queries=8)

    reads = plans((40, 20)).plan(None, limits).alone

    assert [(len(read.rows), read.num_keys) for read in reads] == [(8, 48), (8, 56), (4, 60)]


def test_a_step_is_planned_once_for_all_layers_of_a_kind():
    step = plans((4, 1))

    first = step.plan(None, ROOMY)

    assert step.plan(None, ROOMY) is first
    assert step.plan(8, ROOMY) is not first


lengths = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), min_size=1, max_size=8)


def check_keys(read: Read, window: int | None) -> None:
    """Each query sees its own window, and gathered keys are of its own blocks."""
    past = torch.minimum(read.positions + 1, torch.tensor(window or 10**6))
    assert torch.equal(read.visible(window).sum(dim=1), past)
    keys = read.first_key + torch.arange(read.num_keys)
    own = read.blocks[(keys - read.first_key) // BLOCK_SIZE]
    assert torch.equal(own, keys // BLOCK_SIZE)


@given(
    lengths,
    st.none() | st.integers(1, 40),
    st.builds(
        ReadLimits, st.integers(1, 200), st.integers(1, 400), st.integers(1, 99), st.integers(1, 8)
    ),
)
def test_every_new_token_is_in_exactly_one_read_and_sees_just_its_own_past(
    sequences: list[tuple[int, int]], window: int | None, limits: ReadLimits
):
    reads = plans(*sequences).plan(window, limits).alone

    rows = Counter(row for read in reads for row in read.rows.tolist())
    assert rows == Counter(range(sum(new for _, new in sequences)))
    for read in reads:
        check_keys(read, window)

"""Block tables as text: the runs of blocks that are read once, and their readers."""

from array import array
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.shared_runs import SharedRun, Worth, shared_columns, shared_runs
from ostinato.runner.inputs import AttentionMetadata, build_inputs

SIZE = 4


def always(num_tokens: int, num_sequences: int, num_rows: int) -> bool:
    return num_tokens > 0


def step(*tables: str, new: int = 1) -> AttentionMetadata:
    """A step of sequences that have computed all blocks of their table but the last."""
    sequences = tuple(
        ScheduledSequence(
            SequenceId(i),
            array("I", [0] * new),
            (len(table) - 1) * SIZE,
            (array("I", [ord(letter) for letter in table]),),
        )
        for i, table in enumerate(tables)
    )
    return build_inputs(StepPlan(sequences), SIZE, torch.device("cpu")).groups[0]


def picture(tables: tuple[str, ...], worth: Worth = always) -> set[str]:
    """Runs as ``blocks:sequences``."""
    return {
        f"{tables[run.sequences[0]][run.first_column : run.stop_column]}:"
        + "".join(map(str, sorted(run.sequences)))
        for run in shared_runs(step(*tables), worth)
    }


def test_tables_that_begin_alike_form_a_tree():
    """The picture in the module."""
    assert picture(("sydoX", "sydoY", "syZ", "syQ")) == {"sy:0123", "do:01"}


def test_an_edge_that_is_not_worth_it_goes_to_those_below():
    """One block for four is too little; with what follows, it is enough for two and for two."""

    def three_blocks(num_tokens: int, num_sequences: int, num_rows: int) -> bool:
        return num_tokens * (num_sequences - 1) >= 4 * SIZE

    tables = ("sabcdX", "sabcdY", "sefghX", "sefghY")
    assert picture((*tables, "sZ"), three_blocks) == {"s:01234", "abcd:01", "efgh:23"}
    tables = ("sabcX", "sabcY", "sefgX", "sefgY")
    assert picture(tables, three_blocks) == {"sabc:01", "sefg:23"}


def test_rows_are_counted_by_new_tokens():
    asked: list[tuple[int, int, int]] = []
    shared_runs(step("abX", "abY", new=3), lambda *about: bool(asked.append(about)))
    assert asked == [(2 * SIZE, 2, 6)]


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=7), st.integers(0, 20))
def test_runs_cover_each_tables_beginning_without_a_gap(tables: list[str], enough: int):
    """Whatever is worth it: tables of one run agree there, and no column is read twice."""
    metadata = step(*tables)
    runs = shared_runs(metadata, lambda tokens, members, _: tokens * (members - 1) > enough)
    columns = shared_columns(len(tables), runs)
    for i, table in enumerate(tables):
        mine: list[SharedRun] = [run for run in runs if i in run.sequences]
        assert all(one.stop_column == other.first_column for one, other in pairwise(mine))
        assert columns[i] == (mine[-1].stop_column if mine else 0) <= len(table) - 1
        assert not mine or mine[0].first_column == 0
    for run in runs:
        cuts = {tables[i][: run.stop_column] for i in run.sequences}
        assert len(cuts) == 1 and len(run.sequences) > 1


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=2, max_size=7))
def test_if_all_is_worth_it_all_that_is_shared_is_in_a_run(tables: list[str]):
    """Against the slow question: how much does each table share with any other?"""
    metadata = step(*tables)
    columns = shared_columns(len(tables), shared_runs(metadata, always))
    past = [table[:-1] for table in tables]
    expected = [
        max(_common(own, other) for j, other in enumerate(past) if j != i)
        for i, own in enumerate(past)
    ]
    np.testing.assert_array_equal(columns, expected)


def _common(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )

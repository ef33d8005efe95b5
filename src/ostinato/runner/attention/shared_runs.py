"""Finds the runs of blocks that several sequences of a step share.

Block tables that begin alike form a tree; each edge of it is a *shared run*::

    tables           runs                      read privately
    A  0 1 2 3 7     [0 1] by A B C D          A  7
    B  0 1 2 3 8     └─ [2 3] by A B           B  8
    C  0 1 4 9                                 C  4 9
    D  0 1 5                                   D  5

Only blocks whose tokens all precede a sequence's first new token count, so every query of
it sees every key of a run and no mask is needed. Where the backend holds an edge not to be
worth a reading of its own, its blocks go to the edges below it, and at last to the sequences.

Cost: nothing but a look at first blocks where no two sequences begin alike; else a sort of the
tables as bytes and a comparison of neighbours, once per step.
Source: a tree of shared prefixes read level by level, as in Hydragen (Juravsky et al., arXiv
2402.05099), ChunkAttention (Ye et al., arXiv 2402.15220) and FlashInfer's cascades (Ye et al.,
arXiv 2501.01005).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ostinato.runner.inputs import AttentionMetadata, Ints

Bools = npt.NDArray[np.bool_]

Worth = Callable[[int, int, int], bool]
"""Decides whether to read a run separately, from its tokens, the sequences that share it, and their
new tokens."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Neighbouring blocks that several sequences hold at the same place of their tables.

    Attributes:
        sequences: The sequences that share it, as indices into the step, at least two.
        first_column: Where it begins in their tables.
        num_blocks: How long it is.
    """

    sequences: tuple[int, ...]
    first_column: int
    num_blocks: int

    @property
    def stop_column(self) -> int:
        """Column after its last."""
        return self.first_column + self.num_blocks


def shared_runs(
    metadata: AttentionMetadata, worth: Worth, among: Bools | None = None
) -> tuple[SharedRun, ...]:
    """Find the runs of a step, each before those below it in the tree.

    Args:
        metadata: Whose tables.
        worth: Which edges are worth a reading of their own.
        among: Which sequences may share, shape (num_sequences,); None is all of them.

    Returns:
        Runs; those of one sequence are neighbours, from column 0 on.
    """
    past = metadata.first_positions // metadata.block_size
    if among is not None:
        past = np.where(among, past, 0)
    return tuple(
        run
        for sequences in _that_begin_alike(metadata, past)
        for run in _edges(metadata, *_sorted(metadata, past, sequences), worth)
    )


def shared_columns(num_sequences: int, runs: Sequence[SharedRun]) -> Ints:
    """Count the columns of each sequence's table that runs cover, shape (num_sequences,)."""
    columns = np.zeros(num_sequences, dtype=np.int64)
    for run in runs:  # those below come later, and reach further
        columns[list(run.sequences)] = run.stop_column
    return columns


def _that_begin_alike(metadata: AttentionMetadata, past: Ints) -> Iterator[list[int]]:
    """Group the sequences whose first block is the same, and computed before the step."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    firsts = metadata.blocks[metadata.table_starts[:-1]].tolist()
    for sequence, (first, num_past) in enumerate(zip(firsts, past.tolist(), strict=True)):
        if num_past:
            groups[first].append(sequence)
    return (group for group in groups.values() if len(group) > 1)


def _sorted(
    metadata: AttentionMetadata, past: Ints, sequences: list[int]
) -> tuple[list[int], list[int]]:
    """Put tables that begin alike side by side.

    Returns:
        The sequences in order, and how many leading blocks each shares with the next.
    """
    starts = metadata.table_starts
    tables = {i: metadata.blocks[starts[i] : starts[i] + past[i]] for i in sequences}
    order = sorted(sequences, key={i: table.tobytes() for i, table in tables.items()}.__getitem__)
    return order, [_num_common(tables[one], tables[other]) for one, other in pairwise(order)]


def _num_common(one: Ints, other: Ints) -> int:
    """Count the leading blocks that two tables share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _edges(
    metadata: AttentionMetadata, order: list[int], alike: list[int], worth: Worth
) -> Iterator[SharedRun]:
    """Walk down the tree of sorted tables, and yield the edges worth reading once."""
    num_new = np.diff(metadata.starts)
    todo = [(0, len(order), 0)]
    while todo:
        low, high, column = todo.pop()
        depth = min(alike[low : high - 1])
        members = order[low:high]
        num_tokens = (depth - column) * metadata.block_size
        if worth(num_tokens, len(members), int(num_new[members].sum())):
            yield SharedRun(tuple(members), column, depth - column)
            column = depth
        todo.extend((*child, column) for child in _children(alike, low, high, depth))


def _children(alike: list[int], low: int, high: int, depth: int) -> Iterator[tuple[int, int]]:
    """Cut a range of tables where neighbours share no more than its edge does."""
    start = low
    for stop in range(low + 1, high + 1):
        if stop == high or alike[stop - 1] == depth:
            if stop - start > 1:
                yield start, stop
            start = stop

"""Finds the runs of blocks that several sequences of a step share.

Block tables that begin alike form a tree; each edge of it is a *shared run*::

    tables           runs                      read privately
    A  0 1 2 3 7     [0 1] by A B C D          A  7
    B  0 1 2 3 8     └─ [2 3] by A B           B  8
    C  0 1 4 9                                 C  4 9
    D  0 1 5                                   D  5

Only blocks whose tokens are all before a sequence's first new token count, so every query sees
every key of a run, and no mask is needed. If an edge is not worth a separate read, its blocks are
read with the edges below it, or with the sequences.

Cost: a comparison of first blocks if no two sequences begin with the same one; otherwise the tables
are sorted as bytes and adjacent ones compared, once per step.
Source: a tree of shared prefixes read level by level, as in Hydragen (Juravsky et al., arXiv
2402.05099), ChunkAttention (Ye et al., arXiv 2402.15220) and FlashInfer's cascades (Ye et al.,
arXiv 2501.01005).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ostinato.runner.inputs import AttentionMetadata, Ints

Worth = Callable[[int, int, int], bool]
"""Decides whether to read a run separately, from its tokens, the sequences that share it, and their
new tokens."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Adjacent blocks that several sequences have at the same place of their tables.

    Attributes:
        sequences: Indices of the sequences in the step, at least two.
        first_column: Its first column in their tables.
        num_blocks: Its length.
    """

    sequences: tuple[int, ...]
    first_column: int
    num_blocks: int

    @property
    def stop_column(self) -> int:
        """The column after its last."""
        return self.first_column + self.num_blocks


def shared_runs(metadata: AttentionMetadata, worth: Worth) -> tuple[SharedRun, ...]:
    """Find the runs of a step, each before those below it in the tree.

    Args:
        metadata: The step.
        worth: Which edges are worth a separate read.

    Returns:
        Runs; those of one sequence are adjacent, from column 0 on.
    """
    past = metadata.first_positions // metadata.block_size
    return tuple(
        run
        for sequences in _same_first_block(metadata, past)
        for run in _edges(metadata, *_sorted(metadata, past, sequences), worth)
    )


def shared_columns(num_sequences: int, runs: Sequence[SharedRun]) -> Ints:
    """Count the columns of each sequence's table that runs cover, shape (num_sequences,)."""
    columns = np.zeros(num_sequences, dtype=np.int64)
    for run in runs:  # those further down the tree come later
        columns[list(run.sequences)] = run.stop_column
    return columns


def _same_first_block(metadata: AttentionMetadata, past: Ints) -> Iterator[list[int]]:
    """Yield groups of sequences with the same first block, computed before the step."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    firsts = metadata.blocks[metadata.table_starts[:-1]].tolist()
    for sequence, (first, num_past) in enumerate(zip(firsts, past.tolist(), strict=True)):
        if num_past:
            groups[first].append(sequence)
    return (group for group in groups.values() if len(group) > 1)


def _sorted(
    metadata: AttentionMetadata, past: Ints, sequences: list[int]
) -> tuple[list[int], list[int]]:
    """Sort tables, so that those with a common prefix are adjacent.

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
    """Traverse the tree of sorted tables, and yield the edges worth reading once."""
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
    """Split a range of tables where adjacent ones share no more than its edge."""
    start = low
    for stop in range(low + 1, high + 1):
        if stop == high or alike[stop - 1] == depth:
            if stop - start > 1:
                yield start, stop
            start = stop

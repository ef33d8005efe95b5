"""How do sequences share a run that the windows of some have left in part?

A sequence gives back the blocks that left its window, and its table then holds the block that pads
tables. Two sequences on one prefix, one of them a block further, would not begin alike any more::

    A   . . b2 b3 b4 P         A sees from block 2 on, B from block 1 on
    B   . b1 b2 b3 b4 Q        filled in: A  . b1 b2 b3 b4 P

Whoever holds the same block at the same place has the same blocks before it, so the missing ones
can be taken from B. A's rows look at none of them, since each row keeps to its own window; what is
won is that ``b2 b3 b4`` is one run. Sequences whose windows end far apart share too little for it.

Cost: nothing where no block has left a window; else a Python step per sequence.
"""

from dataclasses import replace

import numpy as np

from ostinato.runner.inputs import AttentionMetadata, Ints


def fill_in(metadata: AttentionMetadata, missing: int, window: int) -> AttentionMetadata:
    """Fill in blocks that left some windows, from sequences that still hold them.

    Args:
        metadata: What the step is; tables may begin with ``missing``.
        missing: Stands where no block is held.
        window: Positions that a query sees.

    Returns:
        The same step; what each token sees in its window is what it was.
    """
    starts = metadata.table_starts
    lefts = _num_missing(metadata, missing)
    if not lefts.any():
        return metadata
    furthest = max(1, window // metadata.block_size // 4)
    blocks = metadata.blocks.copy()
    order = np.argsort(lefts, kind="stable").tolist()
    asked = np.unique(lefts).tolist()
    holders: dict[tuple[int, int], int] = {}
    for sequence in order:
        first, left = int(starts[sequence]), int(lefts[sequence])
        stop = min(left + furthest + 1, int(starts[sequence + 1]) - first)
        holder = holders.get((left, int(blocks[first + left]))) if left < stop else None
        if holder is not None:
            other = int(starts[holder])
            blocks[first : first + left] = blocks[other : other + left]
        for column in (column for column in asked if left <= column < stop):
            holders.setdefault((column, int(blocks[first + column])), sequence)
    return replace(metadata, blocks=blocks)


def _num_missing(metadata: AttentionMetadata, missing: int) -> Ints:
    """Count the blocks that each table lacks at its beginning, shape (num_sequences,)."""
    held = np.flatnonzero(metadata.blocks != missing)
    starts, ends = metadata.table_starts[:-1], metadata.table_starts[1:]
    places = np.append(held, len(metadata.blocks))[np.searchsorted(held, starts)]
    missing_each: Ints = np.minimum(places, ends) - starts
    return missing_each

"""In which order do rows stand, so that those that share are neighbours?

The native library computes *items*: some neighbouring rows over some runs of keys, one head of
keys at a time, with the running state of each row in the processor's cache. So sequences are laid
in depth-first order of the tree of shared runs, each with its own tail behind them::

    tables           rows   spans of keys
    A  s y d o P      0     ┐ s y    ┐ d o    P
    B  s y d o Q      1     │        ┘        Q
    C  s y R          2     ┘                 R
    D  T U            3                       T U

A chunk of a prompt is cut into pieces that keep a core busy by themselves, and shares nothing:
its products dwarf what it reads. Chunks stand behind all other rows.

Cost: one Python step per shared run, none per sequence or token.
"""

from dataclasses import dataclass

import numpy as np

from ostinato.runner.attention.shared_runs import Bools, Worth, shared_columns, shared_runs
from ostinato.runner.inputs import AttentionMetadata, Ints


@dataclass(frozen=True, slots=True)
class Spans:
    """Runs of keys and the rows that see them; all arrays have shape (num_spans,).

    Attributes:
        first_row: First row that sees it.
        last_row: Row after the last.
        first_entry: Where its blocks begin among the step's table entries.
        first_position: Of its first key, the first of its block.
        last_position: After its last key.
        lowest: Least position of the rows that see it.
        is_tail: Whether it ends with the sequence's own new tokens.
    """

    first_row: Ints
    last_row: Ints
    first_entry: Ints
    first_position: Ints
    last_position: Ints
    lowest: Ints
    is_tail: Bools


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows of a step as the library shall see them.

    Attributes:
        tokens: Which token a row is, shape (num_rows,).
        positions: Where it stands in its sequence, likewise.
        item_starts: First row of each item, and the end, shape (num_items + 1,).
        spans: Shared runs, each before those below it, then the tails.
    """

    tokens: Ints
    positions: Ints
    item_starts: Ints
    spans: Spans


def order_rows(metadata: AttentionMetadata, most_rows: int, worth: Worth | None) -> RowOrder:
    """Order the rows of a step, and cut them into items.

    Args:
        metadata: What the step is.
        most_rows: How many an item may have; a sequence that brings more than half as many is a
            chunk.
        worth: Which shared runs are worth a reading of their own; None is none of them.
    """
    lengths = np.diff(metadata.starts)
    is_chunk = lengths > max(1, most_rows // 2)
    runs = () if worth is None else shared_runs(metadata, worth, ~is_chunk)
    order = _sequence_order(is_chunk, [run.sequences for run in runs])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts = offsets(lengths[order])
    shift = np.repeat(starts[:-1], lengths[order])
    within = np.arange(starts[-1]) - shift
    shared = np.zeros(len(order), dtype=np.int64)  # columns that a place shares with the next
    rows_of_runs = np.empty((len(runs), 2), dtype=np.int64)
    heads = np.empty((len(runs), 4), dtype=np.int64)
    for n, run in enumerate(runs):
        low = int(place[run.sequences[0]])
        high = low + len(run.sequences)
        shared[low : high - 1] = run.stop_column
        rows_of_runs[n] = starts[low], starts[high]
        heads[n] = (
            metadata.table_starts[run.sequences[0]] + run.first_column,
            run.first_column,
            run.stop_column,
            metadata.first_positions[list(run.sequences)].min(),
        )
    columns = shared_columns(len(lengths), runs)[order]
    size = metadata.block_size
    firsts = metadata.first_positions[order]
    return RowOrder(
        tokens=within + np.repeat(metadata.starts[:-1][order], lengths[order]),
        positions=within + np.repeat(firsts, lengths[order]),
        item_starts=_item_starts(starts, shared, is_chunk[order], most_rows),
        spans=Spans(
            first_row=np.concatenate((rows_of_runs[:, 0], starts[:-1])),
            last_row=np.concatenate((rows_of_runs[:, 1], starts[1:])),
            first_entry=np.concatenate((heads[:, 0], metadata.table_starts[:-1][order] + columns)),
            first_position=np.concatenate((heads[:, 1], columns)) * size,
            last_position=np.concatenate((heads[:, 2] * size, firsts + lengths[order])),
            lowest=np.concatenate((heads[:, 3], firsts)),
            is_tail=np.arange(len(runs) + len(order)) >= len(runs),
        ),
    )


def offsets(lengths: Ints) -> Ints:
    """Where each of several runs begins, and where the last ends, shape (len(lengths) + 1,)."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _sequence_order(is_chunk: Bools, families: list[tuple[int, ...]]) -> Ints:
    """Lay those who share side by side; each family comes before those within it."""
    placed = is_chunk.copy()
    order: list[int] = []
    for family in families:
        if not placed[family[0]]:
            order.extend(family)
            placed[list(family)] = True
    alone, chunks = np.flatnonzero(~placed), np.flatnonzero(is_chunk)
    return np.concatenate((np.array(order, dtype=np.int64), alone, chunks))


def _item_starts(starts: Ints, shared: Ints, is_chunk: Bools, most_rows: int) -> Ints:
    """Cut rows where neighbours share nothing, where there are too many, and chunks in pieces.

    Args:
        starts: First row of each sequence, in order, and the end.
        shared: Columns that each sequence shares with the next, likewise.
        is_chunk: Which are chunks.
        most_rows: How many an item may have.
    """
    is_last = shared == 0
    ends = starts[1:][is_last]
    families = np.stack((np.concatenate((starts[:1], ends[:-1])), ends), axis=1)
    too_many = (np.diff(families)[:, 0] > most_rows) & ~is_chunk[is_last]
    cuts = [_cuts_within(starts, shared, family, most_rows) for family in families[too_many]]
    lengths = np.diff(starts)[is_chunk]
    pieces = -(-lengths // most_rows)
    part = np.arange(pieces.sum()) - np.repeat(offsets(pieces)[:-1], pieces)
    cuts.append(
        np.repeat(starts[:-1][is_chunk], pieces) + part * np.repeat(lengths / pieces, pieces)
    )
    return np.unique(np.concatenate((starts[:1], ends, *cuts)).astype(np.int64))


def _cuts_within(starts: Ints, shared: Ints, family: Ints, most: int) -> Ints:
    """Cut a family's rows into items of like size, rather where neighbours share little."""
    first, last = family.tolist()
    low, high = np.searchsorted(starts, (first, last))
    bounds, costs = starts[low + 1 : high], shared[low : high - 1]
    cuts: list[int] = []
    while last - first > most:
        even = first + (last - first) / -(-(last - first) // most)
        near = (bounds > first) & (bounds >= even - most // 2) & (bounds <= first + most)
        best = np.lexsort((np.abs(bounds[near] - even), costs[near]))[0]
        first = int(bounds[near][best])
        cuts.append(first)
    return np.array(cuts, dtype=np.int64)

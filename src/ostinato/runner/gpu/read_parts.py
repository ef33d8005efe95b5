"""Plans which program of a kernel reads which keys for which rows.

A *segment* is a run of keys and the rows that see them: a run of blocks that several sequences
share, with the rows of all of them, or the rest of one sequence. A *part* is a tile of a segment's
rows and a fixed range of its keys; a part and one head of keys are one program::

    rows (tokens)    segments                           parts of one head of keys
    A  decode   0    ┌ s y s t e m ┬ A's tail           system:  0 .. 1,024, 1,024 .. 2,048
    B  decode   1    │             └ B's tail           tails:   A, B
    C  chunk    2    ┌ C's keys up to its last token    C:       one part for each tile of rows
       of 300   .    │

Rows are in depth-first order of the tree of shared runs, so those of a run are adjacent. Row tiles
of the same keys are adjacent parts: they run at the same time, and all but the first meet the keys
in the device's L2 cache. A row that is read in several parts has one partial result for each, and
they are merged in the order of their keys. Where parts end depends on positions and on the row's
own sequence, never on the device.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ostinato.runner.attention.reads import SharingCost
from ostinato.runner.attention.shared_runs import SharedRun, shared_runs
from ostinato.runner.inputs import AttentionMetadata, Ints

Ints32 = npt.NDArray[np.int32]

PART_FIELDS = 6
"""Numbers of a part: first row, number of rows, first entry of its block table, first key, end of
its keys, first partial result (-1: its result is final)."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Sizes of parts, and the cost of reading once; none was measured on a GPU yet.

    Attributes:
        group: Query heads per head of keys.
        narrow_rows: Rows of a tile for few rows, heads folded in.
        wide_rows: Rows of any other tile.
        narrow_keys: Keys of a part of few rows: many parts keep all multiprocessors busy.
        wide_keys: Keys of any other part: each costs a partial result per row.
        max_split_tokens: New tokens of a sequence up to which its keys are split among parts; one
            program reads all keys for each tile of a longer chunk.
        keys_per_run: Keys that a shared read must save in addition.
        keys_per_row: Keys that could be read in the time that merging a row takes.
        section_keys: Sums start anew, and shared runs end, at multiples of this position, so that
            a row's bits do not depend on other rows; None where that is not promised.
    """

    group: int
    narrow_rows: int = 16
    wide_rows: int = 128
    narrow_keys: int = 256
    wide_keys: int = 1024
    max_split_tokens: int = 128
    keys_per_run: float = 256.0
    keys_per_row: float = 8.0
    section_keys: int | None = None

    @classmethod
    def of(cls, group: int, dim: int, same_bits: bool, itemsize: int = 2) -> "PartLimits":
        """Return the limits of layers whose sums fit in registers.

        Args:
            group: Query heads per head of keys.
            dim: Elements of the largest key or value.
            same_bits: Whether sums start anew at sections.
            itemsize: Bytes of an element of queries.
        """
        fitting = 1 << (group - 1).bit_length()  # all heads of a token are in one tile
        if same_bits:
            rows, section = max(32, fitting), 256
            return cls(group, rows, rows, section, section, section_keys=section)
        wide = 32 if itemsize > 2 else 64 if dim > 128 else 128
        return cls(group, max(16, fitting), max(wide, fitting))

    def is_narrow(self, num_rows: int) -> bool:
        """Whether ``num_rows`` rows are one narrow tile."""
        return num_rows * self.group <= self.narrow_rows


@dataclass(frozen=True, slots=True, eq=False)
class ReadParts:
    """How layers of one kind are read in one step.

    Attributes:
        num_partials: Number of partial results.
        keys_fetched: Keys that the device's memory is read for, for each head of keys.
        keys_issued: Keys that programs load, those that the L2 cache has included.
        tokens: Row of the step of each row of the plan, shape (num_tokens,).
        positions: Position of each row of the plan, likewise.
        narrow: Parts with few rows, shape (num_narrow, PART_FIELDS).
        wide: All other parts, likewise.
        merge_tokens: Rows of the step that are merged, shape (num_merges,).
        merge_starts: First entry of each in ``merge_partials``, and the end.
        merge_partials: Partial results of each, in the order of their keys.
    """

    num_partials: int
    keys_fetched: int
    keys_issued: int
    tokens: Ints32
    positions: Ints32
    narrow: Ints32
    wide: Ints32
    merge_tokens: Ints32
    merge_starts: Ints32
    merge_partials: Ints32

    def arrays(self) -> tuple[Ints32, ...]:
        """Return all arrays, in the order of the attributes."""
        return (
            *(self.tokens, self.positions, self.narrow, self.wide),
            *(self.merge_tokens, self.merge_starts, self.merge_partials),
        )


@dataclass(frozen=True, slots=True)
class _Segment:
    """Keys from ``first`` to ``end``, seen by adjacent rows of the plan."""

    first_row: int
    num_rows: int
    table: int  # first entry of a block table that begins with these keys
    first: int
    end: int
    is_split: bool
    is_shared: bool


def plan_parts(
    metadata: AttentionMetadata,
    limits: PartLimits,
    window: int | None = None,
    share: bool | None = None,
) -> ReadParts:
    """Plan how a step is read.

    Args:
        metadata: The step.
        limits: Sizes and costs.
        window: Positions that a query sees; None sees all before it.
        share: Whether to read every shared run once, or none; None is where that is cheaper.

    Cost: a few Python steps per sequence and shared run, NumPy for the rest.
    """
    runs = () if share is False else _runs(metadata, limits, always=bool(share))
    order = _order(len(metadata.first_positions), runs)
    lengths = np.diff(metadata.starts)[order]
    first_rows = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=first_rows[1:])
    within = np.arange(first_rows[-1]) - np.repeat(first_rows[:-1], lengths)
    tokens = within + np.repeat(metadata.starts[:-1][order], lengths)
    positions = within + np.repeat(metadata.first_positions[order], lengths)
    segments = _segments(metadata, runs, order, first_rows, window, limits)
    parts, is_narrow, is_split = _cut(segments, positions, window, limits)
    counts = np.where(is_split, parts[:, 1], 0)
    ends = np.cumsum(counts)
    parts[:, 5] = np.where(is_split, ends - counts, -1)
    rows, starts, partials = _merges(parts[is_split])
    plan = tokens, positions, parts[is_narrow], parts[~is_narrow], tokens[rows], starts, partials
    return ReadParts(
        int(ends[-1]),
        sum(s.end - s.first for s in segments),
        int((parts[:, 4] - parts[:, 3]).sum()),
        *(np.ascontiguousarray(array, dtype=np.int32) for array in plan),
    )


def _runs(metadata: AttentionMetadata, limits: PartLimits, always: bool) -> tuple[SharedRun, ...]:
    """Return the runs that are read once; with sections, those that end with one."""
    cost = SharingCost(limits.keys_per_run, limits.keys_per_row * limits.group)
    worth = (lambda *_: True) if always else cost.is_worth
    if limits.section_keys is None:
        return shared_runs(metadata, worth)
    # A run that ended inside a section would add its keys in another order than a row alone.
    step = max(1, limits.section_keys // metadata.block_size)
    if step * metadata.block_size % limits.section_keys:
        return ()
    ends: dict[int, int] = {}  # last column that is covered, by sequence
    kept = []
    for run in shared_runs(metadata, worth):
        first, stop = ends.get(run.sequences[0], 0), run.stop_column // step * step
        if stop > first:
            kept.append(SharedRun(run.sequences, first, stop - first))
            ends.update(dict.fromkeys(run.sequences, stop))
    return tuple(kept)


def _order(num_sequences: int, runs: tuple[SharedRun, ...]) -> Ints:
    """Return the sequences, those of each run adjacent; a run is part of the first one above it."""
    shared = [i for run in runs if run.first_column == 0 for i in run.sequences]
    alone = set(range(num_sequences)).difference(shared)
    return np.array([*shared, *sorted(alone)], dtype=np.int64)


def _segments(
    metadata: AttentionMetadata,
    runs: tuple[SharedRun, ...],
    order: Ints,
    first_rows: Ints,
    window: int | None,
    limits: PartLimits,
) -> list[_Segment]:
    """Return shared runs, then what is left of each sequence."""
    size, place = metadata.block_size, {s: i for i, s in enumerate(order.tolist())}
    positions, tables = metadata.first_positions.tolist(), metadata.table_starts.tolist()
    rows, covered = first_rows.tolist(), dict.fromkeys(place, 0)
    segments = []

    def visible(first: int, position: int) -> int:
        first = first if window is None else max(first, position - window + 1)
        return first - first % (limits.section_keys or 1)

    for run in runs:
        low = min(place[i] for i in run.sequences)
        first, end = run.first_column * size, run.stop_column * size
        first = visible(first, min(positions[i] for i in run.sequences))
        if first < end:
            num_rows = rows[low + len(run.sequences)] - rows[low]
            table = tables[run.sequences[0]]
            segments.append(_Segment(rows[low], num_rows, table, first, end, True, True))
        covered.update(dict.fromkeys(run.sequences, end))
    for sequence, index in place.items():
        first, num_rows = covered[sequence], rows[index + 1] - rows[index]
        end, is_shared = positions[sequence] + num_rows, first > 0
        first = visible(first, positions[sequence])
        keys = limits.narrow_keys if limits.is_narrow(num_rows) else limits.wide_keys
        is_long = first // keys != (end - 1) // keys and num_rows <= limits.max_split_tokens
        split = is_shared or is_long
        segments.append(_Segment(rows[index], num_rows, tables[sequence], first, end, split, False))
    return segments


def _cut(
    segments: list[_Segment], positions: Ints, window: int | None, limits: PartLimits
) -> tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Cut segments into parts, row tiles of the same keys adjacent.

    Returns:
        The parts; which are narrow; and which give partial results.
    """
    columns = [(s.first_row, s.num_rows, s.table, s.first, s.end) for s in segments]
    first_row, num_rows, table, first, end = np.array(columns, dtype=np.int64).T
    is_split, is_shared = np.array([(s.is_split, s.is_shared) for s in segments]).T
    narrow = num_rows * limits.group <= limits.narrow_rows
    per_tile = np.where(narrow, limits.narrow_rows, limits.wide_rows) // limits.group
    keys = np.where(is_split, np.where(narrow, limits.narrow_keys, limits.wide_keys), end.max())
    num_tiles = -(-num_rows // per_tile)
    first_piece = first // keys
    counts = num_tiles * ((end - 1) // keys - first_piece + 1)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    of = np.repeat(np.arange(len(segments)), counts)
    piece, tile = np.divmod(index, num_tiles[of])
    skipped = tile * per_tile[of]
    rows = np.minimum(num_rows[of] - skipped, per_tile[of])
    row = first_row[of] + skipped
    low = np.maximum(first[of], (first_piece[of] + piece) * keys[of])
    high = np.minimum(end[of], (first_piece[of] + piece + 1) * keys[of])
    own = ~is_shared[of]  # rows of one sequence, so the last one sees most
    high = np.where(own, np.minimum(high, positions[row + rows - 1] + 1), high)
    if window is not None:
        low = np.where(own, np.maximum(low, positions[row] - window + 1), low)
    if limits.section_keys is not None:
        low -= low % limits.section_keys
    parts = np.stack((row, rows, table[of], low, high, low), axis=1)
    kept = low < high
    return parts[kept], narrow[of][kept], is_split[of][kept]


def _merges(parts: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the rows of split parts, the start of each row's partials, and these by key."""
    counts = parts[:, 1]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = within + np.repeat(parts[:, 0], counts)
    partials = within + np.repeat(parts[:, 5], counts)
    order = np.lexsort((np.repeat(parts[:, 3], counts), rows))
    unique, starts = np.unique(rows[order], return_index=True)
    return unique, np.append(starts, len(rows)), partials[order]

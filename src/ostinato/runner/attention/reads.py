"""Groups sequences that are read together.

The sequences of a step differ in the number of new tokens and of tokens before them. A *read batch*
is a rectangle: sequences with about as many new tokens and about as long a context, each padded to
the longest::

                  keys gathered from blocks, from position first_key on
    sequence A    c c c c c c c c n n n n . .      c  cached     n  new in this step
    sequence B    c c c c c c c c c c n n n n      .  padding, read by no query
                                  └ queries ┘

All decodes of similar length form one batch. Long chunks of queries are split, and new batches
begin, where scratch memory would exceed the limits.

Blocks that several sequences share are read once for all of them (law 2), see ``shared_runs``; the
blocks after them, the *tails*, form batches as well.

Cost: one Python step per sequence and kind of layer; all layers of a kind share the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.attention.read_plan import ReadBatch, ReadLimits, ReadPlan
from ostinato.runner.attention.shared_runs import SharedRun, shared_columns, shared_runs
from ostinato.runner.inputs import AttentionMetadata, Ints

_PADDING = 1.25
"""Maximum ratio of the longest to the shortest of a batch: at most a fifth of the work is
padding, and prompts of different lengths still share batches."""

_FREE_PADDING = 64
"""Keys of padding that cost less than another batch would."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Adjacent queries of one sequence, and the keys that they need."""

    sequence: int
    row: int
    num_queries: int
    position: int
    first_key: int

    @property
    def end(self) -> int:
        return self.position + self.num_queries

    @property
    def num_keys(self) -> int:
        return self.end - self.first_key


class ReadPlans:
    """The read plans of one step, computed once for each kind of layer."""

    def __init__(self, metadata: AttentionMetadata, zero_block: int) -> None:
        """Take a step; plans are computed lazily."""
        self._metadata = metadata
        self._zero_block = zero_block
        self._plans: dict[object, ReadPlan] = {}

    def plan(self, window: int | None, limits: ReadLimits) -> ReadPlan:
        """Return the plan; the keys of each new token are in one batch and any number of runs.

        Args:
            window: Positions that a query sees; None sees all before it. If a window hides any
                keys, it hides them from some queries only, so blocks are read per sequence.
            limits: How large a batch may be.
        """
        kind = window, limits
        if kind not in self._plans:
            self._plans[kind] = self._plan(window, limits)
        return self._plans[kind]

    def _plan(self, window: int | None, limits: ReadLimits) -> ReadPlan:
        longest = int((self._metadata.first_positions + np.diff(self._metadata.starts)).max())
        sharing = limits.sharing if window is None or window >= longest else None
        runs = () if sharing is None else shared_runs(self._metadata, sharing.is_worth)
        columns = shared_columns(len(self._metadata.first_positions), runs)
        starts = self._metadata.starts.tolist()
        positions = self._metadata.first_positions.tolist()
        alone: list[_Piece] = []
        for sequence in np.flatnonzero(columns == 0).tolist():
            row, end = starts[sequence : sequence + 2]
            whole = _Piece(sequence, row, end - row, positions[sequence], 0)
            alone.extend(self._cut(whole, window, limits))
        tails, sharers, new_starts = self._tails(limits, columns)
        return ReadPlan(
            alone=tuple(map(self._batch, _groups(alone, limits))),
            sharers=self._tensor(sharers),
            shared=tuple(self._shared_read(run, new_starts) for run in runs),
            tails=tuple(map(self._batch, _groups(tails, limits))),
        )

    def _tails(self, limits: ReadLimits, columns: Ints) -> tuple[list[_Piece], Ints, Ints]:
        """Return the pieces after shared blocks, and their rows.

        Returns:
            Pieces with rows as indices into those of the sharers; these rows, shape
            (num_sharers,); and each sequence's first row among them, shape (num_sequences + 1,).
        """
        starts = self._metadata.starts
        lengths = np.where(columns > 0, np.diff(starts), 0)
        new_starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        sharing = np.flatnonzero(columns).tolist()
        pieces: list[_Piece] = []
        for sequence in sharing:
            whole = _Piece(
                sequence,
                int(new_starts[sequence]),
                int(lengths[sequence]),
                int(self._metadata.first_positions[sequence]),
                int(columns[sequence]) * self._metadata.block_size,
            )
            pieces.extend(self._cut(whole, None, limits))
        rows = [np.arange(starts[i], starts[i + 1]) for i in sharing]
        return pieces, np.concatenate(rows) if rows else starts[:0], new_starts

    def _shared_read(self, run: SharedRun, starts: Ints) -> ReadBatch:
        """Return a run as one sequence, whose queries all come after its last key."""
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in run.sequences])
        first = self._metadata.table_starts[run.sequences[0]] + run.first_column
        blocks = self._metadata.blocks[first : first + run.num_blocks]
        num_keys = run.num_blocks * self._metadata.block_size
        return ReadBatch(
            num_sequences=1,
            num_queries=len(rows),
            rows=self._tensor(rows),
            real=None,
            positions=self._tensor(np.full((1, len(rows)), num_keys)),
            blocks=self._tensor(blocks[None]),
            first_keys=self._tensor(np.zeros((1, 1), dtype=np.int64)),
            num_keys=num_keys,
            stale=self._tensor(rows[:0]),
        )

    def _cut(self, whole: _Piece, window: int | None, limits: ReadLimits) -> Iterator[_Piece]:
        """Split a sequence's queries into pieces within the limits."""
        block_size = self._metadata.block_size
        done = 0
        while done < whole.num_queries:
            start = whole.position + done
            first = whole.first_key if window is None else max(0, start - window + 1)
            first -= first % block_size
            widest = min(whole.end - first, limits.max_width)
            max_queries = max(limits.min_queries, limits.max_pairs // widest)
            num_queries = min(whole.num_queries - done, max_queries)
            yield _Piece(whole.sequence, whole.row + done, num_queries, start, first)
            done += num_queries

    def _batch(self, pieces: list[_Piece]) -> ReadBatch:
        """Return pieces as one padded rectangle."""
        lengths = np.array([p.num_queries for p in pieces])
        longest = int(lengths.max())
        within = np.arange(longest)
        clipped = np.minimum(within, lengths[:, None] - 1)
        rows = np.array([p.row for p in pieces])[:, None] + clipped
        positions = np.array([p.position for p in pieces])[:, None] + clipped
        padded = None if lengths.min() == longest else np.flatnonzero(within < lengths[:, None])
        first_keys = np.array([p.first_key for p in pieces])
        needed = np.array([p.num_keys for p in pieces])
        blocks, stale = self._tables(pieces, first_keys, needed)
        return ReadBatch(
            num_sequences=len(pieces),
            num_queries=longest,
            rows=self._tensor(rows.reshape(-1)),
            real=None if padded is None else self._tensor(padded),
            positions=self._tensor(positions),
            blocks=self._tensor(blocks),
            first_keys=self._tensor(first_keys[:, None]),
            num_keys=int(needed.max()),
            stale=self._tensor(stale),
        )

    def _tables(self, pieces: list[_Piece], first_keys: Ints, needed: Ints) -> tuple[Ints, Ints]:
        """Return the blocks of each piece, and the stale keys in the last ones."""
        block_size = self._metadata.block_size
        counts = -(-needed // block_size)
        columns = np.arange(counts.max())
        table_starts = self._metadata.table_starts[[p.sequence for p in pieces]]
        entries = (table_starts + first_keys // block_size)[:, None] + columns
        inside = columns < counts[:, None]
        known = self._metadata.blocks[np.where(inside, entries, 0)]
        width = len(columns) * block_size
        in_last = needed[:, None] + np.arange(block_size)
        behind = in_last < (counts * block_size)[:, None]
        stale = (np.arange(len(pieces))[:, None] * width + in_last)[behind]
        return np.where(inside, known, self._zero_block), stale

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(
            self._metadata.device
        )


def _groups(pieces: list[_Piece], limits: ReadLimits) -> Iterator[list[_Piece]]:
    """Yield groups of pieces of similar shape, within the limits."""
    group: list[_Piece] = []
    min_keys = max_keys = 0
    for piece in sorted(pieces, key=lambda p: (p.num_queries, p.num_keys)):
        if group:
            min_keys, max_keys = min(min_keys, piece.num_keys), max(max_keys, piece.num_keys)
            total_keys = (len(group) + 1) * max_keys
            if (
                piece.num_queries > _PADDING * group[0].num_queries
                or max_keys > _PADDING * min_keys + _FREE_PADDING
                or total_keys > limits.max_keys
                or total_keys * piece.num_queries > limits.max_pairs
            ):
                yield group
                group = []
        if not group:
            min_keys = max_keys = piece.num_keys
        group.append(piece)
    if group:
        yield group

"""Which sequences are read together?

Sequences of a step differ in how many tokens are new and how many lie before. A *read batch*
is a rectangle cut from them: sequences with about as many new tokens and about as long a
context, each padded to the longest::

                  keys gathered from blocks, from position first_key on
    sequence A    c c c c c c c c n n n n . .      c  cached     n  new in this step
    sequence B    c c c c c c c c c c n n n n      .  padding, in nobody's sight
                                  └ queries ┘

All decodes of like length form one batch. A sequence that starts at position 0 is *fresh*:
its keys are the rows of the step themselves and nothing is gathered. Long chunks of queries
are cut, and batches are closed, when scratch memory would exceed the limits.

Cost: one Python step per sequence and kind of layer; all layers of a kind share the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.inputs import AttentionMetadata, Ints

_PADDING = 1.25
"""How much longer than the shortest the longest of a batch may be: a fifth of the work is
spent on padding at worst, and ragged prompts still meet."""

_FREE_PADDING = 64
"""Keys of padding that cost less than another batch would."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How large a read batch may be.

    Attributes:
        max_keys: Most keys gathered at once, padding included.
        max_pairs: Most pairs of query and key at once, padding included.
        max_width: Most keys of one sequence that are looked at at once; more come in tiles.
        min_queries: Chunks of queries are not cut below this, whatever ``max_pairs`` says.
    """

    max_keys: int
    max_pairs: int
    max_width: int
    min_queries: int = 16


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Sequences, or pieces of them, that are read as one rectangle.

    Attributes:
        num_sequences: Height.
        num_queries: Queries of each, padding included.
        rows: Rows of the step that hold them, padded with each sequence's last row, shape
            (num_sequences * num_queries,).
        real: Which of ``rows`` are no padding; None if all are.
        positions: Position of each query, shape (num_sequences, num_queries).
        blocks: Tables, shape (num_sequences, blocks_per_sequence); None for fresh sequences,
            whose keys are ``rows``.
        first_keys: Position of each sequence's first gathered key, shape (num_sequences, 1).
        num_keys: Keys of each sequence that matter, padding included.
        stale: Gathered keys behind a sequence's end, counted through all sequences: what
            others left there may be NaN, and NaN times zero is NaN; shape (num_stale,).
    """

    num_sequences: int
    num_queries: int
    rows: Tensor
    real: Tensor | None
    positions: Tensor
    blocks: Tensor | None
    first_keys: Tensor
    num_keys: int
    stale: Tensor

    def visible(self, window: int | None, first: int = 0, stop: int | None = None) -> Tensor:
        """Say which keys each query sees.

        Args:
            window: Positions that a query sees; None sees all up to itself.
            first: First key of interest, counted from ``first_keys``.
            stop: Key after the last one of interest; None is ``num_keys``.

        Returns:
            Shape (num_sequences, num_queries, stop - first), bool.
        """
        stop = self.num_keys if stop is None else stop
        columns = torch.arange(first, stop, device=self.positions.device)
        keys = (self.first_keys + columns)[:, None, :]
        queries = self.positions[:, :, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some neighbouring queries of one sequence, and the keys that they need."""

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
    """The read batches of one step, worked out once for each kind of layer."""

    def __init__(self, metadata: AttentionMetadata, zero_block: int) -> None:
        """Remember what the step is; nothing is worked out yet."""
        self._metadata = metadata
        self._zero_block = zero_block
        self._batches: dict[object, tuple[ReadBatch, ...]] = {}
        self.masks: dict[object, Tensor] = {}

    def batches(
        self, window: int | None, limits: ReadLimits, allow_fresh: bool
    ) -> tuple[ReadBatch, ...]:
        """Cut the step into read batches; every new token is in exactly one.

        Args:
            window: Positions that a query sees; None sees all before it.
            limits: How large a batch may be.
            allow_fresh: Whether sequences may be left in the step's rows instead of being
                gathered.
        """
        kind = (window, limits, allow_fresh)
        if kind not in self._batches:
            fresh, cached = self._pieces(window, limits, allow_fresh)
            self._batches[kind] = (
                *(self._batch(group, fresh=True) for group in _groups(fresh, limits)),
                *(self._batch(group, fresh=False) for group in _groups(cached, limits)),
            )
        return self._batches[kind]

    def _pieces(
        self, window: int | None, limits: ReadLimits, allow_fresh: bool
    ) -> tuple[list[_Piece], list[_Piece]]:
        """Return the fresh sequences, and the pieces of all others."""
        fresh: list[_Piece] = []
        cached: list[_Piece] = []
        starts = self._metadata.starts.tolist()
        for sequence, position in enumerate(self._metadata.first_positions.tolist()):
            row, length = starts[sequence], starts[sequence + 1] - starts[sequence]
            if allow_fresh and position == 0 and (window is None or length <= window):
                fresh.append(_Piece(sequence, row, length, 0, 0))
            else:
                cached.extend(self._cut(sequence, row, length, position, window, limits))
        return fresh, cached

    def _cut(
        self,
        sequence: int,
        row: int,
        length: int,
        position: int,
        window: int | None,
        limits: ReadLimits,
    ) -> Iterator[_Piece]:
        """Cut a sequence's queries so that each piece keeps to the limits."""
        block_size = self._metadata.block_size
        done = 0
        while done < length:
            start = position + done
            first = 0 if window is None else max(0, start - window + 1)
            first -= first % block_size
            widest = min(position + length - first, limits.max_width)
            most = max(limits.min_queries, limits.max_pairs // widest)
            num_queries = min(length - done, most)
            yield _Piece(sequence, row + done, num_queries, start, first)
            done += num_queries

    def _batch(self, pieces: list[_Piece], fresh: bool) -> ReadBatch:
        """Turn pieces into one padded rectangle of tensors."""
        lengths = np.array([p.num_queries for p in pieces])
        longest = int(lengths.max())
        within = np.arange(longest)
        clipped = np.minimum(within, lengths[:, None] - 1)
        rows = np.array([p.row for p in pieces])[:, None] + clipped
        positions = np.array([p.position for p in pieces])[:, None] + clipped
        padded = None if lengths.min() == longest else np.flatnonzero(within < lengths[:, None])
        first_keys = np.array([p.first_key for p in pieces])
        needed = np.array([p.num_keys for p in pieces])
        blocks, stale = (None, needed[:0]) if fresh else self._tables(pieces, first_keys, needed)
        return ReadBatch(
            num_sequences=len(pieces),
            num_queries=longest,
            rows=self._tensor(rows.reshape(-1)),
            real=None if padded is None else self._tensor(padded),
            positions=self._tensor(positions),
            blocks=None if blocks is None else self._tensor(blocks),
            first_keys=self._tensor(first_keys[:, None]),
            num_keys=longest if fresh else int(needed.max()),
            stale=self._tensor(stale),
        )

    def _tables(self, pieces: list[_Piece], first_keys: Ints, needed: Ints) -> tuple[Ints, Ints]:
        """Cut each piece's blocks out of its table, and find the stale keys in the last one."""
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
    """Sort pieces by shape, and close a group before it breaks a limit or pads too much."""
    group: list[_Piece] = []
    fewest = most = 0
    for piece in sorted(pieces, key=lambda p: (p.num_queries, p.num_keys)):
        if group:
            fewest, most = min(fewest, piece.num_keys), max(most, piece.num_keys)
            total_keys = (len(group) + 1) * most
            if (
                piece.num_queries > _PADDING * group[0].num_queries
                or most > _PADDING * fewest + _FREE_PADDING
                or total_keys > limits.max_keys
                or total_keys * piece.num_queries > limits.max_pairs
            ):
                yield group
                group = []
        if not group:
            fewest = most = piece.num_keys
        group.append(piece)
    if group:
        yield group

"""Plans which keys the queries of a step read in torch.

Each sequence is read by itself. Its queries are cut into pieces whose scores fit the scratch
memory, each with the blocks that its queries see; a window leaves the first ones out::

    position     0 1 2 3 4 5 6 7 8 9 a b      c  cached     n  new in this step
    sequence     c c c c c c n n n n n n
    piece 1                  └─ 6 7 8        reads 0 .. 8
    piece 2                        └─ 9 a b  reads 0 .. b

Blocks that several sequences share are read once for all of them (law 2), see ``shared_runs``; the
blocks after them are *tails*, which are read like other sequences.

Cost: one Python step per sequence and kind of layer; all layers of a kind share the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.attention.shared_runs import SharedRun, shared_columns, shared_runs
from ostinato.runner.inputs import AttentionMetadata, Ints


@dataclass(frozen=True, slots=True)
class SharingCost:
    """The cost of reading a run of blocks once, in keys that could be read instead.

    Attributes:
        keys_per_run: Cost of a separate read.
        keys_per_row: Cost of merging the partial results of one row.
    """

    keys_per_run: float
    keys_per_row: float

    def is_worth(self, num_tokens: int, num_sequences: int, num_rows: int) -> bool:
        """Whether reading once saves more keys than it costs."""
        saved = num_tokens * (num_sequences - 1)
        return saved > self.keys_per_run + num_rows * self.keys_per_row


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much is read at once, and when blocks are read for several sequences at once.

    Attributes:
        max_keys: Maximum keys of a tile.
        max_pairs: Maximum pairs of query and key at once.
        max_width: Maximum keys at once; more are read in tiles.
        min_queries: Minimum queries of a piece, even if ``max_pairs`` is exceeded.
        sharing: Cost of reading once; None reads for each sequence separately.
    """

    max_keys: int
    max_pairs: int
    max_width: int
    min_queries: int = 16
    sharing: SharingCost | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Queries of a sequence, or of all that share a run, and the keys that they read.

    Attributes:
        rows: Their rows in the step, shape (num_queries,).
        positions: Position of each, or one after all keys, shape (num_queries,).
        blocks: Blocks of the keys, shape (num_blocks,).
        first_key: Position of the first key.
        num_keys: Keys from there on; slots after them may hold anything.
    """

    rows: Tensor
    positions: Tensor
    blocks: Tensor
    first_key: int
    num_keys: int

    def visible(self, window: int | None, first: int = 0, stop: int | None = None) -> Tensor:
        """Return the mask of keys that each query sees.

        Args:
            window: Positions that a query sees; None sees all up to itself.
            first: First key, counted from ``first_key``.
            stop: Key after the last one; None is ``num_keys``.

        Returns:
            Shape (num_queries, stop - first), bool.
        """
        stop = self.num_keys if stop is None else stop
        keys = self.first_key + torch.arange(first, stop, device=self.positions.device)
        queries = self.positions[:, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How the layers of one kind read in one step.

    Attributes:
        alone: Sequences that share nothing, or too little.
        shared: Runs of blocks that are read once for several sequences.
        tails: The other blocks of each of these sequences.
    """

    alone: tuple[Read, ...]
    shared: tuple[Read, ...]
    tails: tuple[Read, ...]


class ReadPlans:
    """The read plans of one step, computed once for each kind of layer."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        """Take a step; plans are computed lazily."""
        self._metadata = metadata
        self._plans: dict[object, ReadPlan] = {}

    def plan(self, window: int | None, limits: ReadLimits) -> ReadPlan:
        """Return the plan; the keys of each new token are in one read and any number of runs.

        Args:
            window: Positions that a query sees; None sees all before it. If a window hides any
                keys, it hides them from some queries only, so blocks are read per sequence.
            limits: How much is read at once.
        """
        kind = window, limits
        if kind not in self._plans:
            self._plans[kind] = self._plan(window, limits)
        return self._plans[kind]

    def _plan(self, window: int | None, limits: ReadLimits) -> ReadPlan:
        longest = int((self._metadata.first_positions + np.diff(self._metadata.starts)).max())
        sharing = limits.sharing if window is None or window >= longest else None
        runs = () if sharing is None else shared_runs(self._metadata, sharing.is_worth)
        alone, tails = list[Read](), list[Read]()
        for sequence, column in enumerate(shared_columns(len(self._metadata.starts) - 1, runs)):
            pieces = self._pieces(sequence, int(column), window, limits)
            (tails if column else alone).extend(pieces)
        return ReadPlan(tuple(alone), tuple(map(self._shared, runs)), tuple(tails))

    def _pieces(
        self, sequence: int, column: int, window: int | None, limits: ReadLimits
    ) -> Iterator[Read]:
        """Cut a sequence's queries into pieces that read its blocks from a column on."""
        metadata, size = self._metadata, self._metadata.block_size
        (row, end_row), table = (
            each[sequence : sequence + 2].tolist()
            for each in (metadata.starts, metadata.table_starts)
        )
        blocks = metadata.blocks[table[0] : table[1]]
        position = int(metadata.first_positions[sequence])
        end = position + end_row - row
        while position < end:
            first = max(column * size, 0 if window is None else position - window + 1)
            first -= first % size
            widest = min(end - first, limits.max_width)
            num_queries = max(limits.min_queries, limits.max_pairs // widest)
            last = min(end, position + num_queries)
            own = blocks[first // size : -(-last // size)]
            rows, positions = np.arange(row, row + last - position), np.arange(position, last)
            yield self._read(rows, positions, own, first, last)
            row, position = row + last - position, last

    def _shared(self, run: SharedRun) -> Read:
        metadata, size = self._metadata, self._metadata.block_size
        spans = [np.arange(*metadata.starts[i : i + 2]) for i in run.sequences]
        rows, start = np.concatenate(spans), int(metadata.table_starts[run.sequences[0]])
        blocks = metadata.blocks[start + run.first_column : start + run.stop_column]
        first, last = run.first_column * size, run.stop_column * size
        return self._read(rows, np.full(len(rows), last), blocks, first, last)

    def _read(self, rows: Ints, positions: Ints, blocks: Ints, first: int, last: int) -> Read:
        queries, own, keys = (
            torch.from_numpy(each).to(self._metadata.device) for each in (rows, positions, blocks)
        )
        return Read(queries, own, keys, first, last - first)

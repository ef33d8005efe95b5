"""The read plan of a step, as values; ``reads`` computes them."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """How large a read batch may be, and when blocks are read for several sequences at once.

    Attributes:
        max_keys: Maximum keys gathered at once, padding included.
        max_pairs: Maximum pairs of query and key at once, padding included.
        max_width: Maximum keys of one sequence at once; more are read in tiles.
        min_queries: Minimum queries of a piece, even if ``max_pairs`` is exceeded.
        sharing: Cost of reading once; None reads for each sequence separately.
    """

    max_keys: int
    max_pairs: int
    max_width: int
    min_queries: int = 16
    sharing: SharingCost | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Sequences, or pieces of them, that are read as one rectangle.

    Attributes:
        num_sequences: Number of sequences.
        num_queries: Queries of each, padding included.
        rows: Their rows in the step, padded with each sequence's last row, shape
            (num_sequences * num_queries,).
        real: Which of ``rows`` are not padding; None if all are.
        positions: Position of each query, shape (num_sequences, num_queries).
        blocks: Tables, shape (num_sequences, blocks_per_sequence).
        first_keys: Position of each sequence's first gathered key, shape (num_sequences, 1).
        num_keys: Keys of each sequence, padding included.
        stale: Indices of gathered keys after a sequence's end, over all sequences, shape
            (num_stale,): old content may be NaN, and NaN times zero is NaN.
    """

    num_sequences: int
    num_queries: int
    rows: Tensor
    real: Tensor | None
    positions: Tensor
    blocks: Tensor
    first_keys: Tensor
    num_keys: int
    stale: Tensor

    def visible(self, window: int | None, first: int = 0, stop: int | None = None) -> Tensor:
        """Return the mask of keys that each query sees.

        Args:
            window: Positions that a query sees; None sees all up to itself.
            first: First key, counted from ``first_keys``.
            stop: Key after the last one; None is ``num_keys``.

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
class ReadPlan:
    """How the layers of one kind read in one step.

    Attributes:
        alone: Sequences that share nothing, or too little.
        sharers: Rows of all other sequences, ascending, shape (num_sharers,).
        shared: Runs of blocks that are read once for several of them, each as one sequence of all
            rows that see it; rows are indices into ``sharers``.
        tails: The other blocks of each of them, likewise.
    """

    alone: tuple[ReadBatch, ...]
    sharers: Tensor
    shared: tuple[ReadBatch, ...]
    tails: tuple[ReadBatch, ...]

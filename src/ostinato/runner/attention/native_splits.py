"""Which items are cut by keys, so that all threads have work?

One sequence of 100,000 tokens is one item; with two heads of keys and sixteen threads, fourteen
would wait. Its keys are cut into parts of like cost at the boundaries of blocks, each part sees
all of the item's rows that see its keys, and their results are merged (FlashDecoding's split,
Dao et al. 2023)::

    segments of an item   ────────────── s y ──────────────┬─ P ─┬─ Q ─
    parts                 ───── 0 ─────┼───── 1 ─────┼────── 2 ────────
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.runner.native.face import ITEM

Records = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """Items and what they cost.

    Attributes:
        segments: Records of ``SEGMENT``, item by item.
        items: Records of ``ITEM``.
        costs: Of each segment, for one head of keys.
        block_size: Tokens per block.
    """

    segments: Records
    items: Records
    costs: npt.NDArray[np.float64]
    block_size: int

    def item_costs(self) -> npt.NDArray[np.float64]:
        """Sum up the segments of each item; none is without."""
        return np.add.reduceat(self.costs, self.items["first_segment"])


@dataclass(frozen=True, slots=True)
class Merges:
    """Rows whose results come in parts; as in ``ost_attention``.

    Attributes:
        rows: Which, shape (num_merges,), int32.
        starts: Where the partials of each begin, shape (num_merges + 1,), int32.
        partials: Which partials they are, int32.
        num_partials: How many there are in all.
    """

    rows: Int32s
    starts: Int32s
    partials: Int32s
    num_partials: int


def split_items(work: Work, most: float, least: float) -> tuple[Records, Records, Merges]:
    """Cut items that cost too much, and put the dearest first.

    Args:
        work: Items and what they cost.
        most: What a task may cost.
        least: What a part costs at least.

    Returns:
        Segments, items and merges.
    """
    costs = work.item_costs()
    num_parts = np.minimum(np.ceil(costs / most), costs // least).astype(np.int64)
    order = np.argsort(-costs / np.maximum(num_parts, 1), kind="stable")
    if num_parts.max() < 2:
        return work.segments, work.items[order], _no_merges()
    cutter = _Cutter(work)
    for item in order:
        if num_parts[item] < 2:
            cutter.keep(int(item))
        else:
            cutter.cut(int(item), int(num_parts[item]))
    return cutter.result()


class _Cutter:
    """Collects items, and parts of items."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._segments: list[Records] = [work.segments]
        self._num_segments = len(work.segments)
        self._items: list[Records] = []
        self._merged: list[tuple[Ints, Ints]] = []
        self._num_partials = 0

    def keep(self, item: int) -> None:
        """Take an item as it is."""
        self._items.append(self._work.items[item : item + 1])

    def cut(self, item: int, num_parts: int) -> None:
        """Take an item in parts."""
        low, high = (
            int(self._work.items[item][name]) for name in ("first_segment", "last_segment")
        )
        segments, costs = self._work.segments[low:high], self._work.costs[low:high]
        ends = np.cumsum(costs)
        bounds = ends[-1] * np.arange(num_parts + 1) / num_parts
        # Of each segment, its keys before each bound; whole blocks, or all.
        before = np.clip((bounds - (ends - costs)[:, None]) / costs[:, None], 0, 1)
        keys = before * segments["num_keys"][:, None]
        size = self._work.block_size
        blocks = np.rint(keys / size).astype(np.int64) * size
        keys = np.where(before < 1, np.minimum(blocks, segments["num_keys"][:, None]), keys)
        keys[:, -1] = segments["num_keys"]
        for first, last in pairwise(keys.T.astype(np.int64)):
            self._add_part(segments, first, last)

    def _add_part(self, segments: Records, first: Ints, last: Ints) -> None:
        """Take the keys from ``first`` to ``last`` of some segments, if there are any."""
        part = segments[last > first].copy()
        if not len(part):
            return
        skipped = first[last > first]
        part["first_entry"] += skipped // self._work.block_size
        part["first_position"] += skipped
        part["num_keys"] = (last - first)[last > first]
        item = np.empty(1, dtype=ITEM)
        item["first_row"], item["last_row"] = part["first_row"].min(), part["last_row"].max()
        item["first_segment"] = self._num_segments
        item["last_segment"] = self._num_segments + len(part)
        item["first_partial"] = self._num_partials
        self._segments.append(part)
        self._num_segments += len(part)
        self._items.append(item)
        self._merge(part, int(item["first_row"][0]), int(item["last_row"][0]))

    def _merge(self, part: Records, first_row: int, last_row: int) -> None:
        """Note which rows the part brings something for."""
        seen = np.zeros(last_row - first_row, dtype=bool)
        for segment in part:
            seen[segment["first_row"] - first_row : segment["last_row"] - first_row] = True
        places = np.flatnonzero(seen)
        self._merged.append((places + first_row, places + self._num_partials))
        self._num_partials += last_row - first_row

    def result(self) -> tuple[Records, Records, Merges]:
        """Return all segments, all items, and whose results are to be merged."""
        rows, partials = (np.concatenate(found) for found in zip(*self._merged, strict=True))
        order = np.argsort(rows, kind="stable")
        merged, starts = np.unique(rows[order], return_index=True)
        merges = Merges(
            merged.astype(np.int32),
            np.append(starts, len(rows)).astype(np.int32),
            partials[order].astype(np.int32),
            self._num_partials,
        )
        return np.concatenate(self._segments), np.concatenate(self._items), merges


def _no_merges() -> Merges:
    none = np.zeros(0, dtype=np.int32)
    return Merges(none, np.zeros(1, dtype=np.int32), none, 0)

"""What does the native library need to know to read a step?

Segments, items and merges, as ``native/include/ostinato_native.h`` has them: an *item* is some
neighbouring rows, its *segments* are the runs of keys that they see, cut to these rows. Items that
would keep one thread busy while others wait are cut into parts by keys; what parts bring for a row
is merged by its log-sum-exp.

Cost: a few dozen calls of NumPy per step and kind of layer, and Python steps for what is cut.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.core.config import ReadOnce
from ostinato.runner.attention.native_rows import RowOrder, offsets, order_rows
from ostinato.runner.attention.native_splits import Merges, Work, split_items
from ostinato.runner.attention.read_plan import SharingCost
from ostinato.runner.attention.shared_runs import Worth
from ostinato.runner.inputs import AttentionMetadata, Ints
from ostinato.runner.native.face import ITEM, SEGMENT
from ostinato.runner.native.library import Isa

Records = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """How layers of one kind are read in one step; field by field as in ``ost_attention``.

    Attributes:
        tokens: Shape (num_rows,), int32.
        positions: Shape (num_rows,), int32.
        blocks: Shape (num_table_entries,), int32.
        segments: Records of ``SEGMENT``.
        items: Records of ``ITEM``, dearest first.
        merges: Rows that were cut.
        block_size: Tokens per block.
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    segments: Records
    items: Records
    merges: Merges
    block_size: int

    def check(self, num_tokens: int, num_blocks: int) -> None:
        """See that nothing points beyond its array, before the library does.

        Args:
            num_tokens: Of the step.
            num_blocks: Of the store, the one that pads tables included.

        Raises:
            ValueError: Something does.
        """
        segments, items, merges = self.segments, self.items, self.merges
        last_entry = segments["first_entry"] + -(-segments["num_keys"] // self.block_size)
        num_rows = items["last_row"] - items["first_row"]
        cut = items["first_partial"] >= 0
        for what, right in {
            "tokens": len(self.tokens) == len(self.positions) == num_tokens
            and _within(self.tokens, num_tokens),
            "blocks": _within(self.blocks, num_blocks),
            "segments": _within(segments["first_entry"], len(self.blocks))
            and last_entry.max() <= len(self.blocks)
            and segments["num_keys"].min() > 0,
            "rows of segments": _ranges(segments, "row", num_tokens),
            "rows of items": _ranges(items, "row", num_tokens),
            "segments of items": _ranges(items, "segment", len(segments)),
            "partials": merges.num_partials
            >= (items["first_partial"] + num_rows)[cut].max(initial=0),
            "merges": len(merges.starts) == len(merges.rows) + 1
            and merges.starts[0] == 0
            and merges.starts[-1] == len(merges.partials)
            and bool((np.diff(merges.starts) > 0).all())
            and (not len(merges.rows) or _within(merges.rows, num_tokens))
            and (not len(merges.partials) or _within(merges.partials, merges.num_partials)),
        }.items():
            if not right:
                raise ValueError(f"{what} of a plan point beyond what is there")

    def reads(self) -> Counter[int]:
        """Count how often each block is read for one head of keys: law 2's witness."""
        counted: Counter[int] = Counter()
        for item in self.items:
            for segment in self.segments[item["first_segment"] : item["last_segment"]]:
                num_blocks = -(-segment["num_keys"] // self.block_size)
                first = segment["first_entry"]
                counted.update(self.blocks[first : first + num_blocks].tolist())
        return counted


@dataclass(frozen=True, slots=True)
class PlanKind:
    """What plans of one step differ by.

    Attributes:
        window: Positions that a query sees; None sees all before it.
        group: Query heads per key/value head.
        num_kv_heads: Heads of keys.
        num_threads: How many work.
    """

    window: int | None
    group: int
    num_kv_heads: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """How the library's time is spent; rows count each head of queries.

    Attributes:
        item_rows: Rows whose running state stays in a core's cache besides the keys that are
            being read.
        keys_per_run: Keys that could be read in the time that it takes to plan a shared run and
            to walk from it to the tails.
        keys_per_row: Keys that could be read in the time that a row needs to go from one segment
            to the next: the last tiles of a segment are not full, and products may cost so
            much that nobody waits for keys anyway.
        row_cost: What looking at a key costs a row, in readings of the key.
        min_part: Cost below which an item is not cut further.
        tasks_per_thread: How many tasks each thread shall find.
    """

    item_rows: int = 512
    keys_per_run: float = 128.0
    keys_per_row: float = 16.0
    row_cost: float = 0.1
    min_part: float = 512.0
    tasks_per_thread: int = 4

    @classmethod
    def of(cls, isa: Isa) -> "NativeLimits":
        """Take what was measured with an instruction set: on tiles, products cost least."""
        return cls(keys_per_row=4.0) if isa == Isa.AMX else cls()


def plan_native(
    metadata: AttentionMetadata, kind: PlanKind, limits: NativeLimits, read_once: ReadOnce
) -> NativePlan:
    """Plan how a step is read.

    Args:
        metadata: What the step is.
        kind: Of which layers.
        limits: Sizes and costs.
        read_once: Whether what sequences share is read once for all of them: where that is
            cheaper (``auto``), ``always`` or ``never``.
    """
    most_rows = max(1, limits.item_rows // kind.group)
    order = order_rows(metadata, most_rows, _worth(read_once, kind, limits))
    segments, of_item = _segments(order, kind.window, metadata.block_size)
    num_rows = segments["last_row"] - segments["first_row"]
    costs = segments["num_keys"] * (1 + limits.row_cost * kind.group * num_rows)
    items = _items(order.item_starts, of_item)
    work = Work(segments, items, costs, metadata.block_size)
    segments, items, merges = split_items(work, _most_cost(costs, kind, limits), limits.min_part)
    return NativePlan(
        tokens=order.tokens.astype(np.int32),
        positions=order.positions.astype(np.int32),
        blocks=metadata.blocks.astype(np.int32),
        segments=segments,
        items=items,
        merges=merges,
        block_size=metadata.block_size,
    )


def _worth(read_once: ReadOnce, kind: PlanKind, limits: NativeLimits) -> Worth | None:
    """Say which runs are worth a reading of their own; None is none of them."""
    if read_once == "never":
        return None
    per_row = limits.keys_per_row * kind.group if read_once == "auto" else 0
    per_run = limits.keys_per_run if read_once == "auto" else 0
    return SharingCost(keys_per_run=per_run, keys_per_row=per_row).is_worth


def _within(numbers: npt.NDArray[Any], stop: int) -> bool:
    """Whether all numbers lie between 0 and ``stop``."""
    return int(numbers.min()) >= 0 and int(numbers.max()) < stop


def _ranges(records: Records, name: str, stop: int) -> bool:
    """Whether all ranges have a beginning, an end behind it, and lie before ``stop``."""
    first, last = records[f"first_{name}"], records[f"last_{name}"]
    return int(first.min()) >= 0 and bool((first < last).all()) and int(last.max()) <= stop


def _segments(order: RowOrder, window: int | None, block_size: int) -> tuple[Records, Ints]:
    """Cut spans to items: returns segments, item by item, and the item of each."""
    spans, starts = order.spans, order.item_starts
    first_item = np.searchsorted(starts, spans.first_row, "right") - 1
    counts = np.searchsorted(starts, spans.last_row, "left") - first_item
    span = np.repeat(np.arange(len(counts)), counts)
    item = np.arange(len(span)) - np.repeat(offsets(counts)[:-1] - first_item, counts)
    first_row = np.maximum(starts[item], spans.first_row[span])
    last_row = np.minimum(starts[item + 1], spans.last_row[span])
    tail = spans.is_tail[span]
    end = np.where(tail, order.positions[last_row - 1] + 1, spans.last_position[span])
    begin = spans.first_position[span]
    if window is not None:
        lowest = np.where(tail, order.positions[first_row], spans.lowest[span])
        begin = np.maximum(begin, (lowest - window + 1) // block_size * block_size)
    entry = spans.first_entry[span] + (begin - spans.first_position[span]) // block_size
    seen = np.flatnonzero(end > begin)
    seen = seen[np.argsort(item[seen], kind="stable")]
    segments = np.empty(len(seen), dtype=SEGMENT)
    segments["first_entry"] = entry[seen]
    segments["first_row"], segments["last_row"] = first_row[seen], last_row[seen]
    segments["first_position"], segments["num_keys"] = begin[seen], (end - begin)[seen]
    return segments, item[seen]


def _items(starts: Ints, of_item: Ints) -> Records:
    items = np.empty(len(starts) - 1, dtype=ITEM)
    items["first_row"], items["last_row"] = starts[:-1], starts[1:]
    bounds = np.searchsorted(of_item, np.arange(len(starts)))
    items["first_segment"], items["last_segment"] = bounds[:-1], bounds[1:]
    items["first_partial"] = -1
    return items


def _most_cost(costs: npt.NDArray[np.float64], kind: PlanKind, limits: NativeLimits) -> float:
    """Say what a task may cost at most so that all threads find enough of them."""
    if kind.num_threads == 1:
        return float("inf")
    num_tasks = limits.tasks_per_thread * kind.num_threads
    return float(costs.sum()) * kind.num_kv_heads / num_tasks

"""Plans how the native library reads a step.

Segments, items and merges, as ``native/include/ostinato_native.h`` has them: an *item* is some
neighbouring rows, its *segments* are the runs of keys that they see, cut to these rows. Items that
would keep one thread busy while others wait are cut into parts by keys; what parts bring for a row
is merged by its log-sum-exp.

The library plans each step anew (``native/src/plan.h``): nothing can be stale, and checking for
staleness would take longer. It checks the tables first, in one pass: after a forward pass no code
is in the processor's caches, and a dozen NumPy calls take longer than planning. This module decides
what reading once must save.

Cost: about ten microseconds for any number of decodes, and ten times that after a forward pass.
"""

import ctypes
import math
from collections import Counter
from ctypes import byref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.runner.inputs import AttentionMetadata, Ints
from ostinato.runner.native.checks import address_of
from ostinato.runner.native.ctypes_api import ITEM, SEGMENT, STEP_FAULTS, Plan, Rules, Tables
from ostinato.runner.native.library import Isa
from ostinato.runner.settings import ReadOnce

Records = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]

_MANY = 2**62
"""Larger than any array."""

_ROOM = 1 << 14
"""Initial size of the buffer in bytes: enough for a few dozen decodes."""

_INT64 = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class PlanKind:
    """What distinguishes the plans of one step.

    Attributes:
        window: Positions that a query sees; None sees all before it.
        group: Query heads per key/value head.
        num_kv_heads: Heads of keys.
        num_threads: Number of threads.
    """

    window: int | None
    group: int
    num_kv_heads: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """Costs and sizes in the library; rows count each head of queries.

    Attributes:
        item_rows: Rows whose running state stays in a core's cache besides the keys that are
            being read.
        run_keys: Runs end at multiples of this: keys that one instruction sums up, or a block's
            least.
        section_keys: Keys of a sequence that are summed up by themselves, a multiple of 32; part of
            what is computed, so it is not a setting.
        keys_per_run: Keys that must be saved besides, since what is read again soon comes from a
            core's cache, in half the time.
        keys_per_row: Keys that could be read in the time that a row needs to go from one segment
            to the next: the last tiles of a segment are not full, and products may cost so
            much that reading keys is never waited for.
        row_cost: Cost of a key per row, in units of reading the key.
        min_part: Cost below which an item is not cut further.
        most_packed: Cost up to which neighbouring items become one.
        tasks_per_thread: Number of tasks per thread.
    """

    item_rows: int = 512
    run_keys: int = 16
    section_keys: int = 1024
    keys_per_run: float = 128.0
    keys_per_row: float = 8.0
    row_cost: float = 0.1
    min_part: float = 512.0
    most_packed: float = 1024.0
    tasks_per_thread: int = 4

    @classmethod
    def of(cls, isa: Isa) -> "NativeLimits":
        """Return the values measured with an instruction set."""
        return cls(keys_per_row=4.0, run_keys=32) if isa == Isa.AMX else cls()

    def rules(self, kind: PlanKind, read_once: ReadOnce) -> Rules:
        """Return the rules for a step.

        Args:
            kind: The kind of layers.
            read_once: Whether what sequences share is read once for all of them: where that is
                cheaper (``auto``), ``always`` or ``never``.
        """
        per_run = {"never": math.inf, "auto": self.keys_per_run, "always": 0.0}[read_once]
        return Rules(
            keys_per_run=per_run,
            keys_per_row=self.keys_per_row if read_once == "auto" else 0.0,
            row_cost=self.row_cost,
            min_part=self.min_part,
            most_packed=self.most_packed,
            item_rows=self.item_rows,
            run_keys=self.run_keys,
            section_keys=self.section_keys,
            tasks_per_thread=self.tasks_per_thread,
            window=kind.window or 0,
            group=kind.group,
            num_kv_heads=kind.num_kv_heads,
            num_threads=kind.num_threads,
        )


class StepTables:
    """The tables of a step as the library takes them.

    Attributes:
        tables: Filled in; valid as long as this is.
    """

    def __init__(self, metadata: AttentionMetadata, num_blocks: int) -> None:
        """Check the lengths of arrays.

        Args:
            metadata: What the step is.
            num_blocks: Number of blocks of the store; the last one pads tables.
        """
        kept = starts, firsts, blocks, table_starts = (
            _contiguous(metadata.starts),
            _contiguous(metadata.first_positions),
            _contiguous(metadata.blocks),
            _contiguous(metadata.table_starts),
        )
        num = len(firsts)
        assert len(starts) == len(table_starts) == num + 1, "an end for each"
        self.tables = Tables(
            address_of(starts),
            address_of(firsts),
            address_of(blocks),
            address_of(table_starts),
            len(blocks),
            num,
            metadata.block_size,
            num_blocks,
        )
        self._kept = kept


class NativePlan:
    """How layers of one kind are read in one step.

    Attributes:
        laid: Field by field as in ``ost_attention``; valid as long as this is.
        block_size: Tokens per block.
        section_keys: Tokens per section.
    """

    def __init__(
        self, laid: Plan, memory: npt.NDArray[np.uint8], block_size: int, section_keys: int
    ) -> None:
        """Keep the library's output, and its memory."""
        self.laid = laid
        self.block_size = block_size
        self.section_keys = section_keys
        self._memory = memory

    @cached_property
    def tokens(self) -> Int32s:
        """Token of each row, shape (num_rows,)."""
        return self._array("tokens", np.dtype(np.int32), self.laid.num_rows)

    @cached_property
    def positions(self) -> Int32s:
        """Position of each row in its sequence, likewise."""
        return self._array("positions", np.dtype(np.int32), self.laid.num_rows)

    @cached_property
    def blocks(self) -> Int32s:
        """Block ids, segment after segment."""
        return self._array("blocks", np.dtype(np.int32), self.laid.num_blocks)

    @cached_property
    def segments(self) -> Records:
        """Records of ``SEGMENT``."""
        return self._array("segments", SEGMENT, self.laid.num_segments)

    @cached_property
    def items(self) -> Records:
        """Records of ``ITEM``, dearest first."""
        return self._array("items", ITEM, self.laid.num_items)

    def merges(self) -> dict[int, list[int]]:
        """Return which partial results are merged for each row that was split."""
        int32, num = np.dtype(np.int32), self.laid.num_merges
        rows = self._array("merge_rows", int32, num).tolist()
        starts = self._array("merge_starts", int32, num + 1)
        partials = self._array("merge_partials", int32, int(starts[-1]))
        return {row: partials[starts[n] : starts[n + 1]].tolist() for n, row in enumerate(rows)}

    def reads(self) -> Counter[int]:
        """Count how often each block is read for one head of keys, to test law 2."""
        counted: Counter[int] = Counter()
        for item in self.items:
            for segment in self.segments[item["first_segment"] : item["last_segment"]]:
                keys = self.keys_of(item, segment)
                first, last = keys.start // self.block_size, -(-keys.stop // self.block_size)
                entry = segment["first_entry"]
                counted.update(self.blocks[entry + first : entry + last].tolist())
        return counted

    def keys_of(self, item: np.void, segment: np.void) -> range:
        """Return which keys of a segment are in the sections of an item."""
        begin, end = (
            int(item[name]) * self.section_keys - int(segment["first_position"])
            for name in ("first_section", "last_section")
        )
        return range(max(0, begin), min(end, int(segment["num_keys"])))

    def _array(self, name: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        first = getattr(self.laid, name) - address_of(self._memory)
        return self._memory[first : first + count * dtype.itemsize].view(dtype)


def plan_native(native: ctypes.CDLL, step: StepTables, rules: Rules) -> NativePlan:
    """Plan how a step is read.

    Args:
        native: The library.
        step: What the step is.
        rules: The kind of layers, and the costs.

    Raises:
        ValueError: Tables are too short for their sequences, or contain invalid blocks.
    """
    laid, room = Plan(), _ROOM
    while True:
        memory = np.empty(room, dtype=np.uint8)
        needed = native.ost_make_plan(
            byref(step.tables), byref(rules), address_of(memory), room, byref(laid)
        )
        if needed < 0:
            raise ValueError(f"{STEP_FAULTS[needed]} of a step are out of range")
        if needed <= room:
            return NativePlan(laid, memory, step.tables.block_size, rules.section_keys)
        room = needed


def _contiguous(numbers: Ints) -> Ints:
    """Return a contiguous int64 array, usually without a copy."""
    if numbers.dtype is _INT64 and numbers.flags.c_contiguous:
        return numbers
    return np.ascontiguousarray(numbers, dtype=np.int64)

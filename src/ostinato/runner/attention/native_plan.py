"""Plans how the native library reads a step.

A plan has segments, items and merges (``native/include/ostinato_native.h``): an *item* is a range
of rows, its *segments* are the runs of keys that they see, cut to these rows. Items that would keep
one thread busy while others wait are split by keys; the partial results of a row are merged by
their log-sum-exp.

The library plans every step from scratch (``native/src/plan.h``): checking whether a plan is stale
would take longer. It also checks the tables, in one pass: after a forward pass no code is in the
processor's caches, and a dozen NumPy calls would take longer than planning. This module decides how
much reading once must save.

Cost: about ten microseconds for any number of decodes, and ten times that after a forward pass.
"""

import ctypes
import math
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ostinato.runner.inputs import AttentionMetadata, Ints
from ostinato.runner.native.checks import address_of
from ostinato.runner.native.ctypes_api import STEP_FAULTS, Plan, Rules, Tables
from ostinato.runner.native.library import Isa
from ostinato.runner.settings import ReadOnce

_INITIAL_BYTES = 1 << 14
"""Initial size of a plan's memory: enough for a few dozen decodes."""

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
        item_rows: Maximum rows of an item, so that their running state stays in a core's cache
            beside the keys.
        run_keys: Runs end at multiples of this: keys that one instruction sums up, or the smallest
            block.
        section_keys: Keys of a sequence that are summed up separately, a multiple of 32; it
            changes results, so it is not a setting.
        keys_per_run: Keys that a shared read must save in addition, since keys that are read again
            soon come from a core's cache, in half the time.
        keys_per_row: Keys that could be read in the time that a row takes to go from one segment
            to the next: the last tiles of a segment are not full, and where products are slow,
            reading keys takes no extra time.
        row_cost: Cost of a key per row, in units of reading the key.
        min_part: Cost below which an item is not split further.
        max_packed_cost: Cost up to which adjacent items become one.
        tasks_per_thread: Number of tasks per thread.
    """

    item_rows: int = 512
    run_keys: int = 16
    section_keys: int = 1024
    keys_per_run: float = 128.0
    keys_per_row: float = 8.0
    row_cost: float = 0.1
    min_part: float = 512.0
    max_packed_cost: float = 1024.0
    tasks_per_thread: int = 4

    @classmethod
    def of(cls, isa: Isa) -> "NativeLimits":
        """Return the values measured on an instruction set."""
        return cls(keys_per_row=4.0, run_keys=32) if isa == Isa.AMX else cls()

    def rules(self, kind: PlanKind, read_once: ReadOnce) -> Rules:
        """Return the rules for a kind of layers."""
        per_run = {"never": math.inf, "auto": self.keys_per_run, "always": 0.0}[read_once]
        return Rules(
            keys_per_run=per_run,
            keys_per_row=self.keys_per_row if read_once == "auto" else 0.0,
            row_cost=self.row_cost,
            min_part=self.min_part,
            max_packed_cost=self.max_packed_cost,
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
    """The block tables of a step for the library.

    Attributes:
        tables: Valid as long as this object.
    """

    def __init__(self, metadata: AttentionMetadata, num_blocks: int) -> None:
        """Check the lengths of a step's arrays; the last of ``num_blocks`` pads tables."""
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


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """How layers of one kind are read in one step.

    Attributes:
        laid: The library's output, which points into ``memory``.
        memory: Bytes of all arrays.
        section_keys: Tokens per section.
    """

    laid: Plan
    memory: npt.NDArray[np.uint8]
    section_keys: int


def plan_native(native: ctypes.CDLL, step: StepTables, rules: Rules) -> NativePlan:
    """Plan how a step is read.

    Args:
        native: The library.
        step: The step's tables.
        rules: The kind of layers, and the costs.

    Raises:
        ValueError: Tables are too short for their sequences, or contain invalid blocks.
    """
    laid, size = Plan(), _INITIAL_BYTES
    while True:
        memory = np.empty(size, dtype=np.uint8)
        needed = native.ost_make_plan(
            byref(step.tables), byref(rules), address_of(memory), size, byref(laid)
        )
        if needed < 0:
            raise ValueError(f"{STEP_FAULTS[needed]} of a step are out of range")
        if needed <= size:
            return NativePlan(laid, memory, rules.section_keys)
        size = needed


def _contiguous(numbers: Ints) -> Ints:
    """Return a contiguous int64 array, usually without a copy."""
    if numbers.dtype is _INT64 and numbers.flags.c_contiguous:
        return numbers
    return np.ascontiguousarray(numbers, dtype=np.int64)

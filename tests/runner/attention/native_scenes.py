"""Steps for the native library: its block sizes, trees of shared runs, chunks beside decodes."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ostinato.runner.attention.native_backend import NativeLimits, NativePlan
from ostinato.runner.native.ctypes_api import ITEM, SEGMENT
from tests.runner.attention.scene import Shape

INT32 = np.dtype(np.int32)


class PlanView:
    """The arrays of a plan: the token and position of each row, segments, items and merges."""

    def __init__(self, plan: NativePlan, block_size: int) -> None:
        self.plan, self.laid, self.block_size = plan, plan.laid, block_size
        self.section_keys = plan.section_keys
        self.tokens = self.array("tokens", INT32, plan.laid.num_rows)
        self.positions = self.array("positions", INT32, plan.laid.num_rows)
        self.blocks = self.array("blocks", INT32, plan.laid.num_blocks)
        self.segments = self.array("segments", SEGMENT, plan.laid.num_segments)
        self.items = self.array("items", ITEM, plan.laid.num_items)

    def merges(self) -> dict[int, list[int]]:
        """Which partial results are merged for each row that was split."""
        num = self.laid.num_merges
        rows = self.array("merge_rows", INT32, num).tolist()
        starts = self.array("merge_starts", INT32, num + 1)
        partials = self.array("merge_partials", INT32, int(starts[-1]))
        return {row: partials[starts[n] : starts[n + 1]].tolist() for n, row in enumerate(rows)}

    def reads(self) -> Counter[int]:
        """How often each block is read for one head of keys."""
        counted: Counter[int] = Counter()
        for item in self.items:
            for segment in self.segments[item["first_segment"] : item["last_segment"]]:
                keys = self.keys_of(item, segment)
                first, last = keys.start // self.block_size, -(-keys.stop // self.block_size)
                entry = segment["first_entry"]
                counted.update(self.blocks[entry + first : entry + last].tolist())
        return counted

    def keys_of(self, item: np.void, segment: np.void) -> range:
        """Which keys of a segment are in the sections of an item."""
        begin, end = (
            int(item[name]) * self.section_keys - int(segment["first_position"])
            for name in ("first_section", "last_section")
        )
        return range(max(0, begin), min(end, int(segment["num_keys"])))

    def array(self, name: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        first = getattr(self.laid.arrays, name) - self.plan.memory.ctypes.data
        return self.plan.memory[first : first + count * dtype.itemsize].view(dtype)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """A few sequences: fresh ones, decodes, chunks; some begin as an earlier one does."""
    size = draw(st.sampled_from([16, 16, 16, 32, 48, 256]))
    cached = st.sampled_from([0, size - 1, size, size + 1]) | st.integers(0, 6 * min(size, 32))
    new = st.sampled_from([1, 1, 1, 2]) | st.integers(1, 70)
    sequences = draw(st.lists(st.tuples(cached, new), min_size=1, max_size=7))
    return Shape(
        sequences=tuple(sequences),
        likes=tuple(
            draw(st.tuples(st.integers(0, i), st.integers(0, 6))) for i in range(len(sequences))
        ),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        key_dim=draw(st.sampled_from([2, 16, 64, 80, 128])),
        value_dim=draw(st.sampled_from([1, 2, 6, 16, 64, 128])),
        block_size=size,
    )


limits = st.builds(
    NativeLimits,
    item_rows=st.sampled_from([1, 4, 16, 256]),
    run_keys=st.just(32),
    section_keys=st.sampled_from([32, 64, 1024]),
    min_part=st.sampled_from([1.0, 64.0, 512.0]),
)
"""From one row per item, cut into parts of 32 keys, to what is used by default."""

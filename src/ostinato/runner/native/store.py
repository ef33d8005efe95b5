"""A KV store that the native library reads.

It has as many bytes as a plain store, in the layout of the kernels: for each element of a key,
sixteen adjacent tokens; in bfloat16, two adjacent elements of a key, or two adjacent tokens of a
value, which VDPBF16PS and TDPBF16PS multiply at once::

    bfloat16       keys    [kv head][block][token / 16][key_dim / 2][16][2]
                   values  [kv head][block][token / 2][value_dim][2]
    float16, 32    keys    [kv head][block][token / 16][key_dim][16]
                   values  [kv head][block][token][value_dim]
    int8           as bfloat16, each sixteen tokens after their scales

No Python code depends on this layout.

Memory pages are allocated before keys and values are written. The kernel allocates and zeroes each
page of a mapping when it is first written, and in a virtual machine the host may have to do so as
well, at seconds per gigabyte. Each part of the memory (a head of a layer) crosses into a new page
at the same block, and a step that wrote there first would wait for hundreds of pages at once. So a
thread allocates those of the first blocks from the start on, and later those of the blocks that
come next. No more than that: a pool may be as large as half of the memory, and most never fill it.

Source: ``MADV_POPULATE_WRITE``, madvise(2), Linux 5.14; older kernels allocate pages when they are
written.
"""

import ctypes
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.huge_pages import PAGE_BYTES, map_memory, memory_calls
from ostinato.runner.kv.kv_codes import decode, row_bytes
from ostinato.runner.kv.kv_store import Bytes, KVStore, LayerKV, StoreShape
from ostinato.runner.native.checks import Ints, fill_rows, within
from ostinato.runner.native.ctypes_api import KV_DTYPES, Kv, Rows
from ostinato.runner.settings import NATIVE_BLOCK

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23

SPAN = 8_192
"""Slots ahead of the last written one whose pages are allocated."""

REST = 9.0
"""Times as long as it works that the thread rests while steps write far behind it."""

CLOSE = SPAN // 2
"""Slots between the thread and the last written one below which it does not rest."""

IDLE_S = 1.0
"""Seconds after the last write from which on it does not rest either."""


@dataclass(frozen=True, slots=True)
class Area:
    """A mapping.

    Attributes:
        address: Its address, at the start of a page.
        num_bytes: Its size.
        num_parts: Number of parts of equal size, each with a row for every slot.
    """

    address: int
    num_bytes: int
    num_parts: int


class PagesAhead:
    """Allocates the pages of the slots behind those that are written, on a thread of its own."""

    def __init__(self, areas: Sequence[Area], num_slots: int) -> None:
        """Begin with none of the pages allocated that hold ``num_slots`` slots."""
        self._areas, self._num_slots = areas, num_slots
        self._pages = self._by_slot()
        self._target = self._last_slot = 0
        self._written_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def begin(self, num_slots: int) -> None:
        """Allocate the pages of the first slots, if they fill any."""
        if sum(area.num_bytes for area in self._areas) >= PAGE_BYTES:
            self._extend(num_slots)

    def reach(self, slot: int) -> None:
        """Note that a slot is about to be written: the pages of ``SPAN`` more are allocated."""
        self._last_slot, self._written_s = max(slot, self._last_slot), time.monotonic()
        if self._target < min(slot + SPAN * 3 // 4, self._num_slots):
            self._extend(slot + SPAN)

    def close(self) -> None:
        """Stop, before the memory goes."""
        self._is_closed.set()
        self.wait()

    def wait(self) -> None:
        """Wait until what was asked for is allocated."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _extend(self, target: int) -> None:
        self._target = min(target, self._num_slots)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._take, name="ostinato-pages", daemon=True)
            self._thread.start()

    def _take(self) -> None:
        try:
            while self._pages and self._pages[-1][0] < self._target:
                slot, address, num_bytes = self._pages.pop()
                begin_s = time.monotonic()
                if self._is_closed.is_set() or not _populate(address, num_bytes):
                    return
                now_s = time.monotonic()
                if slot >= self._last_slot + CLOSE and now_s < self._written_s + IDLE_S:
                    self._is_closed.wait(REST * (now_s - begin_s))
        except MemoryError as error:
            logger.warning("the kernel has no memory for the next keys and values: %s", error)
            self._target = self._num_slots

    def _by_slot(self) -> list[tuple[int, int, int]]:
        """List the huge pages: the first slot in each, address and bytes; that of slot 0 last."""
        pages = list[tuple[int, int, int]]()
        for area in self._areas:
            part_bytes = area.num_bytes // area.num_parts
            low, end = area.address, area.address + area.num_bytes
            while low < end:
                high = min((low // PAGE_BYTES + 1) * PAGE_BYTES, end)
                offset = (low - area.address) % part_bytes
                begins_part = not offset or offset + high - low > part_bytes
                slot = 0 if begins_part else offset * self._num_slots // part_bytes
                pages.append((slot, low, high - low))
                low = high
        return sorted(pages, reverse=True)


def _populate(address: int, num_bytes: int) -> bool:
    """Allocate the pages of a range; False if the kernel does not support it."""
    calls = memory_calls()
    if calls is None:
        return False
    if calls.madvise(address, num_bytes, _POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.ENOMEM:
        raise MemoryError(f"{num_bytes:,} bytes: {os.strerror(code)}")
    return False


TOKENS_AT_START = 16_384
"""Slots whose memory is allocated from the start on, for the first prompts."""


class NativeKVStore(KVStore):
    """A store of the native library, on a CPU."""

    layout = "heads"

    def __init__(self, native: ctypes.CDLL, shape: StoreShape) -> None:
        """Allocate all blocks, zeroed; see ``KVStore``.

        Keys have an even number of elements, and blocks a multiple of 16 slots; ``dtype`` is
        bfloat16, float16, float32 or int8; the device is a CPU.
        """
        block_size, dtype = shape.block_size, shape.dtype
        if torch.device(shape.device).type != "cpu":
            raise ValueError(f"no native store on {shape.device}: it is for CPUs")
        if block_size % NATIVE_BLOCK or dtype not in KV_DTYPES:
            raise ValueError(f"no native store has blocks of {block_size} tokens in {dtype}")
        self._native = native
        self._memory: dict[int, Bytes] = {}  # by bytes of a row: all heads with rows of that size
        self._areas: list[Area] = []
        self._heads: list[tuple[int, int, int]] = []  # bytes of a row, first head, end
        self._kv: dict[int, Kv] = {}
        self._rows = Rows(), Rows()
        super().__init__(shape)
        self._ahead = PagesAhead(self._areas, self.num_slots)
        self._ahead.begin(TOKENS_AT_START)
        weakref.finalize(self, self._ahead.close)

    def of_layer(self, layer: int) -> Kv:
        """Return the addresses of a layer's keys and values, valid as long as the store."""
        return self._kv[layer]

    def check_slots(self, *runs: Ints) -> list[Ints]:
        """Check runs of slots once for many calls, each of shape (n,).

        Returns:
            The same, contiguous.

        Raises:
            ValueError: They are not int64, or one of them is not within the store.
        """
        checked, last = [], -1
        for slots in runs:
            if slots.dtype != np.int64 or slots.ndim != 1:
                raise ValueError("the native library needs that slots are a row of int64")
            if not within(slots, self.num_slots):
                raise ValueError(
                    f"the native library needs that slots are between 0 and {self.num_slots}"
                )
            checked.append(np.ascontiguousarray(slots))
            last = max(last, int(slots.max(initial=-1)))
        if last >= 0:
            self._ahead.reach(last)
        return checked

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store one layer's keys and values of some tokens; see ``KVStore``."""
        [checked] = self.check_slots(slots.numpy())
        self.write_checked(layer, keys, values, checked, torch.get_num_threads())

    def write_checked(
        self, layer: int, keys: Tensor, values: Tensor, slots: Ints, num_threads: int
    ) -> None:
        """Store keys and values in checked slots; see ``write``."""
        kept, (key_rows, value_rows) = self.spec.layers[layer], self._rows
        count = len(slots)
        # Names hold what rows point into until the call is over.
        keys = fill_rows(key_rows, keys, count, kept.num_kv_heads, kept.key_dim)
        values = fill_rows(value_rows, values, count, kept.num_kv_heads, kept.value_dim)
        self._native.ost_kv_write(
            byref(self._kv[layer]),
            byref(key_rows),
            byref(value_rows),
            slots.ctypes.data,
            count,
            num_threads,
        )

    def copy(self, layer: int, source: Tensor, target: Tensor) -> None:
        """Copy slots within one layer; see ``KVStore``."""
        self.copy_checked(layer, *self.check_slots(source.numpy(), target.numpy()))

    def copy_checked(self, layer: int, sources: Ints, targets: Ints) -> None:
        """Copy checked slots; see ``copy``."""
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} slots cannot be copied to {len(targets)}")
        self._native.ost_kv_copy(
            byref(self._kv[layer]), sources.ctypes.data, targets.ctypes.data, len(sources)
        )

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch single slots of one layer; see ``KVStore``."""
        kept, [checked] = self.spec.layers[layer], self.check_slots(slots.numpy())
        keys, values = (
            torch.empty(
                len(checked),
                kept.num_kv_heads,
                row_bytes(dim, self.dtype) // self.dtype.itemsize,
                dtype=self.dtype,
            )
            for dim in (kept.key_dim, kept.value_dim)
        )
        self._native.ost_kv_read(
            byref(self._kv[layer]),
            checked.ctypes.data,
            len(checked),
            keys.data_ptr(),
            values.data_ptr(),
        )
        return (decode(keys), decode(values)) if self.dtype == torch.int8 else (keys, values)

    def zero(self, slots: Tensor) -> None:
        """Overwrite slots with zeros in all layers; see ``KVStore``."""
        [checked] = self.check_slots(slots.numpy())
        for kv in self._kv.values():
            self._native.ost_kv_zero(byref(kv), checked.ctypes.data, len(checked))

    def _parts(self) -> list[Bytes]:
        merged: list[tuple[int, int, int]] = []
        for size, first, end in self._heads:
            if merged and (merged[-1][0], merged[-1][2]) == (size, first):
                first = merged.pop()[1]
            merged.append((size, first, end))
        return [self._memory[size][first:end] for size, first, end in merged]

    def _allocate(self, layer: int, kept: LayerKV) -> None:
        if kept.key_dim % 2:
            raise ValueError(f"no native store has keys of {kept.key_dim} elements")
        self._kv[layer] = Kv(
            keys=self._zeros(kept.num_kv_heads, kept.key_dim),
            values=self._zeros(kept.num_kv_heads, kept.value_dim),
            num_blocks=self.num_blocks + 1,
            dtype=KV_DTYPES[self.dtype],
            num_kv_heads=kept.num_kv_heads,
            key_dim=kept.key_dim,
            value_dim=kept.value_dim,
            block_size=self.block_size,
        )

    def _zeros(self, num_heads: int, dim: int) -> int:
        """Return the address of zeroed memory that exists as long as the store."""
        size = row_bytes(dim, self.dtype)
        if size not in self._memory:
            self._memory[size] = self._map(size)
        first = sum(end - begin for other, begin, end in self._heads if other == size)
        self._heads.append((size, first, first + num_heads))
        return self._memory[size][first:].ctypes.data

    def _map(self, size: int) -> Bytes:
        """Map memory for all heads with rows of one size, (num_heads, num_blocks + 1, bytes).

        With one mapping for all layers, a block is exported or imported in a single call. The
        kernel allocates zeroed pages, on request or when they are first written, of 2 MiB if it
        can: fewer page faults, and fewer address translations.

        Raises:
            MemoryError: The kernel does not map as many bytes.
        """
        kept = [self.spec.layers[layer] for layer in self.layers]
        dims = [(one.num_kv_heads, dim) for one in kept for dim in (one.key_dim, one.value_dim)]
        num_heads = sum(heads for heads, dim in dims if row_bytes(dim, self.dtype) == size)
        num_bytes = max(1, self.num_slots * num_heads * size)
        content = map_memory(num_bytes)
        self._areas.append(Area(content.ctypes.data, num_bytes, max(1, num_heads)))
        shape = num_heads, self.num_blocks + 1, size * self.block_size
        return content[: num_heads * self.num_slots * size].reshape(shape)

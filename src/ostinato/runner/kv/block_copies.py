"""Copies of blocks between a store and host memory, for tiers.

::

    pool on a device ──index_select──► rows on the device ──► pinned host memory ──► tier
                     ◄──index_copy_──                      ◄──                   ◄──

A store on a CPU is host memory and copies its blocks itself. On CUDA copies run in a separate
stream, after the work that is queued so far: a step that was planned before a block was freed may
still read it. Each call returns when the copies are complete.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.kv.plain_store import PlainKVStore


class BlockCopies(Protocol):
    """Exports and imports whole blocks as bytes."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    def export_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy blocks out; see ``KVStore``."""

    def import_blocks(self, blocks: Sequence[int], payload: memoryview) -> None:
        """Fill blocks that nothing reads; any thread may call this. See ``KVStore``."""

    def new_buffer(self, num_bytes: int) -> memoryview:
        """Return host memory that is fast to copy from and to."""


class DeviceCopies:
    """Copies blocks of a torch store on any device."""

    def __init__(self, store: PlainKVStore) -> None:
        """Copy the blocks of a store."""
        self._rows = store.block_rows()
        self._device, self.block_bytes = store.device, store.block_bytes
        self._local = threading.local()  # a stream for each thread

    def export_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy blocks out; see ``BlockCopies``."""
        host = self._view(into, len(blocks))
        with self._stream():
            ids = torch.tensor(blocks, device=self._device)
            parts = [rows.index_select(0, ids) for rows in self._rows]
            host.copy_(torch.cat(parts, dim=1), non_blocking=True)

    def import_blocks(self, blocks: Sequence[int], payload: memoryview) -> None:
        """Fill blocks; see ``BlockCopies``."""
        host = self._view(payload, len(blocks))
        with self._stream():
            ids = torch.tensor(blocks, device=self._device)
            content = host.to(self._device, non_blocking=True)
            widths = [rows.shape[1] for rows in self._rows]
            for rows, part in zip(self._rows, content.split(widths, dim=1), strict=True):
                rows.index_copy_(0, ids, part)

    def new_buffer(self, num_bytes: int) -> memoryview:
        """Return host memory, pinned for CUDA."""
        pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy().data

    def _view(self, memory: memoryview, num_blocks: int) -> Tensor:
        count = num_blocks * self.block_bytes
        return torch.from_numpy(np.frombuffer(memory, np.uint8, count)).view(num_blocks, -1)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Run copies after the work that is queued on the device, and wait for them."""
        if self._device.type != "cuda":
            yield
            return
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._local.stream
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        stream.record_event().synchronize()


def block_copies(store: KVStore) -> BlockCopies:
    """Return what copies a store's blocks."""
    if store.device.type == "cpu":
        return store
    assert isinstance(store, PlainKVStore), "torch alone computes on devices"
    return DeviceCopies(store)

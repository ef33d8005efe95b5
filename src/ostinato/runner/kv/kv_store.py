"""The interface of KV stores.

A slot is ``block * block_size + offset``; a block is a run of ``block_size`` slots. One additional
block is always zero: tables are padded with it. The memory layout is known only to a store and its
attention: see ``plain_store`` and ``native/store``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostinato.core.errors import ConfigError
from ostinato.runner.kv.kv_codes import row_bytes
from ostinato.runner.memory import available_bytes

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV of one token; all 0 without attention.

    Attributes:
        num_kv_heads: Heads of keys and values.
        key_dim: Elements of one head's key.
        value_dim: Elements of one head's value.
        sliding_window: Positions that a query sees, itself included; None sees all.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * (
            row_bytes(self.key_dim, dtype) + row_bytes(self.value_dim, dtype)
        )


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A model's KV of one token, layer by layer."""

    layers: tuple[LayerKV, ...]

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that keep keys and values."""
        return tuple(layer for layer, kept in enumerate(self.layers) if kept.num_kv_heads)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one slot over all layers."""
        return sum(layer.bytes_per_token(dtype) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class StoreShape:
    """What a store is to hold, and where.

    Attributes:
        spec: The KV per token.
        num_blocks: Blocks that may be written.
        block_size: Slots per block.
        dtype: Format of keys and values.
        device: Where they are.
        layers: The layers of the store; None is all with attention.
    """

    spec: KVSpec
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    layers: Sequence[int] | None = None


class KVStore(ABC):
    """Keys and values of every slot, in every layer.

    Attributes:
        spec: The KV per token.
        num_blocks: Blocks that may be written; the next id is that of the zero block.
        block_size: Slots per block.
        num_slots: Slots of all blocks, those of the zero block included.
        dtype: Format of keys and values; int8 is that of ``kv_codes``, and reads as float32.
        device: Device of the tensors.
        layers: The layers of this store.
        layout: Name of the layout of exported blocks.
    """

    layout: ClassVar[str]

    def __init__(self, shape: StoreShape) -> None:
        """Allocate all blocks, zeroed.

        Raises:
            ConfigError: The device has less memory free than the blocks need.

        Effects: takes the memory as long as the store exists; on a CPU, pages are taken when they
            are first written.
        """
        spec = self.spec = shape.spec
        self.num_blocks, self.block_size = shape.num_blocks, shape.block_size
        self.num_slots = (self.num_blocks + 1) * self.block_size
        self.dtype, self.device = shape.dtype, torch.device(shape.device)
        self.layers = spec.attending if shape.layers is None else tuple(shape.layers)
        available = available_bytes(self.device)
        if available is not None and self.num_slots * self._bytes_per_slot > available:
            raise self._too_large()  # before the kernel maps more pages than it has
        try:
            for layer in self.layers:
                self._allocate(layer, spec.layers[layer])
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise self._too_large() from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks that may be written."""
        return self.num_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this store."""
        return self.block_size * self._bytes_per_slot

    def export_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Export blocks one after another, each with all layers.

        Args:
            blocks: Block ids.
            into: Writable bytes, shape (len(blocks) * block_bytes,).
        """
        for own, outer in self._pieces(blocks, into):
            outer[...] = own

    def import_blocks(self, blocks: Sequence[int], payload: memoryview) -> None:
        """Import blocks that a store of the same layout has exported.

        No sequence may be reading them; any thread may call this while others compute.
        """
        for own, outer in self._pieces(blocks, payload):
            own[...] = outer

    def new_buffer(self, num_bytes: int) -> memoryview:
        """Return memory to export to and import from."""
        return np.empty(num_bytes, np.uint8).data

    def _pieces(self, blocks: Sequence[int], payload: memoryview) -> Iterator[tuple[Bytes, Bytes]]:
        """Pair views of the store with views of exported bytes, for each run of adjacent blocks."""
        rows = np.frombuffer(payload, np.uint8, len(blocks) * self.block_bytes)
        rows = rows.reshape(len(blocks), self.block_bytes)
        for place, first, count in _runs(blocks):
            start = 0
            for part in self._parts():
                num_parts, _, num_bytes = part.shape
                stop = start + num_parts * num_bytes
                outer = rows[place : place + count, start:stop].reshape(count, num_parts, num_bytes)
                yield part[:, first : first + count], outer.transpose(1, 0, 2)
                start = stop

    @abstractmethod
    def _parts(self) -> list[Bytes]:
        """View all layers, keys before values, each of shape (num_parts, num_blocks + 1, bytes)."""

    @property
    def _bytes_per_slot(self) -> int:
        return sum(self.spec.layers[layer].bytes_per_token(self.dtype) for layer in self.layers)

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store one layer's keys and values of some tokens.

        Args:
            layer: Index of the layer.
            keys: Shape (num_tokens, num_kv_heads, key_dim), any strides.
            values: Shape (num_tokens, num_kv_heads, value_dim), any strides.
            slots: Slots to write, all different, shape (num_tokens,), int64.

        Effects: values are rounded to the store's dtype.
        """

    @abstractmethod
    def copy(self, layer: int, source: Tensor, target: Tensor) -> None:
        """Copy slots within one layer; ``source`` and ``target`` are int64, shape (num_tokens,).

        All sources are read before any target is written.
        """

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks of one layer into new, contiguous memory.

        Args:
            layer: Index of the layer.
            blocks: Block ids, shape (num_rows, blocks_per_row), int64.

        Returns:
            Keys, shape (num_rows, blocks_per_row * block_size, num_kv_heads, key_dim), and
            values likewise; the caller may overwrite them.
        """
        within = torch.arange(self.block_size, device=blocks.device)
        slots = (blocks[..., None] * self.block_size + within).flatten(1)
        keys, values = self.read(layer, slots.flatten())
        return keys.unflatten(0, slots.shape), values.unflatten(0, slots.shape)

    @abstractmethod
    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy single slots of one layer.

        Returns:
            Keys, shape (num_slots, num_kv_heads, key_dim), and values likewise.
        """

    @abstractmethod
    def zero(self, slots: Tensor) -> None:
        """Overwrite slots with zeros in all layers.

        Effects: slots that are zero are only read, so that unused pages stay free.
        """

    @abstractmethod
    def _allocate(self, layer: int, kept: LayerKV) -> None:
        """Allocate zeroed memory for a layer."""

    def _too_large(self) -> ConfigError:
        num_bytes = self.num_slots * self._bytes_per_slot
        available = available_bytes(self.device)
        free = "an unknown number of" if available is None else f"{available:,}"
        return ConfigError(
            f"the KV store needs {num_bytes:,} bytes on {self.device} for num_blocks="
            f"{self.num_blocks} of {self.block_size} tokens, and {free} bytes are available: "
            "lower num_blocks or kv_cache_memory"
        )


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of adjacent blocks: index in the sequence, first block, number."""
    place = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield place, blocks[place], index - place
            place = index

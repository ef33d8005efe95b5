"""Where do keys and values live?

Each layer has one tensor of keys and one of values, indexed by slot; a block is a run of
``block_size`` slots, so gathering whole blocks copies long, contiguous runs::

    keys of one layer      slot = block * block_size + offset

            block 0              block 1                      block num_blocks
    ┌────────────────────┬────────────────────┬─ ... ─┬────────────────────┐
    │ s0   s1   s2   s3  │ s4   s5   s6   s7  │       │ 0    0    0    0   │
    └──┼─────────────────┴────────────────────┴─ ... ─┴────────────────────┘
       ▼                                               never written: tables
     head 0: d0 d1 .. d(key_dim-1)                     are padded with it
     head 1: d0 d1 .. d(key_dim-1)

Nobody outside this file knows that order; a backend with another one brings its own store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.core.errors import ConfigError
from ostinato.runner.memory import available_bytes

_PIECE_SLOTS = 4096
"""Slots that are looked at in one go before they are zeroed."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of one token.

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

    @property
    def num_elements(self) -> int:
        """Elements of one token's key and value."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model keeps of one token, layer by layer."""

    layers: tuple[LayerKV, ...]

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one slot over all layers."""
        return sum(layer.num_elements for layer in self.layers) * dtype.itemsize


class KVStore:
    """Keys and values of every slot, in every layer.

    Attributes:
        spec: What is kept per token.
        num_blocks: Blocks that may be written.
        block_size: Slots per block.
        dtype: Format of keys and values.
        device: Where they live.
        layers: Which layers are kept here.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
    ) -> None:
        """Allocate all blocks, zeroed.

        Args:
            spec: What is kept per token.
            num_blocks: Blocks that may be written.
            block_size: Slots per block.
            dtype: Format of keys and values.
            device: Where they live.
            layers: Which layers are kept here; None is all of them.

        Raises:
            ConfigError: The device has less memory free than the blocks need.

        Effects: takes the memory for as long as the store lives; on a CPU, pages are taken
            as they are first written.
        """
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers = tuple(range(len(spec.layers)) if layers is None else layers)
        num_slots = (num_blocks + 1) * block_size
        self._refuse_too_much(num_slots)
        try:
            kept = {layer: spec.layers[layer] for layer in self.layers}
            self._keys = {
                layer: self._allocate(num_slots, n.num_kv_heads, n.key_dim)
                for layer, n in kept.items()
            }
            self._values = {
                layer: self._allocate(num_slots, n.num_kv_heads, n.value_dim)
                for layer, n in kept.items()
            }
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise self._too_large(num_slots) from error

    @property
    def zero_block(self) -> int:
        """Id of a block past the last one that is always zero, to pad block tables with."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks that may be written."""
        return self.num_blocks * self.block_size * self._bytes_per_slot

    @property
    def _bytes_per_slot(self) -> int:
        elements = sum(self.spec.layers[layer].num_elements for layer in self.layers)
        return elements * self.dtype.itemsize

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store one layer's keys and values of some tokens.

        Args:
            layer: Which layer.
            keys: Shape (num_tokens, num_kv_heads, key_dim), any strides.
            values: Shape (num_tokens, num_kv_heads, value_dim), any strides.
            slots: Where to, all different, shape (num_tokens,), int64.

        Effects: values are rounded to the store's dtype.
        """
        self._keys[layer].index_copy_(0, slots, keys.to(self.dtype))
        self._values[layer].index_copy_(0, slots, values.to(self.dtype))

    def copy(self, layer: int, source: Tensor, target: Tensor) -> None:
        """Copy slots within one layer; ``source`` and ``target`` are int64, shape (num_tokens,).

        All sources are read before any target is written.
        """
        for tensor in (self._keys[layer], self._values[layer]):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch whole blocks of one layer into fresh, contiguous memory.

        Args:
            layer: Which layer.
            blocks: Block ids, shape (num_rows, blocks_per_row), int64.

        Returns:
            Keys, shape (num_rows, blocks_per_row * block_size, num_kv_heads, key_dim), and
            values likewise; the caller may overwrite them.
        """
        return self._fetch(self._keys[layer], blocks), self._fetch(self._values[layer], blocks)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch single slots of one layer.

        Returns:
            Keys, shape (num_slots, num_kv_heads, key_dim), and values likewise, both fresh.
        """
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)

    def zero(self, slots: Tensor) -> None:
        """Forget the content of some slots in all layers.

        Effects: what is zero already is read and not written, so that pages of a store that
        were never used stay free.
        """
        for tensor in (*self._keys.values(), *self._values.values()):
            for piece in slots.split(_PIECE_SLOTS):
                if bool(tensor.index_select(0, piece).any()):
                    tensor.index_fill_(0, piece, 0)

    def _fetch(self, tensor: Tensor, blocks: Tensor) -> Tensor:
        num_rows, blocks_per_row = blocks.shape
        num_heads, dim = tensor.shape[1:]
        by_block = tensor.view(self.num_blocks + 1, self.block_size * num_heads * dim)
        rows = by_block.index_select(0, blocks.reshape(-1))
        return rows.view(num_rows, blocks_per_row * self.block_size, num_heads, dim)

    def _allocate(self, num_slots: int, num_heads: int, dim: int) -> Tensor:
        """Return zeros of shape (num_slots, num_heads, dim).

        NumPy asks the kernel for zeroed pages, which cost nothing until written; torch would
        fill them, seconds for many gigabytes.
        """
        shape = (num_slots, num_heads, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        content = np.zeros(num_slots * num_heads * dim * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(content).view(self.dtype).view(shape)

    def _refuse_too_much(self, num_slots: int) -> None:
        """Refuse before the kernel promises pages that it does not have."""
        available = available_bytes(self.device)
        asked = num_slots * self._bytes_per_slot
        if available is not None and asked > available:
            raise self._too_large(num_slots)

    def _too_large(self, num_slots: int) -> ConfigError:
        asked = num_slots * self._bytes_per_slot
        available = available_bytes(self.device)
        free = "an unknown number of" if available is None else f"{available:,}"
        return ConfigError(
            f"the KV store needs {asked:,} bytes on {self.device} for num_blocks="
            f"{self.num_blocks} of {self.block_size} tokens, and {free} bytes are available: "
            "lower num_blocks or kv_cache_memory"
        )

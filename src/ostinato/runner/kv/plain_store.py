"""A KV store in plain tensors.

Each layer has one tensor of keys and one of values, indexed by slot::

    keys of one layer      slot = block * block_size + offset

            block 0              block 1                      block num_blocks
    ┌────────────────────┬────────────────────┬─ ... ─┬────────────────────┐
    │ s0   s1   s2   s3  │ s4   s5   s6   s7  │       │ 0    0    0    0   │
    └──┼─────────────────┴────────────────────┴─ ... ─┴────────────────────┘
       ▼                                               never written: tables
     head 0: d0 d1 .. d(key_dim-1)                     are padded with it
     head 1: d0 d1 .. d(key_dim-1)

In int8 a row is a head's codes and its scale, see ``kv_codes``. No other file depends on this
layout.
"""

import torch
from torch import Tensor

from ostinato.runner.kv.kv_codes import decode, encode, row_bytes
from ostinato.runner.kv.kv_store import Bytes, KVStore, LayerKV, StoreShape
from ostinato.runner.memory import lazy_zeros

_PIECE_SLOTS = 4096
"""Slots that are compared with zero in one operation."""


class PlainKVStore(KVStore):
    """One row per slot, on any device and in any dtype."""

    layout = "slots"

    def __init__(self, shape: StoreShape) -> None:
        """Allocate all blocks, zeroed; see ``KVStore``."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        super().__init__(shape)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store one layer's keys and values of some tokens; see ``KVStore``."""
        self._keys[layer].index_copy_(0, slots, self._kept(keys))
        self._values[layer].index_copy_(0, slots, self._kept(values))

    def copy(self, layer: int, source: Tensor, target: Tensor) -> None:
        """Copy slots within one layer; see ``KVStore``."""
        for tensor in (self._keys[layer], self._values[layer]):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch single slots of one layer; see ``KVStore``."""
        keys = self._keys[layer].index_select(0, slots)
        return self._read(keys), self._read(self._values[layer].index_select(0, slots))

    def zero(self, slots: Tensor) -> None:
        """Overwrite slots with zeros in all layers; see ``KVStore``."""
        for tensor in (*self._keys.values(), *self._values.values()):
            for piece in slots.split(_PIECE_SLOTS):
                if bool(tensor.index_select(0, piece).any()):
                    tensor.index_fill_(0, piece, 0)

    def block_rows(self) -> list[Tensor]:
        """View all layers as bytes, keys before values, each of shape (num_blocks + 1, bytes)."""
        tensors = [t for layer in self.layers for t in (self._keys[layer], self._values[layer])]
        return [tensor.view(torch.uint8).view(self.num_blocks + 1, -1) for tensor in tensors]

    def _parts(self) -> list[Bytes]:
        return [rows.numpy()[None] for rows in self.block_rows()]

    def _kept(self, rows: Tensor) -> Tensor:
        return encode(rows) if self.dtype == torch.int8 else rows.to(self.dtype)

    def _read(self, rows: Tensor) -> Tensor:
        return decode(rows) if self.dtype == torch.int8 else rows

    def _allocate(self, layer: int, kept: LayerKV) -> None:
        for tensors, dim in ((self._keys, kept.key_dim), (self._values, kept.value_dim)):
            row = row_bytes(dim, self.dtype) // self.dtype.itemsize  # dim, or dim + 4 in int8
            shape = self.num_slots, kept.num_kv_heads, row
            tensors[layer] = lazy_zeros(shape, self.dtype, self.device)

"""Attention and KV stores in Triton, behind the interfaces of ``attention.backend``."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStep, AttentionStyle
from ostinato.runner.gpu.read_parts import Ints32, PartLimits, ReadParts, plan_parts
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv.kv_store import KVSpec, KVStore
from ostinato.runner.kv.plain_store import PlainKVStore
from ostinato.runner.settings import ReadOnce

_SHARE: dict[ReadOnce, bool | None] = {"auto": None, "always": True, "never": False}

_MERGE_HEADS = 16
"""Heads of a program that merges."""


def kernels() -> ModuleType:
    """Import the kernels, and Triton with them; see ``availability``."""
    from ostinato.runner.gpu import kernels

    return kernels


class TritonKVStore(PlainKVStore):
    """Keys and values in slots, written by a kernel."""

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store one layer's keys and values of some tokens; see ``KVStore``."""
        for rows, kept in zip((keys, values), self.layer(layer), strict=True):
            rows = _with_rows(rows)
            num_tokens, heads, dim = rows.shape
            tile = store_tokens(dim)
            with torch.cuda.device_of(rows):
                kernels().store[(-(-num_tokens // tile), heads)](
                    rows, kept, _scales(kept), slots, num_tokens, rows.stride(0), rows.stride(1),
                    HEADS=heads, DIM=dim, PAD=padded(dim), ROW=kept.shape[2], TOKENS=tile,
                    IS_CODES=kept.dtype == torch.int8, enable_fp_fusion=False,
                )  # fmt: skip

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values, shape (num_slots, num_kv_heads, row) each."""
        return self._keys[layer], self._values[layer]


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Reads blocks in place, shared ones once.

    Attributes:
        read_once: When blocks that sequences share are read once for all of them.
        same_bits: Whether a row's bits depend on its own sequence alone.
    """

    read_once: ReadOnce = "auto"
    same_bits: bool = False

    def new_store(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int] | None = None,
    ) -> KVStore:
        """Make a store; see ``AttentionBackend``."""
        return TritonKVStore(spec, num_blocks, block_size, dtype, device, layers)

    def start(self, metadata: AttentionMetadata, store: KVStore) -> "TritonStep":
        """Begin a step; see ``AttentionBackend``."""
        assert isinstance(store, TritonKVStore), "a store of its own"
        return TritonStep(metadata, store, self)


@dataclass(frozen=True, slots=True, eq=False)
class _DevicePlan:
    """A plan whose arrays are on the device."""

    parts: ReadParts
    limits: PartLimits
    arrays: tuple[Tensor, ...]  # as ``ReadParts.arrays``, int32


class TritonStep(AttentionStep):
    """One step, read by kernels."""

    store: TritonKVStore

    def __init__(
        self, metadata: AttentionMetadata, store: TritonKVStore, backend: TritonAttention
    ) -> None:
        """Bind a step; plans are computed lazily, once per kind of layer.

        Raises:
            ValueError: Blocks or slots are beyond the store: kernels would access other memory.
        """
        super().__init__(metadata, store)
        slots = metadata.slots, metadata.copy_sources, metadata.copy_targets
        for name, ids, count in (
            ("blocks", metadata.blocks, store.num_blocks + 1),
            *(("slots", numbers, store.num_slots) for numbers in slots),
        ):
            if len(ids) and not 0 <= ids.min() <= ids.max() < count:
                raise ValueError(f"{name} of a step are between 0 and {count - 1}")
        self._backend = backend
        self._plans: dict[tuple[int, int, int, int | None], _DevicePlan] = {}
        [self._blocks] = self._to_device(metadata.blocks.astype(np.int32))

    def read(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Attend; see ``AttentionStep``."""
        with torch.cuda.device_of(queries):  # kernels run on the current device of the thread
            return self._read(layer, _with_rows(queries), values, style)

    def _read(self, layer: int, queries: Tensor, values: Tensor, style: AttentionStyle) -> Tensor:
        (num_tokens, num_heads, key_dim), value_dim = queries.shape, values.shape[2]
        num_kv_heads = self.store.spec.layers[layer].num_kv_heads
        group, dim = num_heads // num_kv_heads, max(key_dim, value_dim)
        plan = self.plan(group, dim, queries.itemsize, style.window)
        tokens, positions, narrow, wide, merge_tokens, starts, partials = plan.arrays
        output = queries.new_empty(num_tokens, num_heads, value_dim)
        shape = (max(1, plan.parts.num_partials), num_heads)
        means = queries.new_empty(*shape, value_dim, dtype=torch.float32)
        log_sums = queries.new_empty(shape, dtype=torch.float32)
        sinks = output if style.sinks is None else style.sinks.detach().float().contiguous()
        kept_keys, kept_values = self.store.layer(layer)
        limits = plan.limits
        for parts, rows in ((wide, limits.wide_rows), (narrow, limits.narrow_rows)):
            if len(parts):
                kernels().attend[(len(parts), num_kv_heads)](
                    queries, kept_keys, _scales(kept_keys), kept_values, _scales(kept_values),
                    sinks, output, means, log_sums, tokens, positions, self._blocks, parts,
                    style.scale, style.soft_cap or 0.0, style.window or 0,
                    queries.stride(0), queries.stride(1),
                    KV_HEADS=num_kv_heads, GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim,
                    KEY_ROW=kept_keys.shape[2], VALUE_ROW=kept_values.shape[2],
                    BLOCK_SIZE=self.metadata.block_size,
                    IS_CODES=kept_keys.dtype == torch.int8, HAS_CAP=style.soft_cap is not None,
                    HAS_WINDOW=style.window is not None, HAS_SINKS=style.sinks is not None,
                    IS_WIDENED=queries.dtype == torch.bfloat16 and kernels().IS_INTERPRETED,
                    **tile_options(
                        rows, key_dim, value_dim, queries.dtype, limits.section_keys
                    ),
                )  # fmt: skip
        if len(merge_tokens):
            kernels().merge[(len(merge_tokens), -(-num_heads // _MERGE_HEADS))](
                means, log_sums, sinks, output, merge_tokens, starts, partials, num_heads,
                VALUE_DIM=value_dim, VALUE_PAD=padded(value_dim), HEADS=_MERGE_HEADS,
                HAS_SINKS=style.sinks is not None, **_rounding(limits.section_keys),
            )  # fmt: skip
        return output

    def plan(self, group: int, dim: int, itemsize: int, window: int | None) -> _DevicePlan:
        """Plan the reads of a kind of layers, and copy the plan to the device."""
        kind = group, dim, itemsize, window
        if kind not in self._plans:
            limits = PartLimits.of(group, dim, self._backend.same_bits, itemsize)
            share = _SHARE[self._backend.read_once]
            parts = plan_parts(self.metadata, limits, window, share)
            self._plans[kind] = _DevicePlan(parts, limits, self._to_device(*parts.arrays()))
        return self._plans[kind]

    def _to_device(self, *arrays: Ints32) -> tuple[Tensor, ...]:
        """Copy arrays to the device in one piece."""
        whole = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        copied = whole.to(self.metadata.device, non_blocking=True)
        pieces = copied.split([array.size for array in arrays])
        return tuple(p.view(array.shape) for p, array in zip(pieces, arrays, strict=True))


def padded(dim: int) -> int:
    """Return the elements of a row of a tile: a power of two, and what a product needs."""
    return max(16, 1 << (dim - 1).bit_length())


def store_tokens(dim: int) -> int:
    """Return the tokens of a program that stores: all its elements fit in registers."""
    return 2048 // padded(dim)


def tile_options(
    rows: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    section_keys: int | None,
    on_amd: bool = torch.version.hip is not None,
) -> dict[str, int | bool]:
    """Return how ``attend`` is compiled for tiles of so many rows.

    AMD's compiler needs smaller tiles of keys to keep all sums in registers.
    """
    dim = max(padded(key_dim), padded(value_dim))
    is_large = dim > 128 or section_keys is not None
    return {
        "KEY_PAD": padded(key_dim),
        "VALUE_PAD": padded(value_dim),
        "ROWS": rows,
        "TILE_KEYS": max(16, (32 if is_large else 64) // (dtype.itemsize // 2) // (1 + on_amd)),
        "SECTION": section_keys or 0,
        "num_warps": 8 if rows * dim * dtype.itemsize > 64 * 64 * 2 else 4,
        "num_stages": 2,
        **_rounding(section_keys),
    }


def _rounding(section_keys: int | None) -> dict[str, int | bool]:
    """Return the option that keeps products and sums apart where bits are promised."""
    return {"enable_fp_fusion": section_keys is None}


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, usually without a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scales(kept: Tensor) -> Tensor:
    """View a tensor of codes as floats, to read its scales; any other is not read."""
    return kept.view(torch.float32) if kept.dtype == torch.int8 else kept

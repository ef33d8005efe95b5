"""One step of attention, and its KV store, in Triton."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStep, AttentionStyle
from ostinato.runner.gpu.read_parts import PartLimits
from ostinato.runner.gpu.read_planner import LayerKind, ReadPlanner
from ostinato.runner.gpu.step_tables import ALIGNMENT, DeviceTables
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.kv.plain_store import PlainKVStore

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


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """A plan whose arrays are on the device.

    Attributes:
        limits: Sizes of its parts.
        num_partials: Number of partial results.
        arrays: As ``ReadParts.arrays``, int32.
    """

    limits: PartLimits
    num_partials: int
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GroupTables:
    """The tables of a step on the device, for one group of layers.

    Attributes:
        places: Slots to write, to copy from and to copy to, int64.
        blocks: All block tables, int32.
        plans: What each kind of layer reads; a kind that is missing is planned when it is met.
    """

    places: tuple[Tensor, Tensor, Tensor]
    blocks: Tensor
    plans: dict[LayerKind, DevicePlan]


def arrays_of(metadata: AttentionMetadata) -> tuple[npt.NDArray[Any], ...]:
    """Return what attention needs on the device besides plans: three kinds of slots, and blocks."""
    slots = metadata.slots, metadata.copy_sources, metadata.copy_targets
    return *slots, metadata.blocks.astype(np.int32)


def check_places(metadata: AttentionMetadata, store: KVStore) -> None:
    """Refuse blocks and slots beyond a store: kernels would access other memory.

    Raises:
        ValueError: One is out of range.
    """
    slots = metadata.slots, metadata.copy_sources, metadata.copy_targets
    for name, ids, count in (
        ("blocks", metadata.blocks, store.num_blocks + 1),
        *(("slots", numbers, store.num_slots) for numbers in slots),
    ):
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            raise ValueError(f"{name} of a step are between 0 and {count - 1}")


class TritonStep(AttentionStep):
    """One step, read by kernels.

    Attributes:
        tables: Its tables on the device.
    """

    store: TritonKVStore

    def __init__(
        self,
        metadata: AttentionMetadata,
        store: TritonKVStore,
        planner: ReadPlanner,
        tables: GroupTables | None = None,
    ) -> None:
        """Bind a step.

        Args:
            metadata: The step.
            store: Keys and values.
            planner: Plans what is read.
            tables: The step's tables, where they are on the device already, checked and perhaps
                padded; None copies them.

        Raises:
            ValueError: Blocks or slots are beyond the store.
        """
        super().__init__(metadata, store)
        self._planner = planner
        if tables is None:
            check_places(metadata, store)
            *places, blocks = _to_device(arrays_of(metadata), metadata.device)
            tables = GroupTables((places[0], places[1], places[2]), blocks, {})
        self.tables = tables
        self._places = tables.places

    def read(self, layer: int, queries: Tensor, style: AttentionStyle) -> Tensor:
        """Attend; see ``AttentionStep``."""
        with torch.cuda.device_of(queries):  # kernels run on the current device of the thread
            return self._read(layer, _with_rows(queries), style)

    def _read(self, layer: int, queries: Tensor, style: AttentionStyle) -> Tensor:
        kept, (num_tokens, num_heads, key_dim) = self.store.spec.layers[layer], queries.shape
        num_kv_heads, value_dim = kept.num_kv_heads, kept.value_dim
        group, dim = num_heads // num_kv_heads, max(key_dim, value_dim)
        plan = self.plan(LayerKind(group, dim, queries.itemsize, style.window))
        tokens, positions, narrow, wide, merge_tokens, starts, partials = plan.arrays
        output = queries.new_empty(num_tokens, num_heads, value_dim)
        shape = (max(1, plan.num_partials), num_heads)
        means = queries.new_empty(*shape, value_dim, dtype=torch.float32)
        log_sums = queries.new_empty(shape, dtype=torch.float32)
        sinks = output if style.sinks is None else style.sinks.detach().float().contiguous()
        kept_keys, kept_values = self.store.layer(layer)
        limits = plan.limits
        for parts, rows in ((wide, limits.wide_rows), (narrow, limits.narrow_rows)):
            if len(parts):
                kernels().attend[(len(parts), num_kv_heads)](
                    queries, kept_keys, _scales(kept_keys), kept_values, _scales(kept_values),
                    sinks, output, means, log_sums, tokens, positions, self.tables.blocks, parts,
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

    def plan(self, kind: LayerKind) -> DevicePlan:
        """Return what layers of a kind read; plans it, and copies it, if that is not done."""
        plans = self.tables.plans
        if kind not in plans:
            parts = self._planner.plan_kind(self.metadata, kind)
            arrays = _to_device(parts.arrays(), self.metadata.device)
            limits = self._planner.limits(kind)
            plans[kind] = DevicePlan(limits, parts.num_partials, arrays)
        return plans[kind]


def _to_device(arrays: Iterable[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy arrays to the device in one piece."""
    named = {str(index): array for index, array in enumerate(arrays)}
    num_bytes = sum(array.nbytes + ALIGNMENT for array in named.values())
    return tuple(DeviceTables(device, num_bytes).put(named).values())


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
    """Return how ``attend`` is compiled for tiles of ``rows`` rows.

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

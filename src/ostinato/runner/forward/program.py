"""Runs the operations of all layers in one call, or in one between calls in Python.

``native/include/ostinato_program.h`` is the other side. A program is built once, on buffers that
are reused: a list of operations, each with a record of where its numbers are. One call runs it; the
library's threads execute the operations together and wait only for each other's results. What
differs between steps (numbers of rows, addresses, how attention reads) is set before the call.
"""

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from torch import Tensor

from ostinato.runner.adapters.lora_updates import LoraProduct
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.embedding_and_rope import Lookup
from ostinato.runner.forward.ops import AddNorm, Gated, SplitHeads
from ostinato.runner.native.checks import address_of
from ostinato.runner.native.ctypes_api import Attention, Kv, Rows, int32s, int64s, pointers
from ostinato.runner.native.packed import Product


class Kind(enum.IntEnum):
    """``ost_operation_kind``."""

    ADD_NORM = 0
    HEADS = 1
    GATED = 2
    PRODUCT = 3
    WRITE = 4
    ATTEND = 5
    COPY = 6
    TAKE = 7
    GATED_PRODUCT = 8
    LORA = 9


_CHUNK_STEP = 32
"""The number of rows of a chunk is a multiple of this."""


class GatedProduct(ctypes.Structure):
    """``ost_gated_product``: the product that gives gates and ups, and ``silu(gate) * up``.

    Nothing else reads the product itself, so it is only written where it has to be.
    """

    _fields_ = (("product", Product), ("gated", Gated))


class Write(ctypes.Structure):
    """``ost_write``: store one layer's keys and values of the step's tokens."""

    _fields_ = (
        ("kv", Kv),
        ("keys", Rows),
        ("values", Rows),
        *pointers("slots"),
        *int64s("num_rows"),
    )


class Copies(ctypes.Structure):
    """``ost_copies``: slots that a step copies in every layer."""

    _fields_ = (*pointers("sources", "targets"), *int64s("num_slots"))


class Copy(ctypes.Structure):
    """``ost_layer_copy``: one layer's keys and values, and the address of the step's copies."""

    _fields_ = (("kv", Kv), *pointers("step"))


class Attend(ctypes.Structure):
    """``ost_layer_attention``: a layer's arguments, and the address of those of the step."""

    _fields_ = (("layer", Attention), *pointers("step"))


class Take(ctypes.Structure):
    """``ost_take``: copy rows of a table; each step sets the table and the rows."""

    _fields_ = (
        *pointers("table"),
        *int64s("table_stride"),
        *pointers("output"),
        *int64s("output_stride"),
        *pointers("rows"),
        *int64s("num_rows", "width"),
    )

    @classmethod
    def into(cls, output: Tensor) -> "Take":
        """Copy rows into ``output``, a buffer of contiguous rows."""
        assert output.stride(1) == 1 and output.device.type == "cpu", "contiguous rows, on a CPU"
        size = output.element_size()
        return cls(
            output=output.data_ptr(),
            output_stride=output.stride(0) * size,
            width=output.shape[1] * size,
        )

    def from_table(self, table: Tensor) -> None:
        """Set the table, which the caller keeps alive."""
        size = table.element_size()
        assert table.stride(1) == 1, "contiguous rows"
        if table.shape[1] * size != self.width:
            raise ValueError(
                f"a table has rows of {table.shape[1]} numbers, not of {self.width // size}"
            )
        self.table, self.table_stride = table.data_ptr(), table.stride(0) * size

    def look_up(self, lookup: Lookup) -> None:
        """Set the table and its rows for this step; the caller keeps them alive."""
        self.from_table(lookup.table)
        self.rows = address_of(lookup.places)


_KINDS: dict[type[Any], Kind] = {
    AddNorm: Kind.ADD_NORM,
    SplitHeads: Kind.HEADS,
    Gated: Kind.GATED,
    Product: Kind.PRODUCT,
    GatedProduct: Kind.GATED_PRODUCT,
    Write: Kind.WRITE,
    Attend: Kind.ATTEND,
    Copy: Kind.COPY,
    Take: Kind.TAKE,
    LoraProduct: Kind.LORA,
}

Record = ctypes.Structure
"""One of the keys of ``_KINDS``."""


class _Operation(ctypes.Structure):
    _fields_ = (*pointers("record"), *int32s("kind", "rows"))


class _Operations(ctypes.Structure):
    """``ost_program``."""

    _fields_ = (
        *pointers("operations"),
        *int64s("num_operations", "rows_per_chunk"),
        *pointers("arena"),
        *int64s("arena_bytes"),
    )


@dataclass(frozen=True, slots=True)
class PythonCall:
    """An operation that is computed in Python, on all rows at once.

    Attributes:
        run: Computes so many rows.
    """

    run: Callable[[int], None]


Step = Record | PythonCall


class Program:
    """Operations in the order in which they are run."""

    def __init__(
        self, library: ctypes.CDLL, operations: Sequence[tuple[Step, bool]], arena: Arena
    ) -> None:
        """List the operations.

        Args:
            library: Runs them.
            operations: Each with whether it is on the rows whose logits are computed, or all rows
                of a step. Records have the addresses of the first chunk's rows, and were checked
                when they were made; the caller keeps what they point to alive. Between a call in
                Python and other operations nothing is passed in the arena.
            arena: The buffers.
        """
        self._library, self._arena = library, arena
        self._kept: list[object] = [operation for operation, _ in operations]
        self._runs: list[tuple[_Operations, bool] | tuple[PythonCall, bool]] = []
        is_call = lambda each: isinstance(each[0], PythonCall)  # noqa: E731
        for in_python, group in groupby(operations, key=is_call):
            if in_python:
                self._runs += [
                    (cast(PythonCall, call), on_logit_rows) for call, on_logit_rows in group
                ]
            else:
                self._runs.append(
                    (self._listed(cast(list[tuple[Record, bool]], list(group))), False)
                )

    def _listed(self, operations: list[tuple[Record, bool]]) -> _Operations:
        listed = (_Operation * len(operations))(
            *(
                _Operation(ctypes.addressof(record), _KINDS[type(record)], on_logit_rows)
                for record, on_logit_rows in operations
            )
        )
        self._kept.append(listed)
        return _Operations(
            ctypes.addressof(listed),
            len(operations),
            -(-self._arena.rows_per_chunk // _CHUNK_STEP) * _CHUNK_STEP,
            self._arena.address,
            self._arena.num_bytes,
        )

    def run(self, num_rows: int, num_logit_rows: int, num_threads: int) -> None:
        """Run all operations on some rows, the later ones on those whose logits are computed."""
        assert 0 <= num_logit_rows <= num_rows, (num_logit_rows, num_rows)
        assert 0 < num_rows <= self._arena.max_rows, num_rows
        for part, on_logit_rows in self._runs:
            if isinstance(part, PythonCall):
                count = num_logit_rows if on_logit_rows else num_rows
                if count:
                    part.run(count)
            else:
                program = ctypes.byref(part)
                self._library.ost_run_program(program, num_rows, num_logit_rows, num_threads)

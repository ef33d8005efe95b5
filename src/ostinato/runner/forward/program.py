"""Runs the operations of all layers in one call.

``native/include/ostinato_program.h`` is the other side. A program is built once, on buffers that
are reused: a list of operations, each with a record of where its numbers are. One call runs it; the
library's threads execute the operations together and wait only for each other's results. What
differs between steps (numbers of rows, addresses, how attention reads) is set before the call.
"""

import ctypes
import enum
from typing import Any

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
    _fields_ = (*pointers("record"), *int32s("kind", "on_wanted"))


class _Operations(ctypes.Structure):
    """``ost_program``."""

    _fields_ = (
        *pointers("operations"),
        *int64s("num_operations", "rows_per_chunk"),
        *pointers("arena"),
        *int64s("arena_bytes"),
    )


class Program:
    """Operations in the order in which they are run."""

    def __init__(
        self,
        library: ctypes.CDLL,
        records: list[Record],
        on_wanted: list[Record],
        arena: Arena,
    ) -> None:
        """List the operations.

        Args:
            library: Runs them.
            records: Run on all rows of a step. Each has the addresses of the first chunk's rows,
                and was checked when it was made; the caller keeps what they point to alive.
            on_wanted: Run after those, on the rows whose logits are wanted.
            arena: The buffers.
        """
        self._library = library
        self._records = [*records, *on_wanted]
        operations = [
            _Operation(ctypes.addressof(record), _KINDS[type(record)], index >= len(records))
            for index, record in enumerate(self._records)
        ]
        self._operations = (_Operation * len(operations))(*operations)
        self._arena = arena
        self._program = _Operations(
            ctypes.addressof(self._operations),
            len(operations),
            -(-arena.rows_per_chunk // _CHUNK_STEP) * _CHUNK_STEP,
            arena.address,
            arena.num_bytes,
        )

    def run(self, num_rows: int, num_wanted: int, num_threads: int) -> None:
        """Run all operations on some rows, the later ones on those that are wanted."""
        assert 0 <= num_wanted <= num_rows, (num_wanted, num_rows)
        assert 0 < num_rows <= self._arena.most_rows, num_rows
        program = ctypes.byref(self._program)
        self._library.ost_run_program(program, num_rows, num_wanted, num_threads)

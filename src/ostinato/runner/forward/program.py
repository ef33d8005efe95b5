"""Runs the operations of all layers in one call.

``native/include/ostinato_program.h`` is the other side. A program is laid down once, on buffers
that stay: operation after operation, each with a record that says where its numbers are. To run it
takes one call, whatever it is made of; the library's threads go through it together and wait for
nothing but each other's results. What a step brings of its own, its numbers of rows, where they are
taken from and how its attention is read, is filled in before the call.
"""

import ctypes
import enum
from typing import Any

from torch import Tensor

from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.embedding_and_rope import Lookup
from ostinato.runner.forward.records import AddNorm, Gated, TakeApart
from ostinato.runner.lora_records import LoraProduct
from ostinato.runner.native.checks import address_of
from ostinato.runner.native.ctypes_api import Attention, Kv, Rows
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
"""What the rows of a chunk are a multiple of."""


class GatedProduct(ctypes.Structure):
    """``ost_gated_product``: gates and ups of one product, and what the gates let through.

    Nothing else reads the product itself: where it need not be written, it is not.
    """

    _fields_ = (("product", Product), ("gated", Gated))


class Write(ctypes.Structure):
    """``ost_write``: store one layer's keys and values of the step's tokens."""

    _fields_ = (
        ("kv", Kv),
        ("keys", Rows),
        ("values", Rows),
        ("slots", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
    )


class Copies(ctypes.Structure):
    """``ost_copies``: slots that a step copies in every layer."""

    _fields_ = (
        ("sources", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
    )


class Copy(ctypes.Structure):
    """``ost_layer_copy``: one layer's keys and values, and where the step's copies are found."""

    _fields_ = (("kv", Kv), ("step", ctypes.c_void_p))


class Attend(ctypes.Structure):
    """``ost_layer_attention``: what is the layer's own, and where what is the step's is found."""

    _fields_ = (("layer", Attention), ("step", ctypes.c_void_p))


class Take(ctypes.Structure):
    """``ost_take``: rows of a table; which, and of which table, a step says."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )

    @classmethod
    def into(cls, output: Tensor) -> "Take":
        """Lay down where rows are put; ``output`` is a buffer of rows side by side."""
        assert output.stride(1) == 1 and output.device.type == "cpu", "rows side by side, on a CPU"
        size = output.element_size()
        return cls(
            output=output.data_ptr(),
            output_stride=output.stride(0) * size,
            width=output.shape[1] * size,
        )

    def from_table(self, table: Tensor) -> None:
        """Say which table rows are taken from; the caller keeps it alive."""
        size = table.element_size()
        assert table.shape[1] * size == self.width and table.stride(1) == 1, table.shape
        self.table, self.table_stride = table.data_ptr(), table.stride(0) * size

    def look_up(self, lookup: Lookup) -> None:
        """Say what is taken in this step; the caller keeps it alive."""
        self.from_table(lookup.table)
        self.rows = address_of(lookup.places)


Record = (
    AddNorm
    | TakeApart
    | Gated
    | Product
    | GatedProduct
    | Write
    | Copy
    | Attend
    | Take
    | LoraProduct
)

_KINDS: dict[type[Any], Kind] = {
    AddNorm: Kind.ADD_NORM,
    TakeApart: Kind.HEADS,
    Gated: Kind.GATED,
    Product: Kind.PRODUCT,
    GatedProduct: Kind.GATED_PRODUCT,
    Write: Kind.WRITE,
    Attend: Kind.ATTEND,
    Copy: Kind.COPY,
    Take: Kind.TAKE,
    LoraProduct: Kind.LORA,
}


class _Operation(ctypes.Structure):
    _fields_ = (
        ("record", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("on_wanted", ctypes.c_int32),
    )


class _Laid(ctypes.Structure):
    """``ost_program``."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        ("num_operations", ctypes.c_int64),
        ("rows_per_chunk", ctypes.c_int64),
        ("arena", ctypes.c_void_p),
        ("arena_bytes", ctypes.c_int64),
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
        """Lay operations down.

        Args:
            library: Runs them.
            records: Run on all rows of a step. Each says where the first chunk's rows are, and was
                checked when it was made; the caller keeps what they point to alive.
            on_wanted: Run then, likewise, on as many rows as have their logits wanted.
            arena: Where they are.
        """
        self._run = library.ost_run_program
        self._run.restype = None
        self._run.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int32,
        )
        self._records = [*records, *on_wanted]
        operations = [
            _Operation(ctypes.addressof(record), _KINDS[type(record)], index >= len(records))
            for index, record in enumerate(self._records)
        ]
        self._operations = (_Operation * len(operations))(*operations)
        self._arena = arena
        self._laid = _Laid(
            ctypes.addressof(self._operations),
            len(operations),
            -(-arena.rows_per_chunk // _CHUNK_STEP) * _CHUNK_STEP,
            arena.address,
            arena.num_bytes,
        )

    def __len__(self) -> int:
        return len(self._records)

    def run(self, num_rows: int, num_wanted: int, num_threads: int) -> None:
        """Run all operations on some rows, the later ones on those that are wanted."""
        assert 0 <= num_wanted <= num_rows, (num_wanted, num_rows)
        assert 0 < num_rows <= self._arena.most_rows, num_rows
        self._run(ctypes.byref(self._laid), num_rows, num_wanted, num_threads)

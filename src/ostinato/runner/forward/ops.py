"""Calls the operations between the products of a layer.

A call costs some microseconds, most of which go into checking what is handed over.
"""

import ctypes

from torch import Tensor

from ostinato.runner.forward.layer_specs import Heads, HeadShape, Norm, RopeAngles
from ostinato.runner.forward.records import AddNorm, Gated, TakeApart


class NativeOps:
    """The operations of the native library; all tensors on the CPU, of one dtype of ``DTYPES``.

    Attributes:
        library: Where they are.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Find the functions."""
        self.library = library
        self._add_norm = library.ost_ops_add_norm
        self._heads = library.ost_ops_heads
        self._gated = library.ost_ops_gated
        for function in (self._add_norm, self._heads, self._gated):
            function.restype = None
            function.argtypes = (ctypes.c_void_p,)

    def add_norm(self, residual: Tensor, addend: Tensor | None, norm: Norm, output: Tensor) -> None:
        """Add to a residual stream, and norm it.

        Args:
            residual: Shape (num_rows, width).
            addend: What is added to it first, of that shape; None adds nothing.
            norm: A norm of that width.
            output: Gets the normed rows; of that shape.

        Effects: writes ``residual`` where there is an addend, and ``output``.
        """
        self._add_norm(ctypes.byref(AddNorm.of(residual, addend, norm, output)))

    def heads(self, projected: Tensor, shape: HeadShape, turns: RopeAngles, heads: Heads) -> None:
        """Take projected rows apart, norm queries and keys, and turn them by their position.

        Args:
            projected: Queries, keys and values of each row, shape (num_rows, num_projected).
            shape: How they are cut.
            turns: Angles of these rows.
            heads: Gets them; ``num_rows`` rows each.

        Effects: writes ``heads``.
        """
        self._heads(ctypes.byref(TakeApart.of(projected, shape, turns, heads)))

    def gated(self, gate_up: Tensor, output: Tensor) -> None:
        """Multiply ``silu(gate)`` with ``up`` (SwiGLU; Shazeer, arXiv 2002.05202).

        Args:
            gate_up: Both beside each other, shape (num_rows, 2 * width).
            output: Gets the product, shape (num_rows, width).

        Effects: writes ``output``.
        """
        self._gated(ctypes.byref(Gated.of(gate_up, output)))

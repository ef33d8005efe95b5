"""How are a few rows multiplied with a packed weight as fast as it can be read?

A decode step reads every weight once and computes next to nothing with it, so it takes as long as
the reading. The native library streams oneDNN's own tiles, by threads that ask ahead; nothing is
kept twice. With AMX it multiplies many rows as well, in blocks that stay in the processor's cache
while tiles pass by, a quarter to a half faster than oneDNN.

Which order the tiles have is oneDNN's affair, so it is looked at for every weight: one that lies
otherwise, or has sizes that tiles do not divide, is left to oneDNN.

    tiles of bfloat16: [num_outputs / 32][num_inputs / 2][32][2]
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.forward.records import Matrix
from ostinato.runner.native.library import library

_OUTPUTS = 32
_INPUTS = 32
_PLACES = 4096
"""How many numbers of a weight are looked up among its tiles."""

_CROWDED = 1024
"""Rows so many numbers apart, or a multiple of that, share few places of the processor's caches."""

_LINE = 32
"""Numbers by which they are moved apart."""


class Product(ctypes.Structure):
    """``ost_product``: multiply rows with a weight."""

    _fields_ = (
        ("inputs", Matrix),
        ("outputs", Matrix),
        ("tiles", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class FewRows:
    """Multiplies rows with one packed weight; without AMX only a few."""

    def __init__(self, native: ctypes.CDLL, tiles: Tensor, num_outputs: int, num_inputs: int):
        """Take a weight's tiles; use ``for_tiles``, which looks at them first."""
        self._most = native.ost_ops_product_rows  # asked each time: instruction sets may change
        self._multiply = native.ost_ops_product
        self._multiply.restype = None
        self._multiply.argtypes = (ctypes.c_void_p,)
        self._tiles = tiles  # their memory is read as long as this lives
        self._address = _address(tiles)
        self._num_outputs, self._num_inputs = num_outputs, num_inputs

    def takes(self, num_rows: int) -> bool:
        """Whether the instruction set in use does that many rows better than oneDNN."""
        return 0 < num_rows <= int(self._most())

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``rows @ weight.T + bias``, a fresh tensor; sums are in float32.

        Each row's numbers are side by side, but there may be a gap between rows.

        Args:
            rows: As many as it ``takes``, shape (num_rows, num_inputs), bfloat16.
            bias: Shape (num_outputs,), bfloat16.
        """
        assert self.takes(rows.shape[0]), rows.shape
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        gap = 0 if self._num_outputs % _CROWDED else _LINE
        outputs = rows.new_empty(rows.shape[0], self._num_outputs + gap)[:, : self._num_outputs]
        bias = None if bias is None else bias.contiguous()
        self._multiply(ctypes.byref(self.record(rows, bias, outputs)))
        return outputs

    def record(self, rows: Tensor, bias: Tensor | None, outputs: Tensor) -> Product:
        """Check and describe a product, which points into the tensors and into this weight.

        Args:
            rows: Shape (num_rows, num_inputs), bfloat16, each row's numbers side by side.
            bias: Shape (num_outputs,), contiguous, bfloat16.
            outputs: Gets it, shape (num_rows, num_outputs); like ``rows``.
        """
        num_rows = rows.shape[0]
        assert rows.shape == (num_rows, self._num_inputs), rows.shape
        assert outputs.shape == (num_rows, self._num_outputs), outputs.shape
        for tensor in (rows, outputs):
            assert tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu", tensor.dtype
            assert tensor.stride(1) == 1, "rows side by side"
        if bias is not None:
            assert bias.shape == (self._num_outputs,) and bias.dtype == rows.dtype, bias.shape
            assert bias.is_contiguous() and bias.device.type == "cpu", "a plain vector"
        return Product(
            Matrix.of(rows),
            Matrix.of(outputs),
            self._address,
            None if bias is None else bias.data_ptr(),
            num_rows,
            self._num_inputs,
            self._num_outputs,
            torch.get_num_threads(),
        )


def for_tiles(tiles: Tensor, plain: Tensor) -> FewRows | None:
    """Return who multiplies rows with a packed weight; None leaves all to oneDNN.

    Args:
        tiles: The weight as oneDNN packed it.
        plain: The same weight, shape (num_outputs, num_inputs), contiguous.
    """
    native = library()
    num_outputs, num_inputs = plain.shape
    if (
        native is None
        or plain.dtype != torch.bfloat16
        or plain.numel() == 0
        or num_outputs % _OUTPUTS
        or num_inputs % _INPUTS
        or not native.ost_ops_product_rows()
        or not _lie_as_expected(tiles, plain)
    ):
        return None
    return FewRows(native, tiles, num_outputs, num_inputs)


def _lie_as_expected(tiles: Tensor, plain: Tensor) -> bool:
    """Whether a weight's numbers are found among its tiles, where they should be."""
    if torch.ops.mkldnn._nbytes(tiles) != plain.nbytes:
        return False
    num_inputs = plain.shape[1]
    words = (ctypes.c_uint16 * plain.numel()).from_address(_address(tiles))
    found = np.frombuffer(memoryview(words), dtype=np.uint16)
    place = np.random.default_rng(0).integers(0, plain.numel(), _PLACES)
    place[:2] = 0, plain.numel() - 1
    output, column = place // num_inputs, place % num_inputs
    tile = (output // _OUTPUTS) * (num_inputs // 2) + column // 2
    expected = (tile * _OUTPUTS + output % _OUTPUTS) * 2 + column % 2
    wanted = plain.view(torch.uint16).reshape(-1).numpy()
    return bool((found[expected] == wanted[place]).all())


def _address(tiles: Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(tiles))

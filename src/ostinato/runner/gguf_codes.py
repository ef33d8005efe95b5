"""Blocks of a GGUF file as codes of ours.

A block has codes of some bits with a scale, and often a minimum, for 32 inputs. So most formats
become codes without any loss, and without a dequantized weight::

    Q4_0, Q4_1, Q4_K                4 bits; with minima but for Q4_0
    Q5_0, Q5_1, Q5_K, Q8_0          8 bits; with minima where the file has them
    Q2_K, Q3_K, Q6_K and others     8 bits in groups of 32 inputs, the nearest: their groups have
                                    16 inputs, or their codes are entries of a table

Source: the layouts are those of ``ggml-common.h`` in llama.cpp.
"""

from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.runner.forward.codes import CodeFormat, Codes, encode

PLAIN_KINDS = {"F32", "F16", "BF16", "F64"}
_GROUP = 32
NEAREST = CodeFormat(bits=8, group_size=_GROUP)
_SLICE_NUMBERS = 2**22

Blocks = NDArray[np.uint8]
"""Shape (num_blocks, bytes of a block)."""
Numbers = NDArray[Any]
"""Of groups, shape (num_blocks, groups of a block), float16 or float32."""


def codes_of_rows(data: Blocks, kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> Codes:
    """Return the codes of a weight.

    Args:
        data: Its rows, shape (num_outputs, bytes of a row).
        kind: Format of the blocks, none of ``PLAIN_KINDS``.
        dtype: Compute dtype; the nearest codes are those of the numbers in it.
    """
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    step = max(1, _SLICE_NUMBERS * num_bytes // (data.shape[1] * num_numbers))
    parts = [_slice_codes(data[i : i + step], kind, dtype) for i in range(0, len(data), step)]
    if len(parts) == 1:
        return parts[0]
    codes = (torch.cat([part.codes for part in parts]), torch.cat([p.scales for p in parts]))
    minima = [part.minima for part in parts if part.minima is not None]
    return Codes(parts[0].format, *codes, torch.cat(minima) if minima else None)


def dequantized(data: Blocks, kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows, converted slice by slice."""
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    width = data.shape[1] // num_bytes * num_numbers
    numbers = torch.empty(len(data), width, dtype=dtype)
    step = max(1, _SLICE_NUMBERS // width)
    for first in range(0, len(data), step):
        part = gguf.dequantize(data[first : first + step], kind)
        numbers[first : first + step] = torch.from_numpy(np.ascontiguousarray(part))
    return numbers


def _slice_codes(data: Blocks, kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> Codes:
    blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    scaled = _scales(kind.name, blocks)
    if scaled is None:
        return encode(dequantized(data, kind, dtype), NEAREST)
    scales, minima = (None if part is None else _by_rows(part, len(data)) for part in scaled)
    assert scales is not None
    format = CodeFormat(4 if kind.name.startswith("Q4") else 8, _GROUP, minima is not None)
    return Codes(format, _by_rows(_codes(kind.name, blocks), len(data)), scales, minima)


def _codes(kind: str, blocks: Blocks) -> NDArray[Any]:
    """Return the codes of blocks whose groups have 32 inputs."""
    if kind == "Q8_0":
        return blocks[:, 2:].view(np.int8)
    if kind in ("Q4_K", "Q5_K"):
        codes = _nibbles(blocks[:, -128:], 32)
        if kind == "Q5_K":
            bits = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
            codes |= (bits.transpose(0, 2, 1) << 4).reshape(codes.shape)
        return codes if kind == "Q4_K" else codes.view(np.int8)
    codes = _nibbles(blocks[:, -16:], 16)
    if kind in ("Q4_0", "Q4_1"):
        return codes
    high = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
    signed: NDArray[np.int8] = np.bitwise_or(codes, high << 4).view(np.int8)
    return signed if kind == "Q5_1" else signed - np.int8(16)


def _nibbles(packed: Blocks, width: int) -> Blocks:
    """Return the low halves of each ``width`` bytes, then their high halves."""
    both = np.empty((len(packed), packed.shape[1] // width, 2, width), np.uint8)
    halves = packed.reshape(len(packed), -1, width)
    np.bitwise_and(halves, 15, out=both[:, :, 0])
    np.right_shift(halves, 4, out=both[:, :, 1])
    return both.reshape(len(packed), -1)


def _scales(kind: str, blocks: Blocks) -> tuple[Numbers, Numbers | None] | None:
    """Return scales and minima of blocks; None if they are not for 32 inputs."""
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        return blocks[:, :2].copy().view(np.float16), None
    if kind in ("Q4_1", "Q5_1"):
        both = blocks[:, :4].copy().view(np.float16)
        return both[:, :1], both[:, 1:]
    if kind in ("Q4_K", "Q5_K"):
        both = blocks[:, :4].copy().view(np.float16).astype(np.float32)
        of_groups = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].copy())
        scales, minima = (part.astype(np.float32) for part in of_groups)
        return both[:, :1] * scales, -(both[:, 1:] * minima)
    return None


def _by_rows(of_blocks: NDArray[Any], num_rows: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(of_blocks).reshape(num_rows, -1))

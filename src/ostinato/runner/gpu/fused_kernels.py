"""Kernels between and around products, in Triton: norms, heads, gates, and products of codes.

Rows are rounded where the modules of ``transformers`` round them, so that the fused forward gives
their logits up to the order of sums. ``multiply`` has fixed tiles and adds its inputs in one order:
a row's product has the same bits alone and in a batch of any size. Its weights are numbers, codes
of 8 bits, or codes of 4 bits, two in a byte, the lower input in the lower half.
"""

import triton
import triton.language as tl

from ostinato.runner.gpu.kernels import _operand

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)
RELU_SQUARED = tl.constexpr(4)
HALF_SQRT = tl.constexpr(0.7071067811865476)
GELU_SCALE = tl.constexpr(0.7978845608028654)


@triton.jit
def _rounded(values, like):
    """Round to the format of a tensor, and widen again."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _weighed(
    row, inside, weight, bias, places, offset, like,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Multiply normed numbers by their weights, and round."""
    if IS_ROUNDED:
        row = _rounded(row, like)
    if HAS_WEIGHT:
        row *= tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + offset
    if HAS_BIAS:
        row += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    return _rounded(row, like)


@triton.jit
def _normed(
    row, inside, width, weight, bias, places, epsilon, offset, like,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CENTERED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Return a normed row, rounded, as float32; ``places`` are those of its weights."""
    if IS_CENTERED:
        row = tl.where(inside, row - tl.sum(row, 0) / width, 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / width + epsilon)
    return _weighed(row, inside, weight, bias, places, offset, like, HAS_WEIGHT, HAS_BIAS,
                    IS_ROUNDED)  # fmt: skip


@triton.jit
def add_norm(
    stream, addend, scale, output, weight, bias, epsilon, offset, width,
    stream_row, addend_row, output_row,
    PAD: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CENTERED: tl.constexpr, IS_ROUNDED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Add to the residual stream in place, and norm it; grid (num_rows,)."""
    number, dims = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    inside = dims < width
    row = tl.load(stream + number * stream_row + dims, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        more = tl.load(addend + number * addend_row + dims, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALE:
            more = _rounded(more * scale, stream)
        row = _rounded(row + more, stream)
        tl.store(stream + number * stream_row + dims, row.to(stream.dtype.element_ty), mask=inside)
    if HAS_NORM:
        row = _normed(
            row, inside, width, weight, bias, dims, epsilon, offset, output,
            HAS_WEIGHT, HAS_BIAS, IS_CENTERED, IS_ROUNDED,
        )  # fmt: skip
        tl.store(output + number * output_row + dims, row.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _turned(row, partner, cosine, sine, like, ARE_ROUNDED: tl.constexpr):
    """Turn numbers by their angles; ``sine`` has the sign of the partner."""
    one, other = row * cosine, partner * sine
    if ARE_ROUNDED:
        one, other = _rounded(one, like), _rounded(other, like)
    return _rounded(one + other, like)


@triton.jit
def turn_heads(
    projected, cosines, sines, output, weight, bias, epsilon, offset,
    projected_row, head_stride, first, angle_row, angle_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROPE_DIM: tl.constexpr,
    IS_HALVES: tl.constexpr, ARE_ROUNDED: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_NORM_LAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CENTERED: tl.constexpr, IS_ROUNDED: tl.constexpr, IS_BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Norm heads of projected rows, and turn them by their position; grid (num_rows, NUM_HEADS)."""
    number, head, dims = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAD)
    inside, turns = dims < DIM, dims < ROPE_DIM
    if IS_HALVES:
        is_first, pair = dims < ROPE_DIM // 2, dims % (ROPE_DIM // 2)
        other = tl.where(is_first, dims + ROPE_DIM // 2, dims - ROPE_DIM // 2)
    else:
        is_first, pair = dims % 2 == 0, dims // 2
        other = tl.where(is_first, dims + 1, dims - 1)
    other = tl.where(turns, other, dims)
    source = projected + number * projected_row + first + head * head_stride
    row = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
    start = head * DIM if IS_BY_HEAD else 0
    if HAS_NORM and not IS_NORM_LAST:
        # Rows and partners hold the same numbers, in another order: their sums may differ in the
        # last bit, so that the partners' are those of the rows.
        size = row
        if IS_CENTERED:
            size = tl.where(inside, row - tl.sum(row, 0) / DIM, 0.0)
            partner = tl.where(inside, partner - tl.sum(row, 0) / DIM, 0.0)
        factor = tl.rsqrt(tl.sum(size * size, 0) / DIM + epsilon)
        row = _weighed(size * factor, inside, weight, bias, start + dims, offset, output,
                       HAS_WEIGHT, HAS_BIAS, IS_ROUNDED)  # fmt: skip
        partner = _weighed(partner * factor, inside, weight, bias, start + other, offset, output,
                           HAS_WEIGHT, HAS_BIAS, IS_ROUNDED)  # fmt: skip
    if ROPE_DIM > 0:
        angle = number * angle_row + pair * angle_stride
        cosine = tl.load(cosines + angle, mask=turns, other=1.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=turns, other=0.0).to(tl.float32)
        sine = tl.where(is_first, -sine, sine)
        row = tl.where(turns, _turned(row, partner, cosine, sine, output, ARE_ROUNDED), row)
    if HAS_NORM and IS_NORM_LAST:
        row = _normed(
            row, inside, DIM, weight, bias, start + dims, epsilon, offset, output,
            HAS_WEIGHT, HAS_BIAS, IS_CENTERED, IS_ROUNDED,
        )  # fmt: skip
    place = (number * NUM_HEADS + head) * DIM
    tl.store(output + place + dims, row.to(output.dtype.element_ty), mask=inside)


@triton.jit
def activate(
    projected, output, width, projected_row, output_row,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Open gates, and multiply them by ups; grid (num_rows, tiles of the width)."""
    number, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, source = dims < width, projected + number * projected_row
    gate = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    if KIND == SILU:
        gate = gate * tl.sigmoid(gate)
    elif KIND == GELU:
        gate = gate * 0.5 * (1.0 + tl.erf(gate * HALF_SQRT))
    elif KIND == GELU_TANH:
        inner = GELU_SCALE * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(inner))
    else:
        gate = tl.maximum(gate, 0.0)
    gate = _rounded(gate, output)
    if KIND == RELU_SQUARED:
        gate = _rounded(gate * gate, output)
    if HAS_UP:
        gate *= tl.load(source + width + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + number * output_row + dims, gate.to(output.dtype.element_ty), mask=inside)


@triton.jit
def multiply(
    rows, weight, scales, minima, zeros, bias, output,
    num_rows, num_outputs, num_inputs, num_groups, row_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    """Multiply rows by a weight; grid (output tiles, row tiles). ``BITS`` 0 are plain numbers."""
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_out, is_row = out < num_outputs, row < num_rows
    start, place = out.to(tl.int64) * num_inputs, row.to(tl.int64) * row_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        real = is_input[:, None] & is_out[None, :]
        x = tl.load(
            rows + place[:, None] + inputs[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        if BITS == 0:
            numbers = tl.load(weight + start[None, :] + inputs[:, None], mask=real, other=0.0)
        else:
            at = start[None, :] + inputs[:, None]
            if BITS == 4:
                codes = tl.load(weight + at // 2, mask=real, other=0).to(tl.int32)
                codes = (codes >> (4 * (at % 2)).to(tl.int32)) & 15
            else:
                codes = tl.load(weight + at, mask=real, other=0).to(tl.int32)
            group = out.to(tl.int64)[None, :] * num_groups + (inputs // GROUP)[:, None]
            scale = tl.load(scales + group, mask=real, other=0.0).to(tl.float32)
            if HAS_MINIMA:
                minimum = tl.load(minima + group, mask=real, other=0.0).to(tl.float32)
                numbers = codes.to(tl.float32) * scale + minimum
            elif HAS_ZEROS:
                zero = tl.load(zeros + group, mask=real, other=0).to(tl.int32)
                numbers = (codes - zero).to(tl.float32) * scale
            else:
                numbers = (codes - ZERO).to(tl.float32) * scale
        x, numbers = _operand(x, x, IS_WIDENED), _operand(numbers, x, IS_WIDENED)
        total += tl.dot(x, numbers, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    target = output + row.to(tl.int64)[:, None] * num_outputs + out[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


IS_INTERPRETED = not isinstance(multiply, triton.JITFunction)
"""Whether the kernels run in Triton's interpreter, on a CPU."""

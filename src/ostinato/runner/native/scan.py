"""Many tokens through the gated delta rule, Mamba 2 or a short convolution, by chunks of 64.

In torch each product, decay and mask of a scan is a pass over memory, and a convolution wants its
channels in rows. Here a head's chunk stays in cache, and inputs are read where projections left
them: in rows of tokens.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES, floats, int32s, int64s, pointers
from ostinato.runner.native.library import library
from ostinato.runner.native.packed import Matrix

MAX_TAPS = 16
"""Inputs of a convolution's output; ``kMostTaps``."""


class ScanRecord(ctypes.Structure):
    """``ost_scan``."""

    _fields_ = (
        *pointers("states"),
        *((name, Matrix) for name in ("queries", "keys", "values", "outputs")),
        *pointers("gates", "betas", "skips"),
        *int64s("num_rows", "gate_stride"),
        *int32s("num_tokens", "num_heads", "num_key_heads", "key_dim", "value_dim"),
        *int32s("dtype", "output_dtype", "is_delta", "has_norms", "has_values_first"),
        *int32s("has_steps"),
        *floats("query_scale", "min_step", "max_step"),
        *int32s("num_threads"),
    )


class _Convolution(ctypes.Structure):
    """``ost_convolution``."""

    _fields_ = (
        ("inputs", Matrix),
        *pointers("earlier", "weights", "bias"),
        ("outputs", Matrix),
        *int64s("num_rows"),
        *int32s("num_tokens", "width", "num_taps", "dtype", "has_silu", "num_threads"),
    )


def native_for(*inputs: Tensor) -> ctypes.CDLL | None:
    """Return the library if it computes with inputs of these formats: all one, of 16 or 32 bits."""
    first = inputs[0]
    on_cpu = all(each.device.type == "cpu" and each.dtype == first.dtype for each in inputs)
    return library() if on_cpu and first.dtype in (torch.float32, torch.bfloat16) else None


@dataclass(frozen=True, slots=True)
class Scan:
    """What of a scan is the model's.

    Attributes:
        is_delta: Whether a value is corrected by what the state has for its key.
        has_norms: Whether queries and keys are made of length 1.
        has_values_first: Whether a head's state is (value_dim, key_dim).
        query_scale: By what queries are multiplied.
        skips: By what values are added to the outputs, shape (num_heads,).
        step_limits: Limits of time steps, if values are multiplied by them; see ``run``.
        output_dtype: Of the outputs.
    """

    is_delta: bool = False
    has_norms: bool = False
    has_values_first: bool = False
    query_scale: float = 1.0
    skips: Tensor | None = None
    step_limits: tuple[float, float] | None = None
    output_dtype: torch.dtype = torch.float32

    def run(
        self,
        native: ctypes.CDLL,
        states: Tensor | None,
        heads: tuple[Tensor, Tensor, Tensor],
        gates: tuple[Tensor, Tensor],
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute some tokens of sequences of one length.

        Args:
            native: The library.
            states: Before these tokens, shape (num_sequences, num_heads, key_dim, value_dim).
            heads: Queries and keys, shape (num_sequences, num_tokens, num_key_heads, key_dim), and
                values, shape (num_sequences, num_tokens, num_heads, value_dim).
            gates: Logs of decays, and by what values are multiplied, shape (num_sequences,
                num_tokens, num_heads). With ``step_limits`` the second are what softplus makes
                steps of, and the first, shape (num_heads,), give with a step the log of its decay.

            in_place: Whether states are overwritten; they are contiguous, and float32.

        Returns:
            The outputs, shaped like the values, and the states after the last token, float32.
        """
        queries, _, values = heads
        count, num_tokens, num_heads, value_dim = values.shape
        num_key_heads, key_dim = queries.shape[2:]
        sizes = (value_dim, key_dim) if self.has_values_first else (key_dim, value_dim)
        shape = count, num_heads, *sizes
        if in_place and states is not None:
            assert states.is_contiguous() and states.dtype == torch.float32
            after = states
        else:
            after = torch.zeros(shape) if states is None else states.to(torch.float32, copy=True)
            after = after.contiguous()
        rows = [_rows(each.flatten(2)) for each in heads]
        logs, betas = (each.float().contiguous() for each in gates)
        assert all(each.shape[:2] == (count, num_tokens) for each in heads)
        assert heads[1].shape == queries.shape and betas.shape == values.shape[:3]
        assert logs.shape == (betas.shape if self.step_limits is None else (num_heads,)), logs.shape
        assert num_heads % num_key_heads == 0, "each key head has as many value heads"
        skips = None if self.skips is None else self.skips.float().contiguous()
        outputs = torch.empty(values.shape, dtype=self.output_dtype)
        scan = ScanRecord(
            after.data_ptr(),
            *(Matrix.of(each) for each in (*rows, outputs.flatten(2).flatten(0, 1))),
            logs.data_ptr(),
            betas.data_ptr(),
            None if skips is None else skips.data_ptr(),
            *(count * num_heads, num_heads),
            *(num_tokens, num_heads, num_key_heads, key_dim, value_dim),
            *(DTYPES[values.dtype], DTYPES[outputs.dtype]),
            *(self.is_delta, self.has_norms, self.has_values_first),
            *(self.step_limits is not None, self.query_scale, *(self.step_limits or (0.0, 0.0))),
            torch.get_num_threads(),
        )
        native.ost_ops_scan(ctypes.byref(scan))
        return outputs, after


def convolve(
    native: ctypes.CDLL,
    inputs: Tensor,
    earlier: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    has_silu: bool,
) -> Tensor:
    """Convolve channels along tokens.

    Args:
        native: The library.
        inputs: Shape (num_sequences, num_tokens, num_channels).
        earlier: The inputs before them, shape (num_sequences, num_taps - 1, num_channels).
        weights: Shape (num_channels, num_taps), at most ``MAX_TAPS``.
        bias: Shape (num_channels,).
        has_silu: Whether SiLU follows.

    Returns:
        The outputs, shaped and rounded like the inputs.
    """
    count, num_tokens, width = inputs.shape
    num_taps = weights.shape[1]
    assert weights.shape[0] == width and num_taps <= MAX_TAPS
    assert earlier.shape == (count, num_taps - 1, width) and earlier.dtype == inputs.dtype
    rows, earlier, by_tap = _rows(inputs), earlier.contiguous(), weights.float().T.contiguous()
    shift = None if bias is None else bias.float().contiguous()
    outputs = torch.empty(inputs.shape, dtype=inputs.dtype)
    convolution = _Convolution(
        Matrix.of(rows),
        *(earlier.data_ptr(), by_tap.data_ptr(), None if shift is None else shift.data_ptr()),
        Matrix.of(outputs.flatten(0, 1)),
        count * num_tokens,
        *(num_tokens, width, num_taps, DTYPES[inputs.dtype], has_silu, torch.get_num_threads()),
    )
    native.ost_ops_convolution(ctypes.byref(convolution))
    return outputs


def _rows(tokens: Tensor) -> Tensor:
    """Return a row per token of all sequences, its numbers side by side; copied only if needed."""
    rows = tokens.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()

"""What a layer with a state computes between its products, and C structures for it.

::

    projected row ─► convolution ─► queries, keys, values ─┐
    stepped row   ─► decays and betas ─────────────────────┴► scan ─► gated norm

``native/include/ostinato_ops.h`` is the other side. A record points into tensors, which the caller
keeps alive; its columns are kept beside it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.forward.ops import DTYPES, Norm, NormRecord
from ostinato.runner.native.checks import within
from ostinato.runner.native.ctypes_api import floats, int32s, int64s, pointers
from ostinato.runner.native.packed import Matrix
from ostinato.runner.native.scan import MAX_TAPS, ScanRecord
from ostinato.runner.states.step import LayerStates, StateStep

MAX_CHANNELS = 256
"""Channels of a run; ``kMostChannels``."""


@dataclass(frozen=True, slots=True)
class RowGating:
    """How rows are gated, and normed before or after that, by groups of numbers.

    Attributes:
        columns: Where the gates of each group begin in a projected row.
        width: Numbers of a group.
        is_sigmoid: Whether a rounded sigmoid opens gates; else SiLU, which is not rounded.
        is_first: Whether rows are gated before they are normed.
        norm: An RMSNorm whose weights are those of a group, or of all groups; None is none.
    """

    columns: tuple[int, ...]
    width: int
    is_sigmoid: bool
    is_first: bool = False
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class MixerShape:
    """How projected rows become what a scan reads.

    Attributes:
        is_delta: Whether it is the gated delta rule; else Mamba 2.
        num_heads: Heads of values, and states.
        num_key_heads: Heads of keys, and of queries.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value.
        channels: Runs of the convolution's channels: the first column in a projected row, the first
            channel, and how many.
        places: First channels of queries, keys and values.
        decay_columns: What each head's decay is made of, in a stepped row.
        beta_columns: What each head's beta is made of; empty for Mamba 2.
        beta_factor: Factor on the sigmoid that is a beta.
        has_norms: Whether queries and keys are made of length 1.
        has_silu: Whether SiLU follows the convolution.
        step_limits: Limits of the steps of Mamba 2.
    """

    is_delta: bool
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    channels: tuple[tuple[int, int, int], ...]
    places: tuple[int, int, int]
    decay_columns: tuple[int, ...]
    beta_columns: tuple[int, ...]
    beta_factor: float
    has_norms: bool
    has_silu: bool
    step_limits: tuple[float, float]

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return sum(width for _, _, width in self.channels)


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """A mixer's own weights; those of the convolution are of the model's dtype.

    Attributes:
        taps: Of the convolution, shape (num_channels, 1, num_taps).
        log_rates: Shape (num_heads,): the log of a decay is ``-exp(rate) * step``.
        shifts: Shape (num_heads,), added before softplus makes steps.
        bias: Of the convolution, shape (num_channels,); None is 0.
        skips: Shape (num_heads,): what outputs get of their values too; None is nothing.
    """

    taps: Tensor
    log_rates: Tensor
    shifts: Tensor
    bias: Tensor | None = None
    skips: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MixerRows:
    """Buffers for all rows of a step.

    Attributes:
        projected: See ``MixerShape``.
        stepped: Likewise.
        convolved: Shape (num_rows, num_channels).
        logs: Of decays, shape (num_rows, num_heads), float32.
        betas: Likewise.
        output: Shape (num_rows, num_heads * value_dim).
    """

    projected: Tensor
    stepped: Tensor
    convolved: Tensor
    logs: Tensor
    betas: Tensor
    output: Tensor


class Sequences(ctypes.Structure):
    """``ost_sequences``: the sequences of a step."""

    _fields_ = (*pointers("starts", "slots", "is_fresh"), *int64s("num_sequences"))


class Mixer(ctypes.Structure):
    """``ost_mixer``: convolve and scan; each step sets the states."""

    _fields_ = (
        ("scan", ScanRecord),
        *pointers("step"),
        *((name, Matrix) for name in ("projected", "convolved", "stepped")),
        *pointers("earlier", "channels", "weights", "bias", "decay_columns", "beta_columns"),
        *pointers("log_rates", "shifts", "skips"),
        *int32s("num_runs", "num_channels", "num_taps", "has_silu"),
        *int32s("rates_dtype", "shifts_dtype", "skips_dtype"),
        *floats("beta_factor"),
    )

    @classmethod
    def of(cls, shape: MixerShape, weights: MixerWeights, rows: MixerRows, step: int) -> "Mixer":
        """Check and describe; ``step`` is the address of the step's ``Sequences``."""
        dtype, num_heads, num_taps = rows.projected.dtype, shape.num_heads, weights.taps.shape[-1]
        widths = [shape.num_key_heads * shape.key_dim] * 2 + [num_heads * shape.value_dim]
        given = (weights.taps, weights.log_rates, weights.shifts, weights.bias, weights.skips)
        for each in (tensor for tensor in given if tensor is not None):
            assert each.is_contiguous() and each.dtype in (dtype, torch.float32), each.dtype
        assert (
            weights.taps.dtype == (dtype if weights.bias is None else weights.bias.dtype) == dtype
        )
        assert weights.taps.shape == (shape.num_channels, 1, num_taps) and 1 < num_taps <= MAX_TAPS
        assert weights.log_rates.shape == weights.shifts.shape == (num_heads,)
        assert rows.convolved.shape[1] == shape.num_channels, rows.convolved.shape
        assert num_heads % shape.num_key_heads == 0, "each key head has as many value heads"
        for place, width in zip(shape.places, widths, strict=True):
            assert place + width <= shape.num_channels, shape
        assert rows.output.shape[1] == widths[2] and rows.logs.stride() == rows.betas.stride()
        assert all(each.stride(1) == 1 for each in (rows.projected, rows.stepped, rows.output))
        for columns, of in (
            ([first + width - 1 for first, _, width in shape.channels], rows.projected),
            (shape.decay_columns + shape.beta_columns, rows.stepped),
        ):
            assert min(columns) >= 0 and max(columns) < of.shape[1], "columns of a row"
        heads = [rows.convolved[:, place:] for place in shape.places]
        scan = ScanRecord(
            None,
            *map(Matrix.of, (*heads, rows.output)),
            rows.logs.data_ptr(),
            rows.betas.data_ptr(),
            None,
            *(0, rows.logs.stride(0)),
            *(0, num_heads, shape.num_key_heads, shape.key_dim, shape.value_dim),
            *(DTYPES[dtype], DTYPES[rows.output.dtype]),
            *(shape.is_delta, shape.has_norms, not shape.is_delta, False),
            *(shape.key_dim**-0.5 if shape.is_delta else 1.0, *shape.step_limits),
            torch.get_num_threads(),
        )
        channels, decays, betas = (
            np.array(each, dtype=np.int32)
            for each in (shape.channels, shape.decay_columns, shape.beta_columns)
        )
        taps, rates, shifts, bias, skips = (None if t is None else t.data_ptr() for t in given)
        record = cls(
            scan,
            step,
            *map(Matrix.of, (rows.projected, rows.convolved, rows.stepped)),
            *(None, channels.ctypes.data, taps, bias, decays.ctypes.data),
            betas.ctypes.data if len(betas) else None,
            *(rates, shifts, skips),
            *(len(channels), shape.num_channels, num_taps, shape.has_silu),
            *(0 if t is None else DTYPES[t.dtype] for t in (given[1], given[2], given[4])),
            shape.beta_factor,
        )
        record._kept = channels, decays, betas  # pointed to
        return record

    def set_states(self, states: Sequence[Tensor]) -> None:
        """Point to the states of all slots: the convolution's inputs, and the scan's matrices."""
        earlier, matrices = states
        scan = self.scan
        sizes = scan.key_dim, scan.value_dim
        own = scan.num_heads, *(sizes if scan.is_delta else sizes[::-1])
        assert earlier.shape[1:] == (self.num_channels, self.num_taps - 1), earlier.shape
        assert matrices.shape[1:] == own and matrices.dtype == torch.float32, matrices.shape
        assert DTYPES[earlier.dtype] == scan.dtype and earlier.is_contiguous()
        self.earlier, self.scan.states = earlier.data_ptr(), matrices.data_ptr()


class GatedNorm(ctypes.Structure):
    """``ost_gated_norm``: gate rows, and norm them before or after that."""

    _fields_ = (
        *((name, Matrix) for name in ("inputs", "gates", "output")),
        *pointers("columns"),
        ("norm", NormRecord),
        *int64s("num_rows"),
        *int32s("num_groups", "width", "weight_stride", "dtype", "input_dtype"),
        *int32s("is_gated_first", "is_sigmoid", "num_threads"),
    )

    @classmethod
    def of(cls, inputs: Tensor, gates: Tensor, output: Tensor, gating: RowGating) -> "GatedNorm":
        """Check and describe.

        Args:
            inputs: Shape (num_rows, num_groups * width).
            gates: Rows that have the gates.
            output: Shaped like the inputs.
            gating: How.
        """
        columns, width, norm = np.array(gating.columns, dtype=np.int32), gating.width, gating.norm
        assert inputs.shape == output.shape == (len(gates), len(columns) * width), inputs.shape
        assert columns.min() >= 0 and columns.max() + width <= gates.shape[1], "gates of a row"
        assert gates.dtype == output.dtype and inputs.dtype in (torch.float32, output.dtype)
        assert inputs.stride(1) == gates.stride(1) == output.stride(1) == 1, "contiguous rows"
        num_weights = 0 if norm is None or norm.weight is None else norm.weight.numel()
        assert num_weights in (0, width, inputs.shape[1]), num_weights
        assert norm is None or (norm.bias is None and not norm.offset and not norm.is_centered)
        record = cls(
            *map(Matrix.of, (inputs, gates, output)),
            columns.ctypes.data,
            NormRecord.of(norm, output, num_weights),
            *(len(inputs), len(columns), width, 0 if num_weights <= width else width),
            *(DTYPES[output.dtype], DTYPES[inputs.dtype]),
            *(gating.is_first, gating.is_sigmoid, torch.get_num_threads()),
        )
        record._kept = columns  # pointed to
        return record


class StepMixers:
    """The convolutions and scans of a program, and the sequences that a step sets.

    Attributes:
        layers: Index of each layer that has one, with its record.
    """

    def __init__(self) -> None:
        """Begin without layers."""
        self.layers: list[tuple[int, Mixer]] = []
        self._sequences = Sequences()

    def add(self, layer: int, shape: MixerShape, weights: MixerWeights, rows: MixerRows) -> Mixer:
        """Return a layer's convolution and scan."""
        mixer = Mixer.of(shape, weights, rows, ctypes.addressof(self._sequences))
        self.layers.append((layer, mixer))
        return mixer

    def set(self, states: LayerStates | None, num_rows: int) -> object:
        """Set the sequences of a step; returns what they point to, which the caller keeps alive."""
        assert isinstance(states, StateStep), "a step with states"
        starts = np.ascontiguousarray(states.metadata.starts)
        slots, is_fresh = np.ascontiguousarray(states.slots), states.metadata.first_positions == 0
        assert starts[0] == 0 and starts[-1] == num_rows and (np.diff(starts) > 0).all(), starts
        assert len(starts) == len(slots) + 1 and within(slots, states.store.num_slots), slots
        arrays = starts, slots, is_fresh.astype(np.int64)
        assert all(each.dtype == np.int64 for each in arrays), "int64"
        own = self._sequences
        own.starts, own.slots, own.is_fresh = (each.ctypes.data for each in arrays)
        own.num_sequences = len(slots)
        for layer, mixer in self.layers:
            mixer.set_states(states.store.states(layer))
        return arrays

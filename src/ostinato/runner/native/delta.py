"""A decode step of the gated delta rule, in place on the states in their slots.

In torch each operation reads and writes all states, some ten times per step, and twice more to copy
them from and to their slots. Here they are read once and written once.
"""

import ctypes

import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES, int32s, int64s, pointers


class _Delta(ctypes.Structure):
    """``ost_delta``."""

    _fields_ = (
        *pointers("states", "slots", "queries", "keys", "values", "decays", "betas", "outputs"),
        *int64s("num_rows"),
        *int32s("num_heads", "num_key_heads", "key_dim", "value_dim", "num_threads"),
    )


def takes(states: Tensor, queries: Tensor) -> bool:
    """Whether the library can compute with these states and queries."""
    on_cpu = states.device.type == "cpu" and states.is_contiguous()
    return on_cpu and states.dtype == torch.float32 and queries.dtype in DTYPES


def delta_step(
    native: ctypes.CDLL,
    states: Tensor,
    slots: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
) -> Tensor:
    """Decay, update and read the matrices of some slots.

    Args:
        native: The library.
        states: States of all slots, shape (num_slots, num_heads, key_dim, value_dim), float32.
        slots: All different, shape (num_sequences,), int64.
        heads: Queries and keys, shape (num_sequences, num_key_heads, key_dim), and values, shape
            (num_sequences, num_heads, value_dim).
        gates: Decays and betas, shape (num_sequences, num_heads).

    Returns:
        The outputs, shape (num_sequences, num_heads, value_dim), float32.

    Effects: overwrites the states of those slots.
    """
    num_slots, num_heads, key_dim, value_dim = states.shape
    queries, keys, values, decays, betas = (
        each.to(torch.float32).contiguous() for each in (*heads, *gates)
    )
    num_sequences, num_key_heads = queries.shape[:2]
    assert queries.shape == keys.shape == (num_sequences, num_key_heads, key_dim), queries.shape
    assert values.shape == (num_sequences, num_heads, value_dim), values.shape
    assert decays.shape == betas.shape == (num_sequences, num_heads), decays.shape
    assert num_heads % num_key_heads == 0, "each key head has as many value heads"
    assert len(slots) == num_sequences and 0 <= int(slots.min()) <= int(slots.max()) < num_slots
    outputs = torch.empty_like(values)
    tensors = (states, slots, queries, keys, values, decays, betas, outputs)
    delta = _Delta(
        *(tensor.data_ptr() for tensor in tensors),
        num_sequences * num_heads,
        num_heads,
        num_key_heads,
        key_dim,
        value_dim,
        torch.get_num_threads(),
    )
    native.ost_ops_delta(ctypes.byref(delta))
    return outputs

"""One token of many sequences through the gated delta rule, on the states in their slots.

In torch each of its operations passes over all states: a step reads and writes them some ten times,
and twice more to fetch them from their slots. Here memory is read once and written once.
"""

import ctypes

import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES


class _Delta(ctypes.Structure):
    """``ost_delta``."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("decays", ctypes.c_void_p),
        ("betas", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_key_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
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
    """Decay, correct and read the matrices of some slots.

    Args:
        native: The library.
        states: States of all slots, shape (num_slots, num_heads, key_dim, value_dim), float32.
        slots: All different, shape (num_sequences,), int64.
        heads: Queries and keys, shape (num_sequences, num_key_heads, key_dim), and values, shape
            (num_sequences, num_heads, value_dim).
        gates: Decays and betas, shape (num_sequences, num_heads).

    Returns:
        What queries read, shape (num_sequences, num_heads, value_dim), float32.

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
    assert num_heads % num_key_heads == 0, "each key serves as many values"
    assert len(slots) == num_sequences and 0 <= int(slots.min()) <= int(slots.max()) < num_slots
    outputs = torch.empty_like(values)
    pointers = (queries, keys, values, decays, betas, outputs)
    native.ost_ops_delta(
        ctypes.byref(
            _Delta(
                states.data_ptr(),
                slots.data_ptr(),
                *(each.data_ptr() for each in pointers),
                num_sequences * num_heads,
                num_heads,
                num_key_heads,
                key_dim,
                value_dim,
                torch.get_num_threads(),
            )
        )
    )
    return outputs

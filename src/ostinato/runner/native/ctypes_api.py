"""The library's structures and functions as Python sees them.

``native/include/ostinato_native.h`` and ``ostinato_plan.h`` field by field: what is passed once per
call is a ``ctypes`` structure, what is passed by the thousand an array of NumPy records.
"""

import ctypes
from typing import Any

import numpy as np
import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``ost_dtype``."""

KV_DTYPES = {**DTYPES, torch.int8: 3}
"""``ost_dtype`` of stored keys and values."""

Fields = tuple[tuple[str, Any], ...]


def pointers(*names: str) -> Fields:
    """Return fields that are pointers."""
    return tuple((name, ctypes.c_void_p) for name in names)


def int64s(*names: str) -> Fields:
    """Return fields of type ``int64_t``."""
    return tuple((name, ctypes.c_int64) for name in names)


def int32s(*names: str) -> Fields:
    """Return fields of type ``int32_t``."""
    return tuple((name, ctypes.c_int32) for name in names)


def floats(*names: str) -> Fields:
    """Return fields of type ``float``."""
    return tuple((name, ctypes.c_float) for name in names)


_SEGMENT = ("first_row", "last_row", "first_position", "num_keys")
SEGMENT = np.dtype([("first_entry", np.int64), *((n, np.int32) for n in _SEGMENT)], align=True)
"""``ost_segment``."""

_ITEM = ("first_row", "last_row", "first_segment", "last_segment", "first_section", "last_section")
ITEM = np.dtype([(n, np.int32) for n in (*_ITEM, "first_partial")], align=True)
"""``ost_item``."""


class PlanArrays(ctypes.Structure):
    """The arrays of a plan, in ``ost_plan`` and ``ost_attention``."""

    _fields_ = (
        *pointers("tokens", "positions", "blocks", "segments", "items"),
        *pointers("merge_rows", "merge_starts", "merge_partials"),
    )


class Kv(ctypes.Structure):
    """``ost_kv``: keys and values of one layer."""

    _fields_ = (
        *pointers("keys", "values"),
        *int64s("num_blocks"),
        *int32s("dtype", "num_kv_heads", "key_dim", "value_dim", "block_size"),
    )


class Rows(ctypes.Structure):
    """``ost_rows``: queries, keys, values or outputs of tokens, with their strides."""

    _fields_ = (*pointers("data"), *int64s("token_stride", "head_stride"), *int32s("dtype"))


class AttentionArgs(ctypes.Structure):
    """``ost_attention``: one layer's attention of one step."""

    _fields_ = (
        ("kv", Kv),
        ("queries", Rows),
        ("output", Rows),
        ("arrays", PlanArrays),
        *pointers("partials", "sinks"),
        *int32s("num_heads", "num_items", "num_merges", "window", "section_keys"),
        *floats("scale", "soft_cap"),
        *int32s("num_threads"),
    )


class Tables(ctypes.Structure):
    """``ost_step``: the block tables of a step."""

    _fields_ = (
        *pointers("starts", "first_positions", "blocks", "table_starts"),
        *int64s("num_entries"),
        *int32s("num_sequences", "block_size", "num_blocks"),
    )


STEP_FAULTS = {-1: "rows", -2: "positions", -3: "tables", -4: "blocks"}
"""What is invalid in a step, by ``ost_step_fault``."""

_COSTS = ("keys_per_run", "keys_per_row", "row_cost", "min_part", "max_packed_cost")


class Rules(ctypes.Structure):
    """``ost_rules``: how layers of one kind are read."""

    _fields_ = (
        *((name, ctypes.c_double) for name in _COSTS),
        *int32s("item_rows", "run_keys", "section_keys", "tasks_per_thread"),
        *int32s("window", "group", "num_kv_heads", "num_threads"),
    )


class PlanArgs(ctypes.Structure):
    """``ost_plan``: how a step is read."""

    _fields_ = (
        ("arrays", PlanArrays),
        *int32s("num_rows", "num_blocks", "num_segments", "num_items", "num_merges"),
        *int32s("num_partials"),
    )


def declare(native: ctypes.CDLL) -> None:
    """Declare the argument and return types of the library's functions."""
    pointer, many, few = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, arguments in {
        "ost_kv_write": (pointer, pointer, pointer, pointer, many, few),
        "ost_kv_copy": (pointer, pointer, pointer, many),
        "ost_kv_read": (pointer, pointer, many, pointer, pointer),
        "ost_kv_zero": (pointer, pointer, many),
        "ost_run_program": (pointer, many, many, few),
        "ost_attend": (pointer,),
        "ost_ops_add_norm": (pointer,),
        "ost_ops_best": (pointer,),
        "ost_ops_convolution": (pointer,),
        "ost_ops_gated": (pointer,),
        "ost_ops_heads": (pointer,),
        "ost_ops_lora": (pointer,),
        "ost_ops_product": (pointer,),
        "ost_ops_scan": (pointer,),
        "ost_pack": (pointer,),
        "ost_pack_codes": (pointer,),
        "ost_route": (pointer,),
        "ost_run_experts": (pointer,),
        "ost_sample": (pointer,),
        "ost_turns": (pointer, pointer, pointer, many),
        "ost_unpack": (pointer,),
    }.items():
        function = getattr(native, name)
        function.argtypes, function.restype = arguments, None
    native.ost_packed_size.argtypes, native.ost_packed_size.restype = (many, many), many
    native.ost_make_plan.argtypes = (pointer, pointer, pointer, many, pointer)
    native.ost_make_plan.restype = many

"""The library's structures and functions as Python sees them.

``native/include/ostinato_native.h`` and ``ostinato_plan.h`` field by field: what is passed once per
call is a ``ctypes`` structure, what is passed by the thousand an array of NumPy records.
"""

import ctypes

import numpy as np
import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``ost_dtype``."""

KV_DTYPES = {**DTYPES, torch.int8: 3}
"""``ost_dtype`` of keys and values that are stored."""

SEGMENT = np.dtype(
    [
        ("first_entry", np.int64),
        ("first_row", np.int32),
        ("last_row", np.int32),
        ("first_position", np.int32),
        ("num_keys", np.int32),
    ],
    align=True,
)
"""``ost_segment``."""

ITEM = np.dtype(
    [
        ("first_row", np.int32),
        ("last_row", np.int32),
        ("first_segment", np.int32),
        ("last_segment", np.int32),
        ("first_section", np.int32),
        ("last_section", np.int32),
        ("first_partial", np.int32),
    ],
    align=True,
)
"""``ost_item``."""


class Kv(ctypes.Structure):
    """``ost_kv``: keys and values of one layer."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )


class Rows(ctypes.Structure):
    """``ost_rows``: queries, keys, values or outputs of tokens, with their strides."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class Attention(ctypes.Structure):
    """``ost_attention``: one layer's attention of one step."""

    _fields_ = (
        ("kv", Kv),
        ("queries", Rows),
        ("output", Rows),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("merge_rows", ctypes.c_void_p),
        ("merge_starts", ctypes.c_void_p),
        ("merge_partials", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
        ("num_merges", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("section_keys", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class Tables(ctypes.Structure):
    """``ost_step``: the block tables of a step."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("first_positions", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
        ("num_entries", ctypes.c_int64),
        ("num_sequences", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
    )


STEP_FAULTS = {-1: "rows", -2: "positions", -3: "tables", -4: "blocks"}
"""``ost_step_fault``, by what is wrong."""


class Rules(ctypes.Structure):
    """``ost_rules``: how layers of one kind are read."""

    _fields_ = (
        ("keys_per_run", ctypes.c_double),
        ("keys_per_row", ctypes.c_double),
        ("row_cost", ctypes.c_double),
        ("min_part", ctypes.c_double),
        ("most_packed", ctypes.c_double),
        ("item_rows", ctypes.c_int32),
        ("run_keys", ctypes.c_int32),
        ("section_keys", ctypes.c_int32),
        ("tasks_per_thread", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class Plan(ctypes.Structure):
    """``ost_plan``: how a step is read."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("merge_rows", ctypes.c_void_p),
        ("merge_starts", ctypes.c_void_p),
        ("merge_partials", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("num_segments", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
        ("num_merges", ctypes.c_int32),
        ("num_partials", ctypes.c_int32),
    )


def declare(native: ctypes.CDLL) -> None:
    """Tell ``ctypes`` what the library's functions take and give."""
    pointer, many, few = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, arguments in {
        "ost_kv_write": (pointer, pointer, pointer, pointer, many, few),
        "ost_kv_copy": (pointer, pointer, pointer, many),
        "ost_kv_read": (pointer, pointer, many, pointer, pointer),
        "ost_kv_zero": (pointer, pointer, many),
        "ost_attend": (pointer,),
        "ost_ops_best": (pointer,),
        "ost_ops_lora": (pointer,),
        "ost_ops_delta": (pointer,),
        "ost_ops_product": (pointer,),
        "ost_pack": (pointer,),
        "ost_unpack": (pointer,),
    }.items():
        function = getattr(native, name)
        function.argtypes, function.restype = arguments, None
    native.ost_packed_size.argtypes, native.ost_packed_size.restype = (many, many), many
    native.ost_make_plan.argtypes = (pointer, pointer, pointer, many, pointer)
    native.ost_make_plan.restype = many

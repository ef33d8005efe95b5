"""Tells whether Triton can compute a case; imports neither Triton nor CUDA."""

import os
from importlib.util import find_spec

import torch
from torch import nn

from ostinato.runner.experts.mixture import is_experts
from ostinato.runner.kv.kv_codes import SCALE_BYTES
from ostinato.runner.kv.kv_store import KVSpec
from ostinato.runner.native.ctypes_api import DTYPES, KV_DTYPES

MAX_DIM = 256
INSTALL = "pip install 'ostinato[gpu]'"
INTERPRETER_VARIABLE = "TRITON_INTERPRET"


def why_no_triton(device: torch.device) -> str | None:
    """Return why no kernel runs on a device; None if they do.

    On a CPU they run in Triton's interpreter, to be tested and rehearsed.
    """
    if find_spec("triton") is None:
        return f"Triton is not installed: {INSTALL}"
    if device.type == "cuda" or os.environ.get(INTERPRETER_VARIABLE) == "1":
        return None
    return (
        f"device={str(device)!r}, and Triton computes on a GPU: set device='cuda', or "
        f"{INTERPRETER_VARIABLE}=1 for its interpreter"
    )


def why_not_format(support: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Return the first setting whose format is not supported; None if both are.

    Args:
        support: What supports formats, such as ``the library supports``.
        dtype: Compute dtype.
        kv_dtype: Format of keys and values.
    """
    for setting, used, known in (
        ("dtype", dtype, DTYPES),
        ("kv_cache_dtype", kv_dtype, KV_DTYPES),
    ):
        if used not in known:
            unknown, *names = (str(name).removeprefix("torch.") for name in (used, *known))
            return f"{setting} is {unknown}, and {support} {', '.join(names)}: set {setting}"
    return None


def why_not_in_triton(spec: KVSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Return the first property that the kernels lack, with its setting; None if there is none."""
    if (hindrance := why_not_format("the kernels support", dtype, kv_dtype)) is not None:
        return hindrance
    for layer, kept in enumerate(spec.layers):
        dims = kept.key_dim, kept.value_dim
        if max(dims) > MAX_DIM:
            return f"layer {layer} has heads of {max(dims)} elements, and {MAX_DIM} is the maximum"
        if kv_dtype == torch.int8 and any(dim % SCALE_BYTES for dim in dims):
            return (
                f"layer {layer} has heads of {dims[0]} and {dims[1]} elements, and with "
                f"kv_cache_dtype=int8 they must be multiples of {SCALE_BYTES}: set kv_cache_dtype"
            )
    return None


def why_not_on_device(model: nn.Module, quantization: str | None) -> str | None:
    """Return why the fused forward of a device cannot compute a model; None if it can."""
    if quantization not in (None, "int8", "int4"):
        return f"activations are not quantized on a GPU (quantization={quantization!r})"
    if quantization is not None and any(is_experts(module) for module in model.modules()):
        return "experts are not quantized on a GPU"
    return None

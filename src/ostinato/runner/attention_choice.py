"""Chooses the native library, Triton or plain torch.

The library supports CPUs, three formats and blocks of a multiple of sixteen tokens, and Triton
GPUs. Torch computes everything else, several times slower.
"""

import functools
import logging
from dataclasses import dataclass

import torch

from ostinato.core.errors import ConfigError
from ostinato.runner.attention.backend import AttentionBackend
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import SHARING, TorchAttention
from ostinato.runner.gpu.availability import (
    why_no_triton,
    why_not_format,
    why_not_in_triton,
)
from ostinato.runner.gpu.backend import TritonAttention
from ostinato.runner.kv.kv_store import KVSpec
from ostinato.runner.native.library import library, why_missing
from ostinato.runner.settings import NATIVE_BLOCK, AttentionName, ReadOnce

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The requirements on attention.

    Attributes:
        spec: The KV per token.
        dtype: The model's compute dtype.
        kv_dtype: Format of keys and values.
        block_size: Tokens per block.
        device: The model's device.
    """

    spec: KVSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    device: torch.device


def check_attention_setting(name: AttentionName, device: str = "cpu") -> None:
    """Load the library, and check its settings before a model is loaded.

    Raises:
        ConfigError: The library or Triton is required by name, and missing; or ``OSTINATO_ISA``
            names an instruction set that this machine lacks.
    """
    if library() is None and name == "native":
        raise _refusal(name, why_missing())
    if name == "triton" and (hindrance := why_no_triton(torch.device(device))) is not None:
        raise _refusal(name, hindrance)


def choose_attention(
    name: AttentionName,
    case: AttentionCase,
    read_once: ReadOnce = "auto",
    same_bits: bool = False,
) -> AttentionBackend:
    """Choose the backend.

    Args:
        name: ``native``, ``triton``, ``torch``, or ``auto``: the library or Triton wherever it can.
        case: The requirements.
        read_once: When blocks shared by sequences are read once.
        same_bits: Whether a row's bits must depend on its own sequence alone.

    Raises:
        ConfigError: The library or Triton is required by name, and does not support the case.

    Effects: logs once per reason why ``auto`` uses torch, except in float64, which no other
        backend supports.
    """
    hindrance, has_kernels = why_torch(name, case), on_device(name, case.device)
    native = None if has_kernels else library()
    if hindrance is None and has_kernels:
        return TritonAttention(read_once, same_bits)
    if hindrance is None and native is not None:
        return NativeAttention(native, read_once)
    if name in ("native", "triton"):
        raise _refusal(name, hindrance or why_missing())
    if hindrance is not None and name == "auto" and case.dtype != torch.float64:
        log_once(hindrance)
    return TorchAttention(sharing=SHARING[read_once])


def on_device(name: AttentionName, device: torch.device) -> bool:
    """Return whether steps are computed by kernels for devices other than a CPU, if they can."""
    return name == "triton" or (name == "auto" and device.type == "cuda")


def _refusal(name: str, reason: str | None) -> ConfigError:
    """Return why a backend is unavailable."""
    return ConfigError(f"attention={name!r} is unavailable: {reason}; or set attention='auto'")


def why_torch(name: AttentionName, case: AttentionCase) -> str | None:
    """Return why torch computes a case on a machine that has the backends; None if it does not.

    Names the first unsupported property, with the setting that would help.
    """
    if name == "torch":
        return "attention='torch' is set"
    if on_device(name, case.device):
        missing = why_no_triton(case.device)
        return missing or why_not_in_triton(case.spec, case.dtype, case.kv_dtype)
    if case.device.type != "cpu":
        return f"device={str(case.device)!r}, and the library computes on a CPU"
    if (hindrance := why_not_format("the library supports", case.dtype, case.kv_dtype)) is not None:
        return hindrance
    if case.block_size % NATIVE_BLOCK:
        return f"block_size={case.block_size} must be a multiple of {NATIVE_BLOCK}: set block_size"
    for layer, kept in enumerate(case.spec.layers):
        if kept.key_dim % 2:
            return f"layer {layer} has keys of {kept.key_dim} elements, and it must be even"
    return None


def attention_in_use(name: AttentionName, case: AttentionCase) -> str:
    """Return the name of the backend of a case."""
    if why_torch(name, case) is not None:
        return "torch"
    if on_device(name, case.device):
        return "triton"
    return "torch" if library() is None else "native"


@functools.cache
def log_once(hindrance: str) -> None:
    """Log why attention is slower than it could be."""
    logger.warning("attention runs in plain torch, slower: %s", hindrance)

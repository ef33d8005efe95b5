"""Computes how many blocks fit.

By a number of blocks, by a number of bytes, or else by a share of the device's free memory, limited
to what the running sequences can use.
"""

import math
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from ostinato.core.errors import ConfigError

DEFAULT_SHARE = 0.5
"""Default share of free memory: the rest is for activations and for other programs."""

CGROUP = Path("/sys/fs/cgroup")

PROCESS_GROUPS = Path("/proc/self/cgroup")


def num_blocks_for(
    *,
    bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    reserved_bytes: int = 0,
    mapped_bytes: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Return the number of blocks of the KV store.

    Args:
        bytes_per_block: Bytes of one block over all layers.
        block_size: Tokens per block.
        max_num_seqs: Maximum number of running sequences.
        max_model_len: Maximum tokens of one sequence.
        num_blocks: The result, if given.
        kv_cache_memory: Bytes to fill with blocks, if given.
        reserved_bytes: Bytes of this memory that states take.
        mapped_bytes: Bytes of weights mapped from files, which count as free memory but are not.
        device: Device whose free memory is used otherwise.

    Raises:
        ConfigError: Not even one block fits, or both settings were given.
    """
    if num_blocks is not None and kv_cache_memory is not None:
        raise ConfigError(
            f"num_blocks={num_blocks} and kv_cache_memory={kv_cache_memory} both say how large "
            "the KV store is: give one of them"
        )
    if num_blocks is not None:
        return _checked_blocks(num_blocks, f"num_blocks={num_blocks}", bytes_per_block)
    memory, setting = memory_for(kv_cache_memory, device, mapped_bytes)
    if reserved_bytes:
        setting += f", less {reserved_bytes:,} bytes for states,"
    fitting = (memory - reserved_bytes) // bytes_per_block
    max_blocks = _checked_blocks(fitting, setting, bytes_per_block)
    if kv_cache_memory is not None:
        return max_blocks
    return min(max_blocks, max_num_seqs * -(-max_model_len // block_size))


def memory_for(
    kv_cache_memory: int | None, device: torch.device | str, mapped_bytes: int = 0
) -> tuple[int, str]:
    """Return the bytes that keys, values and states may take, and the setting behind them.

    Raises:
        ConfigError: The setting is not given, and the device's free memory is unknown.
    """
    if kv_cache_memory is not None:
        return kv_cache_memory, f"kv_cache_memory={kv_cache_memory:,}"
    free = available_bytes(device)
    if free is None:
        raise ConfigError(f"free memory of {device} is unknown: set num_blocks or kv_cache_memory")
    share = int(max(free - mapped_bytes, 0) * DEFAULT_SHARE)
    return share, (
        f"the default kv_cache_memory of {share:,} bytes ({DEFAULT_SHARE:.0%} of what is free)"
    )


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Return the free memory of a device in bytes; None if it is unknown.

    On a CPU this is what the kernel can provide without swapping (macOS: free and inactive
    pages), within the limit of the container, if there is one.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [n for n in (_machine_bytes(), _container_bytes()) if n is not None]
    return min(known, default=None)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, whose pages on a CPU are allocated when they are first written.

    NumPy gets zeroed pages from the kernel, which cost nothing until written; torch would write
    them, which takes seconds for many gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    content = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).view(shape)


def _checked_blocks(num_blocks: int, setting: str, bytes_per_block: int) -> int:
    if num_blocks < 1:
        raise ConfigError(
            f"{setting} holds no block: one block needs {bytes_per_block:,} bytes; "
            "raise it, or lower block_size"
        )
    return num_blocks


def _machine_bytes() -> int | None:
    try:
        return int(psutil.virtual_memory().available)
    except (OSError, RuntimeError, psutil.Error):  # /proc is not mounted, or a sandbox hides it
        return None


def _container_bytes() -> int | None:
    """Return what is left of the control groups' limits, version 2 or 1.

    The page cache of files counts as free: the kernel drops it before a limit is exceeded.
    """
    names = ("memory.max", "memory.current", "memory.stat")
    old_names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    places = [(group, names) for group in _groups()] + [(CGROUP / "memory", old_names)]
    left = [_left(group, *of_group) for group, of_group in places]
    return min((n for n in left if n is not None), default=None)


def _groups() -> list[Path]:
    """Return the control group of this process and all that it is in, version 2."""
    try:
        own = PROCESS_GROUPS.read_text().partition("0::/")[2].splitlines()
    except OSError:
        own = []
    inner = CGROUP / own[0].strip("/") if own else CGROUP
    return [group for group in (inner, *inner.parents) if group.is_relative_to(CGROUP)]


def _left(group: Path, limit: str, usage: str, statistics: str) -> int | None:
    try:
        left = int((group / limit).read_text()) - int((group / usage).read_text())
    except (OSError, ValueError):  # absent, or "max": no limit
        return None
    try:
        lines = dict(line.split() for line in (group / statistics).read_text().splitlines())
    except (OSError, ValueError):
        lines = {}
    cached = sum(int(lines.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(left + cached, 0)

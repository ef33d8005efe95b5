"""Opens the tiers that are set, or says why they cannot be."""

from ostinato.core.errors import ConfigError
from ostinato.engine.config import EngineConfig
from ostinato.runner.model_runner import ModelRunner
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.port import KVTier

LEAST_DISK_BLOCKS = 64
"""Blocks that a disk must hold: it is divided into 32 segments, and a segment keeps some."""


def open_tier(config: EngineConfig, runner: ModelRunner) -> KVTier:
    """Open the tiers that are set.

    Raises:
        ConfigError: The model cannot be kept in tiers, or a tier cannot be opened.
    """
    _check_model(runner)
    return _open_disk(config, runner)


def _open_disk(config: EngineConfig, runner: ModelRunner) -> DiskTier:
    assert config.kv_disk is not None
    least = LEAST_DISK_BLOCKS * runner.kv_stores[0].block_bytes
    if config.kv_disk_bytes < least:
        raise ConfigError(
            f"kv_disk_bytes={config.kv_disk_bytes:,} is too little for blocks of "
            f"{runner.kv_stores[0].block_bytes:,} bytes: set it to {least:,} or more, or lower "
            "block_size"
        )
    sealed = bool(config.tenant_shares) if config.kv_disk_sealed is None else config.kv_disk_sealed
    per_day = config.kv_disk_bytes_per_day or 0
    return DiskTier(config.kv_disk, DiskOptions(config.kv_disk_bytes, per_day, sealed))


def _check_model(runner: ModelRunner) -> None:
    """Refuse a model whose blocks are not all that a prefix needs.

    Raises:
        ConfigError: It has sliding windows, or does not compute on a CPU.
    """
    if len(runner.kv_stores) > 1:
        windows = ", ".join(map(str, runner.groups.windows))
        raise ConfigError(
            f"kv_disk and kv_remote keep no prefixes of {runner.loaded.name}: it has sliding "
            f"windows ({windows} tokens), whose blocks are not kept; leave both out, or set "
            f"max_model_len to {min(runner.groups.windows)}, so that no window hides anything"
        )
    if runner.loaded.device.type != "cpu":
        raise ConfigError(
            f"kv_disk and kv_remote with device={runner.loaded.device.type!r}: tiers copy blocks "
            "of a pool in the CPU's memory; leave both out, or set device='cpu'"
        )

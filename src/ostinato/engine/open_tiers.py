"""Opens the tiers that are set, or says why they cannot be."""

from pathlib import Path

from ostinato.core.errors import ConfigError
from ostinato.engine.config import EngineConfig
from ostinato.runner.model_runner import ModelRunner
from ostinato.tiers.chain import TierChain
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.port import KVTier, TierListener
from ostinato.tiers.remote import RemoteOptions, RemoteTier, open_store

LEAST_DISK_BLOCKS = 64
"""Blocks that a disk must hold: it is divided into 32 segments, and a segment keeps some."""

LEAST_SECRET_BYTES = 16


def open_tier(config: EngineConfig, runner: ModelRunner, listener: TierListener) -> KVTier:
    """Open the tiers that are set: the disk, the server, or both in this order.

    Args:
        config: Settings.
        runner: Of the model whose prefixes are kept.
        listener: Is told what tiers store and evict.

    Raises:
        ConfigError: The model cannot be kept in tiers, or a tier cannot be opened.
    """
    _check_model(runner)
    secret, tiers = _secret(config), list[KVTier]()
    if config.kv_disk is not None:
        tiers.append(_open_disk(config, config.kv_disk, runner, secret, listener))
    if config.kv_remote is not None:
        options = RemoteOptions(sealed=config.is_sealed, secret=secret)
        store = open_store(config.kv_remote, options.timeout_s)
        tiers.append(RemoteTier(store, options, listener))
    return tiers[0] if len(tiers) == 1 else TierChain(tiers)


def _open_disk(
    config: EngineConfig,
    folder: str | Path,
    runner: ModelRunner,
    secret: bytes,
    listener: TierListener,
) -> DiskTier:
    block_bytes = runner.kv_stores[0].block_bytes
    least = LEAST_DISK_BLOCKS * block_bytes
    if config.kv_disk_bytes < least:
        raise ConfigError(
            f"kv_disk_bytes={config.kv_disk_bytes:,} is too little for blocks of {block_bytes:,} "
            f"bytes: set it to {least:,} or more, or lower block_size"
        )
    per_day = config.kv_disk_bytes_per_day or 0
    options = DiskOptions(config.kv_disk_bytes, per_day, config.is_sealed, secret)
    return DiskTier(folder, options, listener=listener)


def _secret(config: EngineConfig) -> bytes:
    """Read the secret that is mixed into keys; empty if none is set."""
    if config.kv_secret_file is None:
        return b""
    try:
        secret = Path(config.kv_secret_file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"kv_secret_file={str(config.kv_secret_file)!r}: {error.strerror}: name a file of 16 "
            "random bytes or more that can be read"
        ) from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"kv_secret_file={str(config.kv_secret_file)!r} has {len(secret)} bytes: it needs "
            f"{LEAST_SECRET_BYTES} random ones at least"
        )
    return secret


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
    if runner.loaded.state_spec.layers:
        raise ConfigError(
            f"kv_disk and kv_remote keep no prefixes of {runner.loaded.name}: some of its layers "
            "carry a state, which is not kept; leave both out"
        )
    if runner.loaded.device.type != "cpu":
        raise ConfigError(
            f"kv_disk and kv_remote with device={runner.loaded.device.type!r}: tiers copy blocks "
            "of a pool in the CPU's memory; leave both out, or set device='cpu'"
        )

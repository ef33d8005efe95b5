"""Opens the tiers that the settings ask for."""

from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import ConfigError
from ostinato.engine.settings.config import EngineConfig
from ostinato.runner.kv.block_copies import BlockCopies, block_copies
from ostinato.runner.memory import available_bytes
from ostinato.runner.model_runner import ModelRunner
from ostinato.tiers.chain import TierChain
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.host_memory import MemoryFolder
from ostinato.tiers.port import KVTier, TierListener
from ostinato.tiers.remote import RemoteOptions
from ostinato.tiers.remote_address import open_remote

LEAST_BLOCKS = 64
"""Blocks that host memory or a disk must hold."""

SEGMENT_RECORDS = 9
"""Records that a segment has room for, one of them for headers: copies of fewer waste its rest."""

LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers of an engine, and how blocks get there."""

    tier: KVTier  # a single one, or a chain in the order of their speed
    copies: BlockCopies  # between the pool and host memory
    most_extent_bytes: int  # the longest record that all of them accept and can copy


def open_tiers(config: EngineConfig, runner: ModelRunner, listener: TierListener) -> OpenTiers:
    """Open the tiers that are set: host memory, the disk and the server, in this order.

    Raises:
        ConfigError: The model cannot be kept in tiers, or a tier cannot be opened.
    """
    _check_model(runner)
    copies, secret, tiers = block_copies(runner.kv_stores[0]), _secret(config), list[KVTier]()
    least = _least_limit(config, copies.block_bytes)
    segment_bytes = SEGMENT_RECORDS * copies.block_bytes
    if config.kv_host_bytes is not None:
        options = DiskOptions(config.kv_host_bytes, 0, config.is_sealed, secret)
        options = options.with_segments(segment_bytes)
        folder = MemoryFolder(options.max_segment_bytes)
        tiers.append(DiskTier(folder, options, listener=listener, name="host"))
    if config.kv_disk is not None:
        per_day = config.kv_disk_bytes_per_day or 0
        options = DiskOptions(config.kv_disk_bytes, per_day, config.is_sealed, secret)
        options = options.with_segments(segment_bytes)
        tiers.append(DiskTier(config.kv_disk, options, listener=listener))
    if config.kv_remote is not None:
        remote = RemoteOptions(sealed=config.is_sealed, secret=secret)
        tiers.append(open_remote(config.kv_remote, remote, listener))
    tier = tiers[0] if len(tiers) == 1 else TierChain(tiers)
    smallest = DiskOptions(least).with_segments(segment_bytes)
    return OpenTiers(tier, copies, smallest.max_segment_bytes // SEGMENT_RECORDS)


def _least_limit(config: EngineConfig, block_bytes: int) -> int:
    """Return the size of the smallest tier; a server has no size, and counts as a disk.

    Raises:
        ConfigError: One is too small for the model's blocks, or larger than the memory.
    """
    limits = dict[str, int]()
    if config.kv_disk is not None:
        limits["kv_disk_bytes"] = config.kv_disk_bytes
    if config.kv_host_bytes is not None:
        limits["kv_host_bytes"] = config.kv_host_bytes
        available = available_bytes()
        if available is not None and config.kv_host_bytes > available:
            raise ConfigError(
                f"kv_host_bytes={config.kv_host_bytes:,} exceeds the {available:,} bytes of host "
                "memory that are available: lower it"
            )
    for name, limit in limits.items():
        if limit < (least := LEAST_BLOCKS * block_bytes):
            raise ConfigError(
                f"{name}={limit:,} is too little for blocks of {block_bytes:,} bytes: set it to "
                f"{least:,} or more, or lower block_size"
            )
    return min(limits.values(), default=config.kv_disk_bytes)


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
    """Raise ``ConfigError`` for a model with sliding windows, or with layers that keep a state."""
    refused = f"tiers keep no prefixes of {runner.loaded.name}"
    advice = "leave kv_host_bytes, kv_disk and kv_remote out"
    if len(runner.kv_stores) > 1:
        windows = ", ".join(map(str, runner.groups.windows))
        raise ConfigError(
            f"{refused}: it has sliding windows ({windows} tokens), whose blocks are not kept; "
            f"{advice}, or set max_model_len to {min(runner.groups.windows)}, so that no window "
            "hides anything"
        )
    if runner.loaded.state_spec.layers:
        raise ConfigError(
            f"{refused}: some of its layers carry a state, which is not kept; {advice}"
        )

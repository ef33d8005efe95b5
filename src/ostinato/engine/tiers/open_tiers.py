"""Opens the tiers that the settings ask for."""

from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import ConfigError
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.tiers.groups import TierGroups, tier_groups
from ostinato.runner.memory import available_bytes
from ostinato.runner.model_runner import ModelRunner
from ostinato.tiers.chain import TierChain
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.disk.host_memory import MemoryFolder
from ostinato.tiers.port import KVTier, TierListener
from ostinato.tiers.remote import RemoteOptions
from ostinato.tiers.remote.address import open_remote

MIN_BLOCKS = 64
"""Blocks that host memory or a disk must hold."""

SEGMENT_RECORDS = 9
"""Records that a segment has room for, one of them for headers: copies of fewer waste its rest."""

MIN_SEGMENTS = 4
"""Of a disk or of host memory."""

MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers of an engine, and how blocks get there."""

    tier: KVTier  # a single one, or a chain in the order of their speed
    groups: TierGroups  # what each group of layers keeps there, and how it is copied
    max_extent_bytes: int  # the longest record that all of them accept and can copy


def open_tiers(config: EngineConfig, runner: ModelRunner, listener: TierListener) -> OpenTiers:
    """Open the tiers that are set: host memory, the disk and the server, in this order.

    Raises:
        ConfigError: A tier cannot be opened.
    """
    groups, secret, tiers = tier_groups(runner), _secret(config), list[KVTier]()
    min_limit = _smallest_limit(config, groups)
    segment_bytes = SEGMENT_RECORDS * groups.largest_block_bytes
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
        in_flight = max(RemoteOptions().max_in_flight_bytes, 2 * groups.largest_block_bytes)
        remote = RemoteOptions(
            max_in_flight_bytes=in_flight, sealed=config.is_sealed, secret=secret
        )
        tiers.append(open_remote(config.kv_remote, remote, listener))
    tier = tiers[0] if len(tiers) == 1 else TierChain(tiers)
    smallest = DiskOptions(min_limit).with_segments(segment_bytes)
    return OpenTiers(tier, groups, smallest.max_segment_bytes // SEGMENT_RECORDS)


def _smallest_limit(config: EngineConfig, groups: TierGroups) -> int:
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
    largest, each = groups.largest_block_bytes, groups.bytes_per_block
    min_limit = max(MIN_BLOCKS * each, MIN_SEGMENTS * SEGMENT_RECORDS * largest)
    for name, limit in limits.items():
        if limit < min_limit:
            raise ConfigError(
                f"{name}={limit:,} is too little for blocks of {each:,} bytes, the largest record "
                f"of {largest:,}: set it to {min_limit:,} or more, or lower block_size"
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
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"kv_secret_file={str(config.kv_secret_file)!r} has {len(secret)} bytes: it needs "
            f"{MIN_SECRET_BYTES} random ones at least"
        )
    return secret

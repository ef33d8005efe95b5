"""Opens the remote tier of an address: a server, an object store, or a tier of another package."""

from importlib import import_module
from urllib.parse import urlsplit

from ostinato.core.errors import ConfigError
from ostinato.tiers.byte_store import ByteStore
from ostinato.tiers.port import KVTier, TierListener
from ostinato.tiers.remote.object_store import BucketStore
from ostinato.tiers.remote.tier import RemoteOptions, RemoteTier
from ostinato.tiers.remote.valkey_store import ValkeyStore

_PLUGIN = "python"
_SERVERS = ("redis", "rediss", "valkey", "valkeys", "unix")
_BUCKETS = ("s3", "gs", "az", "file", "memory")


def open_store(url: str, timeout_s: float = 1.0) -> ByteStore:
    """Return the store of an address: an object store, or else a server of the Redis protocol.

    Args:
        url: Such as ``redis://host:6379/0``, ``s3://bucket/folder``.
        timeout_s: Limit for connecting, and for each read of an answer.

    Raises:
        ConfigError: Its client is not installed, or the address is invalid.
    """
    scheme = urlsplit(url).scheme
    if scheme in _BUCKETS:
        return BucketStore(url, timeout_s)
    if scheme in _SERVERS:
        return ValkeyStore(url, timeout_s)
    raise ConfigError(
        f"kv_remote begins with {scheme + '://' if scheme else 'no scheme'}: give the address of a "
        f"server ({', '.join(_SERVERS)}), of an object store ({', '.join(_BUCKETS)}) or of a tier "
        f"of your own ({_PLUGIN}://MODULE/FACTORY)"
    )


def open_remote(url: str, options: RemoteOptions, listener: TierListener) -> KVTier:
    """Return the tier of an address.

    Args:
        url: As ``open_store`` takes it, or ``python://package.module/make_tier``: a function that
            is called with the other arguments and returns a tier.
        options: Settings; a tier that cannot seal refuses ``sealed``.
        listener: Called when the tier stores extents or evicts blocks.

    Raises:
        ConfigError: The address is invalid, cannot be imported, or the tier refuses its settings.
    """
    parts = urlsplit(url)
    if parts.scheme != _PLUGIN:
        return RemoteTier(open_store(url, options.timeout_s), options, listener)
    try:
        make_tier = getattr(import_module(parts.netloc), parts.path.strip("/"))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"kv_remote={url!r}: {error}: give {_PLUGIN}://MODULE/FACTORY, of a module that Python "
            "can import"
        ) from error
    tier: KVTier = make_tier(options, listener)
    return tier

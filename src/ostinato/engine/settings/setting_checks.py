"""Refuses settings of an engine that contradict each other."""

from pathlib import Path

from ostinato.core.config import SchedulerConfig, check_minimum
from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_setting
from ostinato.engine.settings.settings import GENERATION_NAMES, EngineSettings
from ostinato.plugins.loading import is_plugin
from ostinato.runner.settings import NATIVE_BLOCK
from ostinato.settings import PrefixCacheConfig, TenantShare

_PLUGGABLE: dict[str, type] = {
    "index": PrefixCacheConfig,
    "eviction_policy": PrefixCacheConfig,
    "order": SchedulerConfig,
}
"""Settings that may name a class of one's own, and the settings that know the built-in names."""


def check_combinations(settings: EngineSettings) -> None:
    """Check settings beside each other; each by itself is in its range.

    Raises:
        ConfigError: Two contradict each other.
    """
    if settings.num_blocks is not None and settings.kv_cache_memory is not None:
        raise ConfigError(
            f"num_blocks={settings.num_blocks} and kv_cache_memory={settings.kv_cache_memory} both "
            "size the pool: give one of them"
        )
    _check_memory_share(settings)
    if settings.same_bits and (settings.attention == "torch" or settings.forward == "plain"):
        raise ConfigError(
            f"same_bits=True with attention={settings.attention!r} and forward="
            f"{settings.forward!r}: sums of torch depend on the batch; set both to 'auto'"
        )
    _check_generation(settings)
    _check_plugins(settings)
    _check_quantization(settings)
    _check_native_attention(settings)
    _check_kv_events(settings)
    _check_images(settings)
    _check_tiers(settings)
    _check_tenant_shares(settings)


def _check_memory_share(settings: EngineSettings) -> None:
    """Refuse a share of a GPU's memory without one, and beside what sizes the pool in bytes."""
    share = settings.gpu_memory_utilization
    if share is None:
        return
    if settings.device.partition(":")[0] != "cuda":
        raise ConfigError(
            f"gpu_memory_utilization={share} with device={settings.device!r}: only the memory of "
            "a CUDA device is shared so; set kv_cache_memory, or device='cuda'"
        )
    for name in ("kv_cache_memory", "num_blocks"):
        if (size := getattr(settings, name)) is not None:
            raise ConfigError(
                f"gpu_memory_utilization={share} and {name}={size} both size the pool: give one "
                "of them"
            )


def _check_generation(settings: EngineSettings) -> None:
    """Refuse names that no default sampling parameter has."""
    override = settings.override_generation_config
    unknown = [name for name in override if name not in GENERATION_NAMES]
    if unknown:
        raise ConfigError(
            f"override_generation_config={override!r:.200}: {unknown[0]!r} is none of "
            f"{', '.join(GENERATION_NAMES)}"
        )


def _check_plugins(settings: EngineSettings) -> None:
    """Refuse unknown names, and a trace of what a plug-in decides: a trace names no code."""
    for name, kind in _PLUGGABLE.items():
        value = getattr(settings, name)
        if not is_plugin(value):
            check_setting(kind, name, value)
        elif settings.record_trace is not None:
            raise ConfigError(
                f"{name}={value!r} with record_trace={str(settings.record_trace)!r}: a trace "
                "cannot be replayed under code of your own; leave one of them out"
            )


def _check_native_attention(settings: EngineSettings) -> None:
    """Refuse ``native`` for settings that the library does not support."""
    if settings.attention != "native":
        return
    dtypes = "float64, and the library supports float32, bfloat16, float16"
    if settings.block_size % NATIVE_BLOCK:
        size = settings.block_size
        reason = f"block_size={size} must be a multiple of {NATIVE_BLOCK}: set block_size"
    elif settings.device != "cpu":
        reason = f"device={settings.device!r}, and the library computes on a CPU"
    elif settings.dtype == "float64":
        reason = f"dtype is {dtypes}: set dtype"
    elif settings.kv_cache_dtype == "float64":
        reason = f"kv_cache_dtype is {dtypes}, int8: set kv_cache_dtype"
    else:
        return
    raise ConfigError(f"attention='native' is unavailable: {reason}; or set attention='auto'")


def _check_quantization(settings: EngineSettings) -> None:
    """Refuse quantized weights for settings that cannot use them."""
    quantization = settings.quantization
    if quantization is None:
        return
    if quantization.endswith("a8") and settings.activation_dtype == "float":
        raise ConfigError(
            f"quantization={quantization!r} with activation_dtype='float': it means activations of "
            f"8 bits; set quantization={'int' + quantization[1]!r}, or activation_dtype='auto'"
        )
    for name, value in (("device", "cpu"), ("forward", "auto")):
        given = getattr(settings, name)
        if given != value and given != "packed":
            raise ConfigError(
                f"quantization={quantization!r} with {name}={given!r}: quantized weights "
                f"are packed, for a CPU; set {name}={value!r}, or quantization=None"
            )


def _check_images(settings: EngineSettings) -> None:
    limits = settings.limit_mm_per_prompt
    if set(limits) - {"image", "video", "audio"}:
        raise ConfigError(f"limit_mm_per_prompt={limits!r}: must be like {{'image': 16}}")
    check_minimum("limit_mm_per_prompt['image']", settings.max_images, 0)
    for name in ("video", "audio"):
        if limits.get(name, 0):
            raise ConfigError(f"limit_mm_per_prompt={limits!r}: {name} is not served, set 0")
    path = settings.allowed_local_media_path
    if path and not Path(path).is_dir():
        raise ConfigError(f"allowed_local_media_path={path!r}: must be a directory")


def _check_tenant_shares(settings: EngineSettings) -> None:
    for salt, share in settings.tenant_shares.items():
        if not isinstance(salt, str) or not isinstance(share, TenantShare):
            raise ConfigError(
                f"tenant_shares[{salt!r}]={share!r}: must map a cache_salt, a str, to a "
                "TenantShare(guaranteed=..., quota=...)"
            )


def _check_tiers(settings: EngineSettings) -> None:
    host_bytes, remote = settings.kv_host_bytes, settings.kv_remote
    if host_bytes is not None and settings.device.partition(":")[0] == "cpu":
        raise ConfigError(
            f"kv_host_bytes={host_bytes:,} with device={settings.device!r}: the pool is host "
            "memory already; leave it out, and raise num_blocks or kv_cache_memory, or set "
            "kv_cache_dtype='int8' for 1.9 times as many tokens"
        )
    if settings.kv_disk_bytes_per_day is not None and settings.kv_disk is None:
        raise ConfigError(
            f"kv_disk_bytes_per_day={settings.kv_disk_bytes_per_day} without kv_disk: nothing "
            "is written; set kv_disk to a folder"
        )
    if remote is not None and settings.is_sealed and settings.kv_secret_file is None:
        raise ConfigError(
            f"kv_remote={remote!r} with sealed records needs a secret that all engines "
            "share: set kv_secret_file to a file of 16 random bytes or more, or "
            "kv_sealed=False"
        )
    _check_address("kv_remote", remote, "redis://127.0.0.1:6379/0")
    if settings.has_tiers and not settings.enable_prefix_caching:
        raise ConfigError(
            f"kv_host_bytes={host_bytes}, kv_disk={settings.kv_disk!r}, kv_remote={remote!r} and "
            "enable_prefix_caching=False: nothing is cached, so there is nothing to keep; "
            "change one of them"
        )


def _check_address(name: str, value: str | None, example: str) -> None:
    if value is not None and "://" not in value:
        raise ConfigError(f"{name}={value!r}: must be like {example!r}")


def _check_kv_events(settings: EngineSettings) -> None:
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        _check_address(name, getattr(settings, name), "tcp://127.0.0.1:5557")
    endpoint = settings.kv_events_endpoint
    if endpoint is None:
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(settings, name):
                raise ConfigError(
                    f"{name}={getattr(settings, name)!r} without kv_events_endpoint: no KV events "
                    "are published; set it, to 'tcp://127.0.0.1:5557' for instance"
                )
        return
    if not settings.enable_prefix_caching:
        raise ConfigError(
            f"kv_events_endpoint={endpoint!r} and enable_prefix_caching=False: nothing is "
            "cached, so there are no KV events; change one of them"
        )
    if settings.keep_event_batches == 0:
        raise ConfigError(
            f"kv_events_endpoint={endpoint!r} and keep_event_batches=0, which makes no KV "
            "events: set it to 1 or more, or leave it out"
        )
    any_port = endpoint.endswith((":0", ":*"))
    if settings.kv_events_replay_endpoint == endpoint and not any_port:
        raise ConfigError(
            f"kv_events_endpoint and kv_events_replay_endpoint are both {endpoint!r}: each "
            "socket needs its own address"
        )

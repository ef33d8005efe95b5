"""Checks the settings of an engine: each alone, then those that contradict each other."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from ostinato.core.config import at_least, one_of
from ostinato.core.errors import ConfigError
from ostinato.engine.settings.settings import EngineSettings
from ostinato.runner.settings import MAX_LORA_RANK, NATIVE_BLOCK, QuantizationName
from ostinato.settings import TenantShare

_CHOICES = {
    field.name: get_args(field.type)
    for field in fields(EngineSettings)
    if get_origin(field.type) is Literal
}

_SWITCHES = [field.name for field in fields(EngineSettings) if field.type is bool]

_LEAST = {
    "seed": 0,
    "max_logprobs": -1,
    "stream_interval": 1,
    "keep_texts_bytes": 0,
    "ledger_bytes": 0,
    "max_loras": 1,
    "max_lora_rank": 1,
    "max_lora_bytes": 1,
    "mm_encoder_cache_bytes": 0,
    "max_image_pixels": 1,
    "max_prompt_pixels": 1,
    "max_image_bytes": 1,
    "kv_disk_bytes": 1,
}

_LEAST_IF_GIVEN = (
    *("num_blocks", "num_state_slots", "kv_cache_memory", "max_model_len"),
    *("kv_host_bytes", "kv_disk_bytes_per_day"),
)

_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "revision": (str, "a branch, tag or commit"),
    "tokenizer": ((str, Path), "a name or a directory"),
    "record_trace": ((str, Path), "the path of a file"),
    "kv_disk": ((str, Path), "the path of a folder"),
    "kv_secret_file": ((str, Path), "a path"),
}


def check_settings(settings: EngineSettings) -> None:
    """Check the settings that the engine reads; those of cache and scheduler check themselves.

    Raises:
        ConfigError: A value is out of range or unknown, or two contradict each other.
    """
    _check_each(settings)
    if settings.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(f"max_lora_rank={settings.max_lora_rank}: at most {MAX_LORA_RANK}")
    if settings.num_blocks is not None and settings.kv_cache_memory is not None:
        raise ConfigError(
            f"num_blocks={settings.num_blocks} and kv_cache_memory={settings.kv_cache_memory} both "
            "size the pool: give one of them"
        )
    _check_quantization(settings)
    _check_native_attention(settings)
    _check_kv_events(settings)
    _check_images(settings)
    _check_tiers(settings)
    _check_tenant_shares(settings)


def _check_each(settings: EngineSettings) -> None:
    """Refuse values of the wrong type or out of range."""
    for name, choices in _CHOICES.items():
        one_of(name, getattr(settings, name), choices)
    for name, least in _LEAST.items():
        at_least(name, getattr(settings, name), least)
    for name in _LEAST_IF_GIVEN:
        if getattr(settings, name) is not None:
            at_least(name, getattr(settings, name), 1)
    for name in _SWITCHES:
        if not isinstance(getattr(settings, name), bool):
            raise ConfigError(f"{name}={getattr(settings, name)!r}: must be True or False")
    for name, (types, meaning) in _TYPES.items():
        value = getattr(settings, name)
        if value is not None and not isinstance(value, types):
            raise ConfigError(f"{name}={value!r:.80}: must be {meaning}")
    share = settings.audit_share
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ConfigError(f"audit_share={share!r}: must be a number from 0 to 1")


def _check_native_attention(settings: EngineSettings) -> None:
    """Refuse ``native`` for settings that the library does not support."""
    if settings.attention != "native":
        return
    at_least("block_size", settings.block_size, 1)
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
    if quantization not in (names := get_args(QuantizationName)):
        raise ConfigError(
            f"quantization={quantization!r}: must be one of {', '.join(names)}, or None; "
            "a checkpoint that came quantized is loaded as its config says"
        )
    for name, value in (("device", "cpu"), ("forward", "auto")):
        given = getattr(settings, name)
        if given != value and given != "packed":
            raise ConfigError(
                f"quantization={quantization!r} with {name}={given!r}: quantized weights "
                f"are packed, for a CPU; set {name}={value!r}, or quantization=None"
            )


def _check_images(settings: EngineSettings) -> None:
    limits, domains = settings.limit_mm_per_prompt, settings.allowed_media_domains
    if not isinstance(limits, Mapping) or set(limits) - {"image", "video", "audio"}:
        raise ConfigError(f"limit_mm_per_prompt={limits!r}: must be like {{'image': 16}}")
    at_least("limit_mm_per_prompt['image']", settings.max_images, 0)
    for name in ("video", "audio"):
        if limits.get(name, 0):
            raise ConfigError(f"limit_mm_per_prompt={limits!r}: {name} is not served, set 0")
    timeout_s = settings.media_timeout_s
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ConfigError(f"media_timeout_s={timeout_s!r}: must be above 0")
    if isinstance(domains, str) or not all(isinstance(name, str) for name in domains):
        raise ConfigError(f"allowed_media_domains={domains!r}: must be a list of hosts")
    path = settings.allowed_local_media_path
    if not isinstance(path, str) or (path and not Path(path).is_dir()):
        raise ConfigError(f"allowed_local_media_path={path!r}: must be a directory")


def _check_tenant_shares(settings: EngineSettings) -> None:
    if not isinstance(settings.tenant_shares, Mapping):
        raise ConfigError(f"tenant_shares={settings.tenant_shares!r}: must map salts to shares")
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
    if settings.kv_sealed not in (None, False, True):
        raise ConfigError(f"kv_sealed={settings.kv_sealed!r}: must be True, False or None")
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


def _check_address(name: str, value: object, example: str) -> None:
    if value is not None and (not isinstance(value, str) or "://" not in value):
        raise ConfigError(f"{name}={value!r}: must be like {example!r}")


def _check_kv_events(settings: EngineSettings) -> None:
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        _check_address(name, getattr(settings, name), "tcp://127.0.0.1:5557")
    if not isinstance(settings.kv_events_topic, str):
        raise ConfigError(f"kv_events_topic={settings.kv_events_topic!r}: must be a string")
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

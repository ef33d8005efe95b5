"""The checked settings of an engine, and those of its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_settings, shared_settings
from ostinato.engine.settings.setting_checks import check_combinations
from ostinato.engine.settings.settings import DEFAULT_MODEL, EngineSettings
from ostinato.engine.settings.vllm_keywords import translate_settings
from ostinato.images.media import MediaLimits
from ostinato.plugins.loading import is_plugin
from ostinato.settings import PrefixCacheConfig, StateConfig, WindowConfig

_ALIASES = {"half": "float16", "float": "float32", "int8_per_token_head": "int8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """Settings that were checked; ``EngineSettings`` describes each."""

    def __post_init__(self) -> None:
        """Check the settings, before a model is loaded.

        Raises:
            ConfigError: A value is out of range or unknown, or two contradict each other.
        """
        for name in ("dtype", "kv_cache_dtype"):
            alias = _ALIASES.get(str(getattr(self, name)))
            if alias is not None:
                object.__setattr__(self, name, alias)
        check_settings(self)
        check_combinations(self)
        self.cache(self.num_blocks or 2**31)
        self.scheduler(self.max_model_len or 1)

    @classmethod
    def of(cls, model: str | Path, settings: Mapping[str, Any]) -> "EngineConfig":
        """Return the settings given as keywords, by their names here or in vLLM.

        Raises:
            ConfigError: There is no such setting, vLLM's is not supported, or a value is invalid.
        """
        if not isinstance(model, (str, Path)):
            raise ConfigError(f"model={model!r}: must be a name or a directory")
        known = [setting.name for setting in fields(cls)]
        return cls(model=str(model), **translate_settings(settings, known))

    @property
    def keywords(self) -> dict[str, Any]:
        """The settings as keywords of ``LLM`` and ``AsyncLLM``."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    @property
    def media(self) -> MediaLimits:
        """What images may be fetched and decoded."""
        return MediaLimits(**shared_settings(self, MediaLimits))

    def cache(
        self,
        num_blocks: int,
        windows: tuple[WindowConfig, ...] = (),
        reserved_blocks: int = 0,
        states: StateConfig | None = None,
    ) -> PrefixCacheConfig:
        """Return the cache's settings for pools of that size; built-in names for plug-ins."""
        given = shared_settings(self, PrefixCacheConfig) | {
            "num_blocks": num_blocks,
            "reserved_blocks": reserved_blocks,
            "keep_event_batches": self.num_kept_event_batches,
        }
        if is_plugin(self.index):
            given["index"] = "radix"
        if is_plugin(self.eviction_policy):  # no ghost can make its estimates
            given |= {"eviction_policy": "lru", "ghost_blocks": 0}
        shares = {salt.encode(): share for salt, share in self.tenant_shares.items()}
        return PrefixCacheConfig(windows=windows, states=states, tenant_shares=shares, **given)

    def longest(self, limit: int, reason: str) -> int:
        """Return the longest sequence's tokens, at most the model's ``limit`` for a ``reason``."""
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={self.max_model_len} is above the {limit} tokens that "
                f"{self.model!r} can do ({reason}): lower max_model_len"
            )
        return self.max_model_len or limit

    def scheduler(self, max_model_len: int) -> SchedulerConfig:
        """Return the scheduler's settings for sequences of that length."""
        given = shared_settings(self, SchedulerConfig) | {"max_model_len": max_model_len}
        if is_plugin(self.order):
            given["order"] = "fcfs"
        return SchedulerConfig(**given)


class EngineArgs(EngineConfig):
    """The settings of an engine under vLLM's name of the class.

    ``LLM(**dataclasses.asdict(args))`` and ``AsyncLLM.from_engine_args(args)`` take them.
    """

    __slots__ = ()

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        """Check settings by their names here or in vLLM; raises as ``EngineConfig.of``."""
        EngineConfig.__init__(self, **EngineConfig.of(model, settings).keywords)


class AsyncEngineArgs(EngineArgs):
    """vLLM's name of the settings of ``AsyncLLM``."""

    __slots__ = ()

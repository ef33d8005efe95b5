"""The checked settings of an engine, and those of its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from ostinato.core.config import SchedulerConfig, WaitingOrder
from ostinato.core.errors import ConfigError
from ostinato.engine.settings.setting_checks import check_settings
from ostinato.engine.settings.settings import DEFAULT_MODEL, EngineSettings
from ostinato.engine.settings.vllm_keywords import translate_settings
from ostinato.images.media import MediaLimits
from ostinato.plugins.loading import is_plugin
from ostinato.settings import IndexName, PolicyName, PrefixCacheConfig, StateConfig, WindowConfig

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
        return MediaLimits(
            self.allowed_local_media_path,
            tuple(self.allowed_media_domains),
            self.max_image_bytes,
            self.max_image_pixels,
            self.max_prompt_pixels,
            self.media_timeout_s,
        )

    def cache(
        self,
        num_blocks: int,
        windows: tuple[WindowConfig, ...] = (),
        reserved_blocks: int = 0,
        states: StateConfig | None = None,
    ) -> PrefixCacheConfig:
        """Return the cache's settings for pools of that size; built-in ones beside a plug-in."""
        plugs_policy = is_plugin(self.eviction_policy)  # whose estimates no ghost can make
        return PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            index=cast(IndexName, "radix" if is_plugin(self.index) else self.index),
            free_order=self.free_order,
            policy=cast(PolicyName, "lru" if plugs_policy else self.eviction_policy),
            digest=self.digest,
            enable_prefix_caching=self.enable_prefix_caching,
            seal_tails=self.seal_tails,
            windows=windows,
            states=states,
            tenant_shares={salt.encode(): share for salt, share in self.tenant_shares.items()},
            reserved_blocks=reserved_blocks,
            keep_event_batches=self.num_kept_event_batches,
            keep_explanations=self.keep_explanations,
            ghost_blocks=0 if plugs_policy else self.ghost_blocks,
            ghost_share=self.ghost_share,
        )

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
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_step_ms=self.max_step_ms,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            order=cast(WaitingOrder, "fcfs" if is_plugin(self.order) else self.order),
            max_overtakes=self.max_overtakes,
        )


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

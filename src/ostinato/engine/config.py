"""The settings of an engine: one flat set of keywords for ``LLM``, ``AsyncLLM`` and the shell.

The settings of cache and scheduler derive from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ostinato.core.config import SchedulerConfig, WaitingOrder, at_least, one_of
from ostinato.core.errors import ConfigError
from ostinato.engine.vllm_keywords import translate_settings
from ostinato.images.media import MediaLimits
from ostinato.runner.settings import (
    MAX_LORA_RANK,
    NATIVE_BLOCK,
    AttentionName,
    ForwardName,
    QuantizationName,
    ReadOnce,
)
from ostinato.settings import (
    DigestName,
    FreeOrder,
    IndexName,
    PolicyName,
    PrefixCacheConfig,
    StateConfig,
    TenantShare,
    WindowConfig,
)

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64", "int8"]

_ALIASES = {"half": "float16", "float": "float32"}
_KV_ALIASES = {**_ALIASES, "int8_per_token_head": "int8"}

MOST_IMAGES = 16
"""Most images of a prompt, by default."""

KEPT_EVENT_BATCHES = 10_000
"""Batches kept for consumers that missed some, by default, if KV events are published."""

DEFAULT_MODEL = "tiny-shakespeare"
"""The model that ships with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        model: Embedded model, checkpoint directory or hub name.
        revision: Branch, tag or commit of a model on the hub; None is its main branch.
        tokenizer: Directory or hub name of another tokenizer; None is the model's own.
        dtype: The dtype to compute in; ``auto`` is the checkpoint's. ``half`` and ``float`` are
            other names of ``float16`` and ``float32``.
        kv_cache_dtype: The dtype of keys and values; ``auto`` is the model's. ``int8``, which vLLM
            calls ``int8_per_token_head``, keeps about 1.9 times as many tokens as ``bfloat16`` in
            the same memory.
        device: Where to compute, as torch names it.
        attention: Attention by the ``native`` library, plain ``torch``, or ``auto``: the library
            where it can.
        forward: How steps are computed on a CPU: ``auto`` packs weights and fuses the operations
            between products where the result is the same, ``packed`` only packs, ``plain`` does
            neither.
        quantization: In how many bits linear layers keep their weights, ``int8`` or ``int4``, with
            activations of 8 bits ``w8a8`` or ``w4a8``; None leaves them as the checkpoint has them.
        index: ``radix`` or ``hash``.
        block_size: Tokens per block.
        num_blocks: Blocks in the pool; None takes them from ``kv_cache_memory``.
        num_state_slots: States in the pool, of running sequences and of checkpoints, for models
            with layers that carry one; None takes them from ``kv_cache_memory``.
        kv_cache_memory: Bytes for keys and values, and for states; None takes a share of the free
            memory.
        max_num_batched_tokens: Token budget of one step.
        max_chunk_tokens: Most tokens of one prompt in a step; None lets it take all that is
            left, and no request is admitted while a long prompt is computed.
        max_num_seqs: Most sequences that run at once.
        max_model_len: Most tokens of a sequence; None is the model's own limit.
        max_logprobs: The highest ``SamplingParams.logprobs``; -1
            allows the whole vocabulary, each a Python object.
        stream_interval: New tokens that make an output of a stream; more cost less time around the
            model.
        enable_prefix_caching: Off, every prompt is computed in full.
        order: ``fcfs``, ``longest_prefix``, ``depth_first`` or ``fair_share``.
        max_overtakes: How often a waiting request may be overtaken, except with ``fcfs``.
        free_order: ``unused_first`` or ``classic``.
        eviction_policy: Which cached block is worth least.
        digest: Content hash of the hash index.
        seal_tails: Keep the partial last block of an ended sequence findable.
        read_once: Whether blocks that sequences of a step share are read once for all of them:
            where that is cheaper (``auto``), ``always`` or ``never``.
        tenant_shares: Guaranteed blocks and quotas, by the ``cache_salt`` of a tenant's requests.
        keep_event_batches: Batches of KV events kept for consumers that missed some; 0 makes
            no events, None keeps 10,000 if they are published and none otherwise.
        keep_explanations: Sequences that are remembered so that misses can be explained; 0
            remembers nothing.
        keep_tokens: Whether text that is known keeps its tokens, generated ones included; off,
            every prompt is tokenized as a whole.
        keep_texts_bytes: Memory for texts with their tokens, of all tenants together.
        ghost_blocks: The most blocks of the small cache that simulates the whole one, for estimates
            of more memory or another policy; 0 makes no estimates, None takes 128 where the cache
            has 64 blocks or more.
        ghost_share: Processor time of estimates in the long run, about, as a share of the cache's;
            1 samples all the time.
        kv_events_endpoint: Where to publish KV events over ZeroMQ, such as
            ``tcp://127.0.0.1:5557``; None publishes none. They carry token ids: anyone who can
            connect can read prompts.
        kv_events_replay_endpoint: Where consumers request batches that they missed; None
            answers none.
        kv_events_topic: First frame of every message with KV events.
        kv_host_bytes: Most bytes of host memory for prefixes that the pool of a ``device`` evicts;
            None keeps none there.
        kv_disk: Folder of a disk tier: prefixes that outlive the pool and the process; None keeps
            none.
        kv_disk_bytes: Most bytes that it may occupy.
        kv_disk_bytes_per_day: Most bytes that may be written to it in a day, for the life of an
            SSD; None is no bound.
        kv_remote: Server of a remote tier that several engines share, such as
            ``redis://127.0.0.1:6379/0``; None uses none.
        kv_sealed: Whether what is on disk and server is encrypted with a key per tenant, which
            erasing the tenant destroys; None seals where there are ``tenant_shares``, or keys of a
            server.
        kv_secret_file: File of 16 random bytes or more that is mixed into the keys, the same for
            all engines of a ``kv_remote``; None keeps one in the folder of ``kv_disk``.
        audit_share: Share of the requests with a hit whose cached keys and values are computed
            again in idle moments and compared bit by bit; 0 audits none.
        audit_quarantine: Whether a prefix that an audit finds wrong is removed from the cache.
        record_trace: Where to record what happens, for ``ostinato simulate``: times, lengths
            and pseudonyms, no content; None records nothing until a recording is started.
        limit_mm_per_prompt: Most images of a prompt, as ``{"image": 16}``; 0 serves text alone
            and leaves the encoder out of memory.
        mm_encoder_cache_bytes: Memory for what the encoder has made of images.
        max_image_pixels: Most pixels of an image; more are refused before they are decoded.
        max_image_bytes: Longest file of an image.
        media_timeout_s: Time to fetch an image's URL, redirects included.
        allowed_local_media_path: Directory below which conversations may name images as
            ``file://`` URLs; empty reads none.
        allowed_media_domains: Hosts from which they may name images as URLs; ``*`` is every host
            with a public address, empty fetches none. Data URIs are always read.
        seed: Of the generator of seeds, for requests without one.
        enable_lora: Whether LoRA adapters may be loaded.
        max_loras: Most adapters that are loaded at once; all of them may be in one batch.
        max_lora_rank: Highest rank of an adapter, at most 512.
        max_lora_bytes: Memory for the weights of all adapters.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    tokenizer: str | Path | None = None
    dtype: DtypeName = "auto"
    kv_cache_dtype: KVDtypeName = "auto"
    device: str = "cpu"
    attention: AttentionName = "auto"
    forward: ForwardName = "auto"
    quantization: QuantizationName | None = None
    index: IndexName = "radix"
    block_size: int = 16
    num_blocks: int | None = None
    num_state_slots: int | None = None
    kv_cache_memory: int | None = None
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    max_logprobs: int = 20
    stream_interval: int = 1
    enable_prefix_caching: bool = True
    order: WaitingOrder = "fcfs"
    max_overtakes: int = 64
    free_order: FreeOrder = "unused_first"
    eviction_policy: PolicyName = "reuse_hazard"
    digest: DigestName = "sha256"
    seal_tails: bool = True
    read_once: ReadOnce = "auto"
    tenant_shares: Mapping[str, TenantShare] = field(default_factory=dict)
    keep_event_batches: int | None = None
    keep_explanations: int = 1000
    keep_tokens: bool = True
    keep_texts_bytes: int = 64 * 2**20
    ghost_blocks: int | None = None
    ghost_share: float = 0.01
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    kv_host_bytes: int | None = None
    kv_disk: str | Path | None = None
    kv_disk_bytes: int = 16 * 2**30
    kv_disk_bytes_per_day: int | None = None
    kv_remote: str | None = None
    kv_sealed: bool | None = None
    kv_secret_file: str | Path | None = None
    audit_share: float = 0.0
    audit_quarantine: bool = True
    record_trace: str | Path | None = None
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    mm_encoder_cache_bytes: int = 256 * 2**20
    max_image_pixels: int = 2**25
    max_image_bytes: int = 20 * 2**20
    media_timeout_s: float = 5.0
    allowed_local_media_path: str = ""
    allowed_media_domains: Sequence[str] = ()
    seed: int = 0
    enable_lora: bool = False
    max_loras: int = 16
    max_lora_rank: int = 64
    max_lora_bytes: int = 2**30

    def __post_init__(self) -> None:
        """Check the settings, before a model is loaded.

        Raises:
            ConfigError: A value is out of range or unknown, or two contradict each other.
        """
        for name, known, aliases in (
            ("dtype", DtypeName, _ALIASES),
            ("kv_cache_dtype", KVDtypeName, _KV_ALIASES),
        ):
            alias = aliases.get(str(getattr(self, name)))
            if alias is not None:
                object.__setattr__(self, name, alias)
            one_of(name, getattr(self, name), get_args(known))
        one_of("attention", self.attention, get_args(AttentionName))
        one_of("forward", self.forward, get_args(ForwardName))
        self._check_quantization()
        one_of("read_once", self.read_once, get_args(ReadOnce))
        at_least("seed", self.seed, 0)
        at_least("max_logprobs", self.max_logprobs, -1)
        at_least("stream_interval", self.stream_interval, 1)
        at_least("keep_texts_bytes", self.keep_texts_bytes, 0)
        if self.revision is not None and not isinstance(self.revision, str):
            raise ConfigError(f"revision={self.revision!r}: must be a branch, tag or commit")
        if self.tokenizer is not None and not isinstance(self.tokenizer, (str, Path)):
            raise ConfigError(f"tokenizer={self.tokenizer!r:.80}: must be a name or a directory")
        self._check_attention()
        if not isinstance(self.audit_share, (int, float)) or not 0 <= self.audit_share <= 1:
            raise ConfigError(f"audit_share={self.audit_share!r}: must be a number from 0 to 1")
        for name in ("max_loras", "max_lora_rank", "max_lora_bytes"):
            at_least(name, getattr(self, name), 1)
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank={self.max_lora_rank}: at most {MAX_LORA_RANK}")
        for name in (
            "enable_prefix_caching", "seal_tails", "keep_tokens", "audit_quarantine", "enable_lora"
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")
        for name in ("num_blocks", "num_state_slots", "kv_cache_memory", "max_model_len"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError(
                f"num_blocks={self.num_blocks} and kv_cache_memory={self.kv_cache_memory} both "
                "size the pool: give one of them"
            )
        if self.record_trace is not None and not isinstance(self.record_trace, (str, Path)):
            raise ConfigError(f"record_trace={self.record_trace!r}: must be the path of a file")
        self._check_kv_events()
        self._check_images()
        self._check_tiers()
        self._check_tenant_shares()
        self.cache(self.num_blocks or 2**31)
        self.scheduler(self.max_model_len or 1)

    @classmethod
    def of(cls, model: str | Path, settings: Mapping[str, Any]) -> "EngineConfig":
        """Return the settings given as keywords, by their names here or in vLLM.

        Raises:
            ConfigError: There is no such setting (the message names the nearest one), it is one of
                vLLM's that is not supported (the message says why), or a value is invalid.
        """
        if not isinstance(model, (str, Path)):
            raise ConfigError(f"model={model!r}: must be a name or a directory")
        known = [setting.name for setting in fields(cls)]
        return cls(model=str(model), **translate_settings(settings, known))

    @property
    def num_kept_event_batches(self) -> int:
        """Batches of KV events that the cache keeps; 0 makes no events."""
        if self.keep_event_batches is not None:
            return self.keep_event_batches
        return 0 if self.kv_events_endpoint is None else KEPT_EVENT_BATCHES

    @property
    def max_images(self) -> int:
        """Most images of a prompt."""
        return self.limit_mm_per_prompt.get("image", MOST_IMAGES)

    @property
    def media(self) -> MediaLimits:
        """What images may be fetched and decoded."""
        return MediaLimits(
            self.allowed_local_media_path,
            tuple(self.allowed_media_domains),
            self.max_image_bytes,
            self.max_image_pixels,
            self.media_timeout_s,
        )

    def cache(
        self,
        num_blocks: int,
        windows: tuple[WindowConfig, ...] = (),
        reserved_blocks: int = 0,
        states: StateConfig | None = None,
    ) -> PrefixCacheConfig:
        """Return the cache's settings for pools of that size."""
        return PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            index=self.index,
            free_order=self.free_order,
            policy=self.eviction_policy,
            digest=self.digest,
            enable_prefix_caching=self.enable_prefix_caching,
            seal_tails=self.seal_tails,
            windows=windows,
            states=states,
            tenant_shares={salt.encode(): share for salt, share in self.tenant_shares.items()},
            reserved_blocks=reserved_blocks,
            keep_event_batches=self.num_kept_event_batches,
            keep_explanations=self.keep_explanations,
            ghost_blocks=self.ghost_blocks,
            ghost_share=self.ghost_share,
        )

    def longest(self, limit: int, reason: str) -> int:
        """Return the length of the longest sequence.

        Args:
            limit: Most tokens that the model supports.
            reason: What limits it.

        Raises:
            ConfigError: ``max_model_len`` is above it.
        """
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
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            order=self.order,
            max_overtakes=self.max_overtakes,
        )

    def _check_attention(self) -> None:
        """Refuse ``native`` where the library can never compute."""
        if self.attention != "native":
            return
        at_least("block_size", self.block_size, 1)
        hindrances = {
            f"block_size={self.block_size} must be a multiple of {NATIVE_BLOCK}: set block_size": (
                self.block_size % NATIVE_BLOCK
            ),
            f"device={self.device!r}, and the library computes on a CPU": self.device != "cpu",
        }
        for name, int8 in (("dtype", ""), ("kv_cache_dtype", ", int8")):
            known = f"the library knows float32, bfloat16, float16{int8}"
            hindrances[f"{name} is float64, and {known}: set {name}"] = (
                getattr(self, name) == "float64"
            )
        for hindrance, holds in hindrances.items():
            if holds:
                raise ConfigError(
                    f"attention='native' cannot be had: {hindrance}; or set attention='auto'"
                )

    def _check_quantization(self) -> None:
        """Refuse quantized weights where they could never be computed with."""
        if self.quantization is None:
            return
        if self.quantization not in (names := get_args(QuantizationName)):
            raise ConfigError(
                f"quantization={self.quantization!r}: must be one of {', '.join(names)}, or None; "
                "a checkpoint that came quantized is loaded as its config says"
            )
        for name, value in (("device", "cpu"), ("forward", "auto")):
            given = getattr(self, name)
            if given != value and given != "packed":
                raise ConfigError(
                    f"quantization={self.quantization!r} with {name}={given!r}: quantized weights "
                    f"are packed, for a CPU; set {name}={value!r}, or quantization=None"
                )

    def _check_images(self) -> None:
        limits, domains = self.limit_mm_per_prompt, self.allowed_media_domains
        if not isinstance(limits, Mapping) or set(limits) - {"image", "video", "audio"}:
            raise ConfigError(f"limit_mm_per_prompt={limits!r}: must be like {{'image': 16}}")
        at_least("limit_mm_per_prompt['image']", self.max_images, 0)
        for name in ("video", "audio"):
            if limits.get(name, 0):
                raise ConfigError(f"limit_mm_per_prompt={limits!r}: {name} is not served, set 0")
        at_least("mm_encoder_cache_bytes", self.mm_encoder_cache_bytes, 0)
        for name in ("max_image_pixels", "max_image_bytes"):
            at_least(name, getattr(self, name), 1)
        if not isinstance(self.media_timeout_s, (int, float)) or not self.media_timeout_s > 0:
            raise ConfigError(f"media_timeout_s={self.media_timeout_s!r}: must be above 0")
        if isinstance(domains, str) or not all(isinstance(name, str) for name in domains):
            raise ConfigError(f"allowed_media_domains={domains!r}: must be a list of hosts")
        path = self.allowed_local_media_path
        if not isinstance(path, str) or (path and not Path(path).is_dir()):
            raise ConfigError(f"allowed_local_media_path={path!r}: must be a directory")

    def _check_tenant_shares(self) -> None:
        if not isinstance(self.tenant_shares, Mapping):
            raise ConfigError(f"tenant_shares={self.tenant_shares!r}: must map salts to shares")
        for salt, share in self.tenant_shares.items():
            if not isinstance(salt, str) or not isinstance(share, TenantShare):
                raise ConfigError(
                    f"tenant_shares[{salt!r}]={share!r}: must map a cache_salt, a str, to a "
                    "TenantShare(guaranteed=..., quota=...)"
                )

    def _check_tiers(self) -> None:
        """Check the settings of tiers, each and together."""
        if self.kv_host_bytes is not None:
            at_least("kv_host_bytes", self.kv_host_bytes, 1)
            if self.device.partition(":")[0] == "cpu":
                raise ConfigError(
                    f"kv_host_bytes={self.kv_host_bytes:,} with device={self.device!r}: the pool "
                    "is host memory already; leave it out, and raise num_blocks or "
                    "kv_cache_memory, or set kv_cache_dtype='int8' for 1.9 times as many tokens"
                )
        at_least("kv_disk_bytes", self.kv_disk_bytes, 1)
        if self.kv_disk is not None and not isinstance(self.kv_disk, (str, Path)):
            raise ConfigError(f"kv_disk={self.kv_disk!r}: must be the path of a folder")
        if self.kv_disk_bytes_per_day is not None:
            at_least("kv_disk_bytes_per_day", self.kv_disk_bytes_per_day, 1)
            if self.kv_disk is None:
                raise ConfigError(
                    f"kv_disk_bytes_per_day={self.kv_disk_bytes_per_day} without kv_disk: nothing "
                    "is written; set kv_disk to a folder"
                )
        if self.kv_sealed not in (None, False, True):
            raise ConfigError(f"kv_sealed={self.kv_sealed!r}: must be True, False or None")
        if self.kv_secret_file is not None and not isinstance(self.kv_secret_file, (str, Path)):
            raise ConfigError(f"kv_secret_file={self.kv_secret_file!r}: must be a path")
        if self.kv_remote is not None and self.is_sealed and self.kv_secret_file is None:
            raise ConfigError(
                f"kv_remote={self.kv_remote!r} with sealed records needs a secret that all engines "
                "share: set kv_secret_file to a file of 16 random bytes or more, or "
                "kv_sealed=False"
            )
        if self.kv_remote is not None and (
            not isinstance(self.kv_remote, str) or "://" not in self.kv_remote
        ):
            raise ConfigError(
                f"kv_remote={self.kv_remote!r}: must be like 'redis://127.0.0.1:6379/0'"
            )
        if self.has_tiers and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_host_bytes={self.kv_host_bytes}, kv_disk={self.kv_disk!r}, "
                f"kv_remote={self.kv_remote!r} and enable_prefix_caching=False: nothing is cached, "
                "so there is nothing to keep; change one of them"
            )

    @property
    def is_sealed(self) -> bool:
        """Whether what is kept outside the pool is encrypted."""
        return bool(self.tenant_shares) if self.kv_sealed is None else self.kv_sealed

    @property
    def has_tiers(self) -> bool:
        """Whether prefixes are kept outside the pool."""
        return any(x is not None for x in (self.kv_host_bytes, self.kv_disk, self.kv_remote))

    def _check_kv_events(self) -> None:
        """Check the settings of KV events, each and together."""
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or "://" not in value):
                raise ConfigError(f"{name}={value!r}: must be like 'tcp://127.0.0.1:5557'")
        if not isinstance(self.kv_events_topic, str):
            raise ConfigError(f"kv_events_topic={self.kv_events_topic!r}: must be a string")
        if self.kv_events_endpoint is None:
            self._check_nothing_is_published()
        else:
            self._check_something_is_published(self.kv_events_endpoint)

    def _check_nothing_is_published(self) -> None:
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} without kv_events_endpoint: no KV events "
                    "are published; set it, to 'tcp://127.0.0.1:5557' for instance"
                )

    def _check_something_is_published(self, endpoint: str) -> None:
        if not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_events_endpoint={endpoint!r} and enable_prefix_caching=False: nothing is "
                "cached, so there are no KV events; change one of them"
            )
        if self.keep_event_batches == 0:
            raise ConfigError(
                f"kv_events_endpoint={endpoint!r} and keep_event_batches=0, which makes no KV "
                "events: set it to 1 or more, or leave it out"
            )
        any_port = endpoint.endswith((":0", ":*"))
        if self.kv_events_replay_endpoint == endpoint and not any_port:
            raise ConfigError(
                f"kv_events_endpoint and kv_events_replay_endpoint are both {endpoint!r}: each "
                "socket needs its own address"
            )

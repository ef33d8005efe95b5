"""The settings of an engine: one flat set of keywords for ``LLM``, ``AsyncLLM`` and the shell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ostinato.core.config import WaitingOrder
from ostinato.runner.settings import (
    AttentionName,
    DtypeName,
    ForwardName,
    KVDtypeName,
    QuantizationName,
    ReadOnce,
)
from ostinato.settings import DigestName, FreeOrder, IndexName, PolicyName, TenantShare

MOST_IMAGES = 16
"""Most images of a prompt, by default."""

KEPT_EVENT_BATCHES = 10_000
"""Batches kept for consumers that missed some, by default, if KV events are published."""

DEFAULT_MODEL = "tiny-shakespeare"
"""The model that ships with the package."""


KeepReasoning = Literal["template", "always"]
"""Whether reasoning of earlier turns stays where the chat template drops it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, as given.

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
        max_num_batched_tokens: Most tokens of one step.
        max_chunk_tokens: Most tokens of one prompt in a step; None leaves it to ``max_step_ms``.
        max_step_ms: Milliseconds that a step may take while others decode or wait. Where smaller
            steps would lose more than a tenth of the prompt rate, they are longer. Steps are
            measured, and those of a prompt that is alone are as long as is fastest.
        max_num_seqs: Most sequences that run at once.
        max_model_len: Most tokens of a sequence; None is the model's own limit.
        max_logprobs: The highest ``SamplingParams.logprobs``; -1
            allows the whole vocabulary, each a Python object.
        stream_interval: New tokens that make an output of a stream; more cost less time around the
            model.
        enable_prefix_caching: Off, every prompt is computed in full.
        order: ``shortest_first``, ``fcfs``, ``longest_prefix``, ``depth_first`` or ``fair_share``.
        max_overtakes: How often a waiting request may be overtaken, except with ``fcfs``.
        free_order: ``unused_first`` or ``classic``.
        eviction_policy: Which cached block is evicted first.
        digest: Content hash of the hash index.
        seal_tails: Keep the partial last block of an ended sequence findable.
        read_once: Whether blocks that sequences of a step share are read once for all of them:
            where that is cheaper (``auto``), ``always`` or ``never``.
        tenant_shares: Guaranteed blocks and quotas, by the ``cache_salt`` of a tenant's requests.
        keep_event_batches: Batches of KV events kept for consumers that missed some; 0 makes
            no events, None keeps 10,000 if they are published and none otherwise.
        keep_explanations: Sequences that are remembered so that misses can be explained; 0
            remembers nothing.
        keep_tokens: Whether known text keeps its tokens, generated ones included; off, every
            prompt is tokenized as a whole.
        keep_texts_bytes: Memory for texts with their tokens, of all tenants together.
        ledger_bytes: Memory for turns that the model wrote, of all tenants together, which later
            prompts continue; 0 keeps none.
        keep_reasoning: Whether the reasoning of earlier turns is dropped where the chat template
            drops it (``template``), or kept (``always``).
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
        kv_sealed: Whether disk and server hold records encrypted with a key per tenant, which
            erasing the tenant destroys; None encrypts if there are ``tenant_shares``, or keys of
            a server.
        kv_secret_file: File of 16 random bytes or more that is mixed into the keys, the same for
            all engines of a ``kv_remote``; None keeps one in the folder of ``kv_disk``.
        audit_share: Share of the requests with a hit whose cached keys and values are recomputed
            in idle moments and compared bit by bit; 0 audits none.
        audit_quarantine: Whether a prefix that an audit finds wrong is removed from the cache.
        record_trace: Where to record what happens, for ``ostinato simulate``: times, lengths
            and pseudonyms, no content; None records nothing until a recording is started.
        limit_mm_per_prompt: Most images of a prompt, as ``{"image": 16}``; 0 serves text alone
            and leaves the encoder out of memory.
        mm_encoder_cache_bytes: Memory for cached outputs of the image encoder.
        max_image_pixels: Most pixels of an image; more are refused before they are decoded.
        max_prompt_pixels: Most pixels of all images of a conversation.
        max_image_bytes: Largest file of an image.
        media_timeout_s: Time to fetch an image's URL, redirects included.
        allowed_local_media_path: Directory below which conversations may name images as
            ``file://`` URLs; empty reads none.
        allowed_media_domains: Hosts from which they may name images as URLs; ``*`` is every host
            with a public address, empty fetches none. Data URIs are always read.
        seed: Seed of the generator of seeds, for requests without one.
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
    max_step_ms: int = 250
    max_num_seqs: int = 256
    max_model_len: int | None = None
    max_logprobs: int = 20
    stream_interval: int = 1
    enable_prefix_caching: bool = True
    order: WaitingOrder = "shortest_first"
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
    ledger_bytes: int = 64 * 2**20
    keep_reasoning: KeepReasoning = "template"
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
    max_prompt_pixels: int = 2**26
    max_image_bytes: int = 20 * 2**20
    media_timeout_s: float = 5.0
    allowed_local_media_path: str = ""
    allowed_media_domains: Sequence[str] = ()
    seed: int = 0
    enable_lora: bool = False
    max_loras: int = 16
    max_lora_rank: int = 64
    max_lora_bytes: int = 2**30

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
    def is_sealed(self) -> bool:
        """Whether what is kept outside the pool is encrypted."""
        return bool(self.tenant_shares) if self.kv_sealed is None else self.kv_sealed

    @property
    def has_tiers(self) -> bool:
        """Whether prefixes are kept outside the pool."""
        return any(x is not None for x in (self.kv_host_bytes, self.kv_disk, self.kv_remote))

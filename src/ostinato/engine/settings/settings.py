"""The settings of an engine: one flat set of keywords for ``LLM``, ``AsyncLLM`` and the shell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ostinato.core.config import SchedulerConfig
from ostinato.core.setting import same_setting, setting
from ostinato.images.media import MediaLimits
from ostinato.runner.settings import (
    MAX_LORA_RANK,
    ActivationName,
    AttentionName,
    DtypeName,
    ForwardName,
    KVDtypeName,
    QuantizationName,
    ReadOnce,
)
from ostinato.settings import (
    DigestName,
    FreeOrder,
    KeepReasoning,
    PrefixCacheConfig,
    TenantShare,
)

MAX_IMAGES = 16
"""Images of a prompt, by default."""

KEPT_EVENT_BATCHES = 10_000
"""Batches kept for consumers that missed some, by default, if KV events are published."""

IdleRebaseMode = Literal["auto", "off"]
DraftsMode = Literal["auto", "off"]

GENERATION_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"),
    "eos_token_id",
)
"""Values of a checkpoint's generation config that are used."""

DEFAULT_MODEL = "tiny-shakespeare"
"""The model that ships with the package."""

MODEL, COMPUTING, LORA = "Model and cache", "Computing", "LoRA adapters"
"""Groups of settings that matter where one request runs at a time."""

_NAME = "a name, or a class of your own as FILE.py:Class"

_model = partial(setting, group=MODEL)
_computing = partial(setting, group=COMPUTING)
_lora = partial(setting, group=LORA)
_scoring = partial(setting, group="Scoring", page="scoring.md")
_events = partial(setting, group="KV events")
_images = partial(setting, group="Images")
_media = partial(same_setting, MediaLimits, group="Images")
_tiers = partial(setting, group="What outlives the pool")
_cache = partial(same_setting, PrefixCacheConfig, group=MODEL)
_caching = partial(same_setting, PrefixCacheConfig, group="What stays cached")
_scheduling = partial(same_setting, SchedulerConfig, group="Scheduling")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, as given."""

    model: str = setting(DEFAULT_MODEL)
    """Bundled model, checkpoint directory, GGUF file, or name on the hub."""
    revision: str | None = _model(None, kind="a branch, tag or commit")
    """Branch, tag or commit of a model on the hub; by default its main branch."""
    tokenizer: str | Path | None = _model(None, kind="a name or a directory")
    """Directory or hub name of a tokenizer other than the model's own."""
    index: str = _cache("index", page="learn.md", kind=_NAME)
    """Prefix index: ``radix`` (a tree) or ``hash`` (chained digests), which match the same blocks;
    or a class of your own as ``FILE.py:Class``."""
    block_size: int = _cache("block_size")
    num_blocks: int | None = _cache("num_blocks", None)
    """Blocks in the pool, or give ``kv_cache_memory``; else a share of free memory."""
    num_state_slots: int | None = _model(None, minimum=1, page="hybrids.md")
    """State slots, of running sequences and checkpoints, for models with Mamba or linear attention;
    else by ``kv_cache_memory``."""
    kv_cache_memory: int | None = _model(None, minimum=1, unit="bytes")
    """Memory for keys, values and states, such as ``512MiB`` or ``4GB``; else half of the free
    memory, or less if the sequences cannot use it."""
    gpu_memory_utilization: float | None = _model(
        None,
        above=0,
        maximum=1,
        page="gpu.md#memory",
        kind="a share above 0 and up to 1, such as 0.9",
    )
    """Share of a GPU's memory for weights, activations, keys and values, as in vLLM, in place of
    ``kv_cache_memory``; the largest step is measured. On a CPU it means nothing."""
    max_model_len: int | None = same_setting(SchedulerConfig, "max_model_len", None, group=MODEL)
    """Maximum tokens of a sequence, prompt and output together; else the model's own limit."""
    enable_prefix_caching: bool = _cache("enable_prefix_caching")
    keep_tokens: bool = _model(True, page="python.md#kept-tokens")
    """Keep the tokens of earlier answers as they were generated; off, every prompt is tokenized as
    a whole."""

    idle_rebase: IdleRebaseMode = _model("auto", page="agents.md#prompts-computed-while-idle")
    """Whether the prompt that follows an answer is computed in idle steps, up to the user's words,
    where the chat template drops text of earlier turns."""
    generation_config: str | Path = _model(
        "auto", kind="'auto', 'vllm', a file or a directory", page="settings.md#sampling-defaults"
    )
    """Where sampling parameters come from that a request does not give: ``auto`` is the
    checkpoint's ``generation_config.json``, ``vllm`` is none, or another such file or its
    directory."""
    override_generation_config: Mapping[str, Any] = _model(
        factory=dict, kind="like {'temperature': 0.5}"
    )
    """Single values in place of its own, as ``{"temperature": 0.5}``; ``max_new_tokens`` also
    limits every answer of a server."""

    dtype: DtypeName = _computing("auto")
    """Dtype to compute in; ``auto`` is the checkpoint's. GGUF files name none: they are computed in
    ``float32``, and from 1 GiB on in ``bfloat16``."""
    kv_cache_dtype: KVDtypeName = _computing("auto", page="attention.md#keys-and-values-in-8-bits")
    """Format of cached keys and values; ``auto`` is the model's dtype, and ``int8`` keeps about 1.9
    times as many tokens as ``bfloat16`` in the same memory."""
    device: str = _computing("cpu", hint="'cpu' is always there")
    """Device to compute on, as in torch."""
    attention: AttentionName = _computing("auto", page="attention.md")
    """Attention backend; ``auto`` prefers the native library, and ``triton`` on a GPU."""
    forward: ForwardName = _computing("auto", page="forward.md")
    """How steps are computed on a CPU: ``auto`` packs weights and fuses the operations between
    products where the result is the same, ``packed`` only packs, ``plain`` does neither."""
    quantization: QuantizationName | None = _computing(
        None,
        hint="a checkpoint that came quantized is loaded as its config says",
        page="forward.md#weights-of-8-and-4-bits",
    )
    """Keep the weights of linear layers in 8 or 4 bits: ``int8`` or ``int4``; on a CPU with
    activations in 8 bits as well, ``w8a8`` or ``w4a8``."""
    activation_dtype: ActivationName = _computing("auto", page="forward.md#weights-of-8-and-4-bits")
    """What activations become before they are multiplied with weights of 8 or 4 bits: ``int8``,
    with a scale for 32 numbers, which makes prompts faster, or ``float``; ``auto`` is ``int8`` for
    ``w8a8``, ``w4a8`` and, on processors without AMX, GGUF files from 1 GiB on."""
    same_bits: bool = _computing(False, page="gpu.md#the-same-bits-alone-and-in-a-batch")
    """On a GPU, compute each row with the bits that it has alone, in tiles of one size; refuse a
    model where that is not so. On a CPU the native library always does."""
    portable_bits: bool = _computing(False, page="determinism.md#the-same-bits-on-every-processor")
    """Refuse a model whose logits differ from processor to processor, and leave AMX unused: with
    weights of 8 or 4 bits and ``kv_cache_dtype=int8`` they are the same on x86-64 and ARM."""
    weight_cache_bytes: int = _computing(
        32 * 2**30, minimum=0, unit="bytes", page="models.md#packed-weights"
    )
    """Maximum size of the folder of packed weights in the user's cache folder, such as ``64GiB``,
    which a second start maps instead of packing them again; 0 keeps and uses none."""
    drafts: DraftsMode = _computing("auto", page="drafts.md")
    """Whether a step computes several tokens of a sequence where text already seen predicts them:
    ``auto``, where that is faster, or ``off``; answers are the same to the bit."""
    read_once: ReadOnce = _computing("auto")
    """Whether a step reads blocks shared by its sequences only once: ``auto``, where that is
    cheaper, ``always`` or ``never``."""

    score_template: str = _scoring("auto", kind="'auto', 'pair', 'qwen3' or a file of Jinja")
    """How a query and a document become one prompt: ``qwen3`` is Qwen3-Reranker's, ``pair`` the
    tokenizer's own of two texts; ``auto`` is ``pair`` for a classifier and else ``qwen3``."""
    score_tokens: str = _scoring("no,yes")
    """The two answers whose logits are compared where a model with a language head gives scores,
    the negative one first."""

    enable_lora: bool = _lora(False, page="adapters.md")
    """Allow LoRA adapters."""
    max_loras: int = _lora(16, minimum=1)
    """Maximum number of loaded adapters; all of them may be in one batch."""
    max_lora_rank: int = _lora(64, minimum=1, maximum=MAX_LORA_RANK)
    """Maximum rank of an adapter."""
    max_lora_bytes: int = _lora(2**30, minimum=1)
    """Memory for the weights of all adapters."""

    max_num_batched_tokens: int = _scheduling("max_num_batched_tokens")
    max_chunk_tokens: int | None = _scheduling("max_chunk_tokens")
    max_step_ms: int | None = _scheduling("max_step_ms", 250)
    max_num_seqs: int = _scheduling("max_num_seqs")
    order: str = _scheduling("order", "shortest_first", kind=_NAME)
    """Waiting order within a priority. ``shortest_first``: least left to compute; ``fcfs``: by
    arrival; ``longest_prefix``: most cached tokens; ``fair_share``: the tenant that was served
    least; or a class of your own as ``FILE.py:Class``."""
    max_overtakes: int = _scheduling("max_overtakes")
    max_logprobs: int = setting(20, minimum=-1, group="Scheduling")
    """Maximum alternatives per token in log-probabilities; -1 is the whole vocabulary."""
    max_grammar_ms: int = setting(
        2, minimum=1, group="Scheduling", page="structured.md#what-it-costs"
    )
    """Processor time per token that the grammar of a request may take, in milliseconds, with 250
    tokens' worth of it in advance; a request that takes more ends with an error."""
    stream_interval: int = setting(1, minimum=1, group="Scheduling")
    """Tokens per chunk of a stream, of which more cost less time around the model; the first and
    the last chunk are sent at once."""
    seed: int = setting(0, minimum=0, group="Scheduling")
    """Seed of the generator of seeds, for requests without one."""

    free_order: FreeOrder = _caching("free_order")
    eviction_policy: str = _caching("eviction_policy", "reuse_hazard", old_names=(), kind=_NAME)
    """Eviction policy: which cached block is evicted first, by ``reuse_hazard``, ``lru`` or
    ``s3fifo``, or by a class of your own as ``FILE.py:Class``."""
    digest: DigestName = _caching("digest")
    seal_tails: bool = _caching("seal_tails")
    tenant_shares: Mapping[str, TenantShare] = setting(
        factory=dict, kind="a mapping from salts to TenantShare", page="security.md"
    )
    """Guarantees and quotas in blocks, each a ``TenantShare``, by the ``cache_salt`` of a tenant's
    requests."""
    keep_explanations: int = _caching("keep_explanations")
    keep_texts_bytes: int = setting(64 * 2**20, minimum=0, group="What stays cached")
    """Memory for known texts and their tokens, for all tenants; about 8 bytes per token, and 0
    keeps none."""
    ledger_bytes: int = setting(
        64 * 2**20,
        minimum=0,
        group="What stays cached",
        page="agents.md#turns-continue-as-they-were-written",
    )
    """Memory for turns that the model wrote, for all tenants, which later prompts continue as they
    were written; 0 keeps none."""
    keep_reasoning: KeepReasoning = setting(
        "template", group="What stays cached", page="agents.md#turns-continue-as-they-were-written"
    )
    """Drop the reasoning of earlier turns where the chat ``template`` does, or keep it
    ``always``."""
    ghost_blocks: int | None = _caching("ghost_blocks")
    ghost_share: float = _caching("ghost_share")
    audit_share: float = setting(
        0.0, minimum=0, maximum=1, group="What stays cached", page="determinism.md#audits"
    )
    """Share of hits that are recomputed when idle and compared; 0 audits none."""
    audit_quarantine: bool = setting(
        True, group="What stays cached", old_options=("--quarantine/--no-quarantine",)
    )
    """Remove a prefix from the cache, with all that continues it, if an audit finds it wrong."""

    kv_host_bytes: int | None = _tiers(None, minimum=1)
    """Host memory for prefixes that the pool of a GPU evicts, such as ``32GiB``; else none."""
    kv_disk: str | Path | None = _tiers(None, kind="the path of a folder", page="tiers.md")
    """Folder for prefixes on disk, which survive eviction and restarts; else none are kept."""
    kv_disk_bytes: int = _tiers(16 * 2**30, minimum=1)
    """Maximum size of ``kv_disk``."""
    kv_disk_bytes_per_day: int | None = _tiers(None, minimum=1)
    """Maximum written to ``kv_disk`` per day, such as ``200GiB``, for the life of an SSD; else
    unlimited."""
    kv_remote: str | None = _tiers(None)
    """Server for prefixes shared by several engines, such as ``redis://127.0.0.1:6379/0``."""
    kv_sealed: bool | None = _tiers(None)
    """Encrypt records on disk and server with a key per tenant, which erasing the tenant destroys;
    else where there are ``tenant_shares``, or keys of a server."""
    kv_secret_file: str | Path | None = _tiers(None)
    """File of 16 random bytes or more that is mixed into these keys, the same for all engines of a
    ``kv_remote``; else one in ``kv_disk``."""

    keep_event_batches: int | None = same_setting(
        PrefixCacheConfig, "keep_event_batches", None, group="KV events"
    )
    """Batches of KV events kept for consumers that missed some; else 10,000 if they are published,
    and none otherwise."""
    kv_events_endpoint: str | None = _events(None, page="kv-events.md")
    """Publish KV events over ZeroMQ there, such as ``tcp://127.0.0.1:5557``; they contain token
    ids, so that anyone who can connect can read prompts."""
    kv_events_replay_endpoint: str | None = _events(None)
    """Replay missed KV events there."""
    kv_events_topic: str = _events("")
    """First frame of every message with KV events."""

    limit_mm_per_prompt: Mapping[str, int] = _images(
        factory=dict, kind="like {'image': 16}", page="images.md"
    )
    """Maximum images per prompt, as ``{"image": 4}``; 16 by default, and 0 serves only text and
    leaves the encoder out of memory."""
    mm_encoder_cache_bytes: int = _images(256 * 2**20, minimum=0)
    """Memory for cached outputs of the image encoder."""
    max_image_pixels: int = _media("max_image_pixels")
    max_prompt_pixels: int = _media("max_prompt_pixels")
    max_image_bytes: int = _media("max_image_bytes")
    media_timeout_s: float = _media("media_timeout_s")
    allowed_local_media_path: str = _media("allowed_local_media_path")
    allowed_media_domains: Sequence[str] = _media("allowed_media_domains")

    record_trace: str | Path | None = setting(None, kind="the path of a file", page="simulate.md")
    """File to record events to, for ``ostinato simulate``: times, lengths and pseudonyms, no
    content."""

    @property
    def num_kept_event_batches(self) -> int:
        """Batches of KV events that the cache keeps; 0 makes no events."""
        if self.keep_event_batches is not None:
            return self.keep_event_batches
        return 0 if self.kv_events_endpoint is None else KEPT_EVENT_BATCHES

    @property
    def max_images(self) -> int:
        """Maximum images of a prompt."""
        return self.limit_mm_per_prompt.get("image", MAX_IMAGES)

    @property
    def is_sealed(self) -> bool:
        """Whether what is kept outside the pool is encrypted."""
        return bool(self.tenant_shares) if self.kv_sealed is None else self.kv_sealed

    @property
    def has_tiers(self) -> bool:
        """Whether prefixes are kept outside the pool."""
        return any(x is not None for x in (self.kv_host_bytes, self.kv_disk, self.kv_remote))

"""The parameters of a model, those that one token uses, and the memory of LoRA adapters.

Counted from a config alone, as the sum of its matrices::

    embedding       vocabulary x width, looked up
    each layer      attention (q, k, v, o or their latent factors) and one of
                      an MLP      2 or 3 matrices of width x inner width
                      experts     as many MLPs as there are experts, of which a token takes
                                  top-k, and shared ones that every token takes
    head            vocabulary x width, multiplied where a token is sampled; often the embedding

Norms, biases and learned positions are left out: about 1 % of GPT-2, and less than 0.1 % of any
model above a billion parameters.
"""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import ConfigError, UnsupportedModel
from ostinato.lab.size.kv_config import Config, ConfigReader, language_part
from ostinato.lab.size.kv_families import family_of
from ostinato.lab.size.kv_layers import AttentionKind, Layer, layer_plan


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of all layers together.

    Attributes:
        num_experts: In each layer that has some.
        top_k: How many of them a token goes through.
        parameters: Parameters of all experts in all layers.
    """

    num_experts: int
    top_k: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a model.

    Attributes:
        embedding: Parameters of the input table; looked up, not multiplied.
        head: Parameters of the output projection, which may be the same table.
        is_tied: Whether it is.
        dense: Parameters of all layers, without routed experts.
        experts: The routed experts; None in a dense model.
    """

    embedding: int
    head: int
    is_tied: bool
    dense: int
    experts: Experts | None = None

    @property
    def total(self) -> int:
        """All parameters."""
        routed = self.experts.parameters if self.experts is not None else 0
        return self.embedding + (0 if self.is_tied else self.head) + self.dense + routed

    @property
    def per_token(self) -> int:
        """Parameters in layers that one token is multiplied with."""
        if self.experts is None:
            return self.dense
        share = self.experts.top_k / self.experts.num_experts
        return self.dense + round(self.experts.parameters * share)

    @property
    def active(self) -> int:
        """Parameters that a sampled token is multiplied with: those in layers, and the head."""
        return self.per_token + self.head


def count_weights(config: Config) -> Weights:
    """Count a model's parameters.

    Args:
        config: ``config.json`` of a decoder, parsed; of a multimodal one the language part counts.

    Raises:
        ConfigError: A value of the config is wrong.
        UnsupportedModel: The config does not say enough, or its layers have matrices that are
            not known here.
    """
    plan, (_, reader) = layer_plan(config), family_of(language_part(config))
    family = reader.model_type.removesuffix("_text")
    if family in _UNKNOWN or any(
        layer.state or layer.kind is AttentionKind.SHARED for layer in plan.layers
    ):
        raise UnsupportedModel(
            f"model_type={reader.model_type!r}: the matrices of its layers are not known, so its "
            "speed cannot be derived; give --prefill-rate and --step-ms, or --measure"
        )
    hidden = reader.count("hidden_size")
    table = _vocabulary(reader, family) * hidden
    dense, routed, num_experts, top_k = 0, 0, 0, 0
    for index, layer in enumerate(plan.layers):
        dense += _attention(reader, layer, hidden)
        if _has_experts(reader, index):
            num_experts = _num_experts(reader)
            top_k = reader.count("num_experts_per_tok")
            routed += num_experts * _expert(reader, hidden)
            dense += num_experts * hidden + _shared_experts(reader, hidden)
        else:
            dense += _mlp(reader, family, hidden)
    experts = Experts(num_experts, top_k, routed) if routed else None
    return Weights(table, table, _is_tied(reader, family), dense, experts)


def _attention(config: ConfigReader, layer: Layer, hidden: int) -> int:
    """Count the matrices of one attention layer."""
    if layer.kind is AttentionKind.NONE:
        return 0
    if layer.kind is AttentionKind.LATENT:
        return _latent_attention(config, hidden)
    query = layer.num_heads * layer.head_dim
    return 2 * hidden * query + 2 * hidden * layer.num_kv_heads * layer.head_dim


def _latent_attention(config: ConfigReader, hidden: int) -> int:
    """Count multi-head latent attention. Source: DeepSeek-V2, arXiv 2405.04434."""
    heads, rank = config.count("num_attention_heads"), config.count("kv_lora_rank")
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value = config.optional("v_head_dim") or hidden // heads
    query_rank = config.optional("q_lora_rank")
    per_query = heads * (nope + rope)
    query = hidden * per_query if query_rank is None else query_rank * (hidden + per_query)
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _mlp(config: ConfigReader, family: str, hidden: int) -> int:
    """Count the matrices of a dense MLP."""
    inner = config.optional("dense_intermediate_size") or config.optional("intermediate_size_mlp")
    inner = inner or config.optional("intermediate_size")
    if inner is None:
        if family not in _PLAIN_MLP:
            config.count("intermediate_size")  # refuses: it is missing
        inner = 4 * hidden
    return (2 if family in _PLAIN_MLP else 3) * hidden * inner


def _expert(config: ConfigReader, hidden: int) -> int:
    inner = config.optional("moe_intermediate_size") or config.count("intermediate_size")
    return 3 * hidden * inner


def _shared_experts(config: ConfigReader, hidden: int) -> int:
    """Count the experts that every token goes through."""
    inner = config.optional("shared_expert_intermediate_size") or 0
    if inner:  # Qwen's is gated by one more column
        return (3 * inner + 1) * hidden
    if config.model_type.startswith("llama4"):
        return _expert(config, hidden)
    shared = config.value("n_shared_experts")
    return _expert(config, hidden) * (shared if isinstance(shared, int) else 0)


def _num_experts(config: ConfigReader) -> int:
    return config.optional("num_experts") or 0


def _has_experts(config: ConfigReader, index: int) -> bool:
    """Whether a layer has routed experts instead of one MLP."""
    if not _num_experts(config):
        return False
    if (listed := config.sequence("moe_layers")) is not None:  # Llama 4
        return index in listed
    if (types := config.sequence("mlp_layer_types")) is not None:  # GLM-4.7 Flash
        return types[index] == "sparse"
    interval = config.optional("interleave_moe_layer_step") or 1
    if (index + 1) % interval:
        return False
    if index in (config.sequence("mlp_only_layers") or ()):
        return False
    first = config.value("first_k_dense_replace") or config.value("moe_layer_start_index") or 0
    step = config.optional("decoder_sparse_step") or 1
    return (not isinstance(first, int) or index >= first) and (index + 1) % step == 0


def _vocabulary(config: ConfigReader, family: str) -> int:
    size = config.optional("vocab_size") or _VOCABULARIES.get(family)
    return size if size is not None else config.count("vocab_size")


def _is_tied(config: ConfigReader, family: str) -> bool:
    written = config.value("tie_word_embeddings")
    return family in _TIED if written is None else bool(written)


_PLAIN_MLP = frozenset(
    {"apertus", "arcee", "bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"}
    | {"gptj", "mpt", "nemotron", "opt", "persimmon", "phi", "starcoder2"}
)
"""Families whose MLP has two matrices: up and down, without a gate."""

_TIED = frozenset(
    {"bloom", "cohere", "cohere2", "gemma", "gemma2", "gemma3", "gpt2", "gpt_bigcode"}
    | {"gpt_neo", "helium", "mpt", "opt", "smollm3", "starcoder2"}
)
"""Families whose head is the embedding where the config does not say otherwise."""

_VOCABULARIES: Mapping[str, int] = {"gemma3": 262_208, "gpt2": 50_257}
"""Of families whose configs leave it out."""

_UNKNOWN = frozenset(
    {"chatglm", "dbrx", "deepseek_v32", "falcon", "gemma3n", "gemma4", "lfm2", "phi4_multimodal"}
)
"""Families with matrices of other shapes, or whose configs say them in other words."""


WEIGHT_BYTES = 2
"""Bytes of a weight in bfloat16, which models are served in."""

_EXPERT = re.compile(r"\.experts\.\d+\.")

_MAX_HEAD_BYTES = 100 * 2**20


def adapter_bytes(folders: Sequence[str], packed: bool = False) -> int:
    """Return the memory of the adapters in some directories, in bfloat16.

    Args:
        folders: Their directories.
        packed: Whether to round ranks and widths up to multiples of 32, as on a CPU.

    Raises:
        ConfigError: One has no readable ``adapter_model.safetensors``.
    """
    return sum(_bytes_of(folder, 32 if packed else 1) for folder in folders)


def _bytes_of(folder: str, unit: int) -> int:
    path = Path(folder) / "adapter_model.safetensors"
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEAD_BYTES:
                raise ValueError("its header is too long")
            head = json.loads(file.read(num_bytes))
        shapes: dict[str, list[list[int]]] = {}  # those of a layer's experts together
        for name, entry in head.items():
            if name != "__metadata__":
                shapes.setdefault(_EXPERT.sub(".experts.", name), []).append(entry["shape"])
        total = 0
        for own in shapes.values():
            padded = (-(-size // unit) * unit for size in own[0])
            per_tile = max(1, unit // min(own[0]))  # experts whose ranks share one
            total += -(-len(own) // per_tile) * math.prod(padded)
        return total * WEIGHT_BYTES
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--lora {folder!r}: {path} cannot be read: {error}") from error

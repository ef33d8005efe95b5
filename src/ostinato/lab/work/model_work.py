"""The work per token: FLOP, bytes of weights and of KV.

From a config alone. A token is multiplied with each weight on its path, 2 FLOP each, and attends to
every earlier token: per pair of a query and a key 4 FLOP for each value of a query head. A layer
with a window has no pairs beyond it::

    context 1 2 3 4 5 6 ...      pairs of the token at position 6
    full    x x x x x x          6
    window  . . . x x x          3
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.core.config import one_of
from ostinato.core.errors import ConfigError
from ostinato.lab.size.kv_bytes import DTYPE_BITS, KVBytes, known_dtype, kv_bytes
from ostinato.lab.size.kv_config import Config, language_part
from ostinato.lab.size.kv_families import family_of
from ostinato.lab.size.kv_layers import AttentionKind, Layer
from ostinato.lab.size.weights import Weights, count_weights
from ostinato.lab.work.cost_model import PerRequest

WEIGHT_FORMATS = ("auto", "bf16", "fp8", "int8", "int4")
"""Formats of weights."""

_SCALES = 0.25
"""Bits per value for scales, where a config does not say how large its groups are."""

_SCALE_BITS, _ZERO_BITS = 16, 8
"""Of a group: its scale, and its zero point where there are such."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers that attend alike, taken together.

    Attributes:
        pair_flops: Per pair of a query and a key.
        token_bytes: KV of one token.
        num_kv_heads: KV heads of one layer; 0 for latent attention, divided over all GPUs.
        window: Tokens that a query sees; None if it sees all.
    """

    pair_flops: float
    token_bytes: int
    num_kv_heads: int
    window: int | None

    def seen(self, num_tokens: PerRequest) -> PerRequest:
        """Return how many keys the last token of a sequence sees."""
        return num_tokens if self.window is None else np.minimum(num_tokens, self.window)

    def pairs(self, num_tokens: PerRequest, num_cached: PerRequest) -> PerRequest:
        """Return the pairs of the tokens after the cached ones."""
        return self._pairs_from_zero(num_tokens) - self._pairs_from_zero(num_cached)

    def _pairs_from_zero(self, num_tokens: PerRequest) -> PerRequest:
        inside = self.seen(num_tokens)
        return inside * (inside + 1) / 2 + (num_tokens - inside) * inside


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored and multiplied.

    Attributes:
        name: Name for display.
        bits: Per value in layers.
        expert_bits: Per value in routed experts.
        is_fp8: Whether activations are in 8 bits too, so that products run at that rate.
        head_bits: Per value of the head where it is a copy of its own; None if it is a table like
            the embedding, or that table.
    """

    name: str
    bits: float
    expert_bits: float
    is_fp8: bool = False
    head_bits: float | None = None


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model computes and reads.

    Attributes:
        weights: Its parameters.
        format: Format of its weights.
        groups: Its attention layers, by what they see.
        kv: What it keeps of each token.
        hidden_size: Values of one token between two layers.
        table_bits: Per value of the embedding and the head.
    """

    weights: Weights
    format: WeightFormat
    groups: tuple[AttentionGroup, ...]
    kv: KVBytes
    hidden_size: int
    table_bits: int = 16

    @property
    def expert_bytes(self) -> float:
        """Routed experts in memory."""
        experts = self.weights.experts
        return 0.0 if experts is None else experts.parameters * self.format.expert_bits / 8

    @property
    def weight_bytes(self) -> float:
        """All weights in memory."""
        head = 0 if self.format.head_bits is None and self.weights.is_tied else self.weights.head
        tables = self.weights.embedding * self.table_bits + head * self._head_bits
        dense = self.weights.dense * self.format.bits / 8
        return tables / 8 + dense + self.expert_bytes

    @property
    def _head_bits(self) -> float:
        return self.table_bits if self.format.head_bits is None else self.format.head_bits

    def exchanged_bytes(self, num_gpus: int) -> float:
        """Bytes that each GPU sends for one token, when a model is spread over several.

        A dense layer is cut by tensors and sums its activations twice, in bfloat16. Experts are
        spread whole: a token goes to its top-k in 8 bits and comes back in 16.
        """
        experts = self.weights.experts
        if experts is None:
            ring = 2 * (num_gpus - 1) / num_gpus
            return 2 * self.kv.num_layers * self.hidden_size * 2 * ring
        away = (num_gpus - 1) / num_gpus
        return self.kv.num_layers * experts.top_k * self.hidden_size * 3 * away / num_gpus

    def read_bytes(self, num_tokens: float) -> float:
        """Weights that a step of ``num_tokens`` reads: of experts, those that some token needs."""
        read = self.weights.dense * self.format.bits / 8
        read += self.weights.head * self._head_bits / 8
        experts = self.weights.experts
        if experts is None:
            return read
        missed = (1 - experts.top_k / experts.num_experts) ** num_tokens
        return read + float(self.expert_bytes * (1 - missed))


def model_work(config: Config, weights: str = "auto", kv_dtype: str = "auto") -> ModelWork:
    """Derive a decoder's work from its config; the formats ``auto`` are those of the config.

    Raises:
        ConfigError: A value of the config is wrong, or a format is unknown.
        UnsupportedModel: The config does not say enough.
    """
    one_of("weights", weights, WEIGHT_FORMATS)
    kv = kv_bytes(config, kv_dtype)
    groups = tuple(
        AttentionGroup(
            group.num_layers * _pair_flops(config, group.layer),
            group.token_bytes,
            group.layer.num_kv_heads,
            group.layer.window_tokens,
        )
        for group in kv.groups
        if group.token_bytes
    )
    hidden_size = family_of(language_part(config))[1].count("hidden_size")
    return ModelWork(count_weights(config), weight_format(config, weights), groups, kv, hidden_size)


def weight_format(config: Config, requested: str = "auto") -> WeightFormat:
    """Say in which format a model's weights are.

    Raises:
        ConfigError: The config's quantisation is not known.
    """
    if requested == "auto":
        quantisation = config.get("quantization_config")
        if isinstance(quantisation, Mapping):
            return _quantised(quantisation)
        part = language_part(config)
        written = known_dtype(part.get("dtype") or part.get("torch_dtype") or "bfloat16")
        bits = min(DTYPE_BITS[written], 16)  # float32 checkpoints are served in 16 bits
        return WeightFormat("bf16" if bits == 16 else written, bits, bits)
    if requested in _CREATED_AT_LOAD:
        kept, is_fp8 = _CREATED_AT_LOAD[requested]
        return WeightFormat(requested, kept, kept, is_fp8, head_bits=_CREATED_AT_LOAD["int8"][0])
    bits = 16 if requested == "bf16" else 8
    return WeightFormat(requested, bits, bits, is_fp8=bits == 8)


_CREATED_AT_LOAD = {
    "int8": (8 + _SCALE_BITS / 128, True),
    "int4": (4 + 2 * _SCALE_BITS / 32, False),
}
"""Bits per value of weights that are quantized when they are loaded, and whether products run at
the rate of 8 bits: a scale for 128 values, or a scale and a minimum for 32. The head has 8 bits."""


def _quantised(quantisation: Mapping[str, object]) -> WeightFormat:
    """Read ``quantization_config`` as transformers, vLLM and ModelOpt write it."""
    method = str(quantisation.get("quant_method") or quantisation.get("quant_algo") or "").lower()
    if method in ("fp8", "fbgemm_fp8"):
        return WeightFormat("fp8", 8, 8, is_fp8=True)
    if method == "mxfp4":  # gpt-oss: experts alone
        return WeightFormat("mxfp4", 16, 4 + _SCALES)
    if method == "modelopt":
        method = str(quantisation.get("quant_algo")).lower()
        if method == "fp8":
            return WeightFormat("fp8", 8, 8, is_fp8=True)
    bits = quantisation.get("bits")
    is_int8 = quantisation.get("load_in_8bit") is True
    own: Mapping[str, Any] = quantisation
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first: Mapping[str, Any] = next(iter(groups.values()))
        own = first.get("weights", {})
        bits = own.get("num_bits")
        is_int8 = bits == 8 and first.get("input_activations") is not None
    if is_int8 or bits == 8:
        size = 8 + _bits_of_groups(own, 0)
        return WeightFormat("int8", size, size, is_fp8=is_int8)
    if bits == 4 or quantisation.get("load_in_4bit") is True or "fp4" in method:
        size = 4 + _bits_of_groups(own, _SCALES)
        return WeightFormat("4 bits", size, size)
    raise ConfigError(
        f"quantization_config.quant_method={method!r}: bits per weight unknown; say them with "
        f"--weights, one of {', '.join(WEIGHT_FORMATS[1:])}"
    )


def _bits_of_groups(settings: Mapping[str, Any], otherwise: float) -> float:
    """Return the bits per value that scales and zero points take, if a config says its groups."""
    size = settings.get("group_size")
    if not isinstance(size, int) or size < 1:
        return otherwise if size is None else 0.0
    is_symmetric = settings.get("sym", settings.get("symmetric", True))
    has_zeros = settings.get("zero_point") is True or is_symmetric is False
    return (_SCALE_BITS + (_ZERO_BITS if has_zeros else 0)) / size


def _pair_flops(config: Config, layer: Layer) -> float:
    """Return the FLOP of one query and one key in one layer: a product with K, one with V."""
    if layer.kind is not AttentionKind.LATENT:
        return 4.0 * layer.num_heads * layer.head_dim
    part = language_part(config)  # prefill expands the latents: heads of nope + rope and of v
    sizes = [part.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    total = sum(size for size in sizes if isinstance(size, int))
    return 2.0 * layer.num_heads * (total or 2 * layer.head_dim)

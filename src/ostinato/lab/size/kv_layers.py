"""The KV of each layer, per token.

A layer has one or several of these::

    attention   K and V of each token, for as many heads as there are KV heads
      latent    one compressed vector per token, from which all heads are made
      window    the same, but only the last tokens are ever looked at again
      shared    nothing: it reads the KV of an earlier layer
    state       a constant amount per sequence
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ostinato.errors import ConfigError, UnsupportedModel
from ostinato.lab.size.kv_config import Config, ConfigReader, language_part
from ostinato.lab.size.kv_families import Family, family_of
from ostinato.lab.size.kv_patterns import (
    CHUNKED,
    CONV,
    FULL,
    HYBRID,
    LINEAR,
    NONE,
    OTHER_NAMES,
    SLIDING,
)
from ostinato.lab.size.kv_states import State


class AttentionKind(StrEnum):
    """Kind of attention, with respect to KV."""

    MULTI_HEAD = "multi-head"
    GROUPED_QUERY = "grouped-query"
    MULTI_QUERY = "multi-query"
    LATENT = "latent"
    SHARED = "shared KV"
    STATE = "state"
    NONE = "no attention"


@dataclass(frozen=True, slots=True)
class Layer:
    """The KV of one layer.

    Attributes:
        kind: How it attends.
        values_per_token: Numbers kept of each token; 0 without KV.
        num_kv_heads: Heads whose K and V are kept; 0 without, and for latent attention.
        num_heads: Query heads; 0 without attention.
        head_dim: Size of one head, or of the latent vector.
        window_tokens: The layer never looks back further; None if it looks at all tokens.
        whole_heads_values: Latent attention only: numbers per token for an engine that keeps
            the K and V of all heads instead of the latent vector.
        state: What it keeps of the whole sequence.
    """

    kind: AttentionKind
    values_per_token: int = 0
    num_kv_heads: int = 0
    num_heads: int = 0
    head_dim: int = 0
    window_tokens: int | None = None
    whole_heads_values: int | None = None
    state: State | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All layers of a model, in order.

    Attributes:
        model_type: The config's own name for the family.
        layers: One per layer.
        notes: Assumptions made in reading the config.
    """

    model_type: str
    layers: tuple[Layer, ...]
    notes: tuple[str, ...]


def layer_plan(config: Config) -> LayerPlan:
    """Return the KV of each layer of a decoder; multimodal configs may nest it.

    Raises:
        ConfigError: A value is of the wrong type or out of range, or two contradict each other.
        UnsupportedModel: A needed key is missing, or the model keeps something unknown to us.

    Source: the config classes and caches of ``transformers``.
    """
    family, reader = family_of(language_part(config))
    types = _layer_types(family, reader)
    overrides = _per_layer(reader, len(types))
    layers = []
    for index, layer_type in enumerate(types):
        values = {**family.own_shape(reader, layer_type), **overrides.get(index, {})}
        layers.append(_layer(family, reader.overridden(values), layer_type))
    _without_shared(layers, types, reader)
    return LayerPlan(reader.model_type, tuple(layers), (family.note,) if family.note else ())


def _layer_types(family: Family, config: ConfigReader) -> tuple[str, ...]:
    """List the types by canonical name; the config's list precedes the family's pattern."""
    num_layers = config.optional("num_hidden_layers")
    written = config.sequence("layer_types")
    types = family.pattern(config, num_layers or 0) if written is None else written
    names = tuple(OTHER_NAMES.get(str(name), str(name)) for name in types)
    if num_layers not in (None, len(names)):
        raise ConfigError(
            f"{config.key('num_hidden_layers')}={num_layers}, but the config describes "
            f"{len(names)} layers in {config.key('layer_types')} or its like"
        )
    if not names:
        config.count("num_hidden_layers")  # refuses: it is missing
    return names


def _per_layer(config: ConfigReader, num_layers: int) -> dict[int, Config]:
    """Read ``per_layer_config``: values by index of the layer that they hold for."""
    written = config.value("per_layer_config") or {}
    if not isinstance(written, Mapping):
        raise ConfigError(f"per_layer_config={written!r}: must be an object")
    overrides: dict[int, Config] = {}
    for index, values in written.items():
        if not str(index).isdigit() or int(index) >= num_layers or not isinstance(values, Mapping):
            raise ConfigError(
                f"per_layer_config has {index!r}: {values!r}; keys must be layers from 0 to "
                f"{num_layers - 1}, values objects"
            )
        overrides[int(index)] = values
    return overrides


def _layer(family: Family, config: ConfigReader, layer_type: str) -> Layer:
    """Size one layer."""
    if layer_type == NONE:
        return Layer(AttentionKind.NONE)
    if layer_type in (LINEAR, CONV):
        return Layer(AttentionKind.STATE, state=_state(family, config, layer_type))
    if layer_type not in _WINDOW_KEYS:
        raise UnsupportedModel(
            f"{config.key('layer_types')} has {layer_type!r}: the KV of such a layer is "
            f"unknown; known are {', '.join([*_WINDOW_KEYS, LINEAR, CONV])}"
        )
    layer = _heads(family, config) if config.value("kv_lora_rank") is None else _latent(config)
    if key := _WINDOW_KEYS[layer_type]:
        layer = replace(layer, window_tokens=_window(config, key, layer_type))
    if layer_type == HYBRID:
        layer = replace(layer, state=_state(family, config, layer_type))
    return layer


def _heads(family: Family, config: ConfigReader) -> Layer:
    """Size attention that keeps K and V of each KV head."""
    num_heads = config.count("num_attention_heads")
    num_kv_heads = family.kv_heads(config, num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{config.key('num_attention_heads')}={num_heads} is not a multiple of "
            f"{config.key('num_key_value_heads')}={num_kv_heads}"
        )
    head_dim = config.optional("head_dim") or _divided(config, num_heads)
    kind = AttentionKind.MULTI_HEAD if num_kv_heads == num_heads else AttentionKind.GROUPED_QUERY
    if num_kv_heads == 1 < num_heads:
        kind = AttentionKind.MULTI_QUERY
    return Layer(kind, 2 * num_kv_heads * head_dim, num_kv_heads, num_heads, head_dim)


def _divided(config: ConfigReader, num_heads: int) -> int:
    """Return the size of a head, derived from the width if the config lacks it."""
    hidden_size = config.count("hidden_size")
    if hidden_size % num_heads:
        raise ConfigError(
            f"{config.key('hidden_size')}={hidden_size} is not a multiple of "
            f"{config.key('num_attention_heads')}={num_heads}, and there is no head_dim"
        )
    return hidden_size // num_heads


def _latent(config: ConfigReader) -> Layer:
    """Size multi-head latent attention: one vector and one rotary key for all heads.

    Sparse variants also keep an indexer's key per token. Source: DeepSeek-V2, arXiv 2405.04434.
    """
    rope, indexer = config.count("qk_rope_head_dim"), config.optional("index_head_dim") or 0
    latent = config.count("kv_lora_rank") + rope
    num_heads, nope = config.count("num_attention_heads"), config.optional("qk_nope_head_dim")
    whole = None
    if nope is not None:
        v_head_dim = config.optional("v_head_dim") or _divided(config, num_heads)
        whole = num_heads * (nope + rope + v_head_dim) + indexer
    return Layer(
        AttentionKind.LATENT,
        latent + indexer,
        num_heads=num_heads,
        head_dim=latent,
        whole_heads_values=whole,
    )


def _window(config: ConfigReader, key: str, layer_type: str) -> int:
    """Return how many tokens a layer sees, itself included."""
    switched_off = key == "sliding_window" and config.value("use_sliding_window") is False
    if switched_off or config.value(key) is None:
        cause = "use_sliding_window is false" if switched_off else "it is null or missing"
        raise ConfigError(f"there are layers of type {layer_type}, but {key} is not set: {cause}")
    return config.count(key)


def _state(family: Family, config: ConfigReader, layer_type: str) -> State:
    if family.state is None:
        raise UnsupportedModel(
            f"{config.key('layer_types')} has {layer_type!r}: unknown state of such "
            f"layers in model_type={config.model_type!r}"
        )
    return family.state(config)


def _without_shared(layers: list[Layer], types: tuple[str, ...], config: ConfigReader) -> None:
    """Remove the KV of the last ``num_kv_shared_layers``, which read an earlier layer's.

    Each reads the last layer of its own type that keeps its KV: Gemma 3n, Gemma 4.
    """
    if config.value("num_kv_shared_layers") in (None, 0):
        return
    num_shared = config.count("num_kv_shared_layers")
    first = len(layers) - num_shared
    if first < 1 or not set(types[first:]) <= set(types[:first]):
        raise ConfigError(
            f"num_kv_shared_layers={num_shared}: of {len(layers)} layers, those before the last "
            f"{num_shared} must keep KV for every layer type that shares it"
        )
    layers[first:] = [Layer(AttentionKind.SHARED)] * num_shared


_WINDOW_KEYS: Mapping[str, str | None] = {
    FULL: None,
    SLIDING: "sliding_window",
    CHUNKED: "attention_chunk_size",
    HYBRID: None,
}
"""Types of layers that attend, and the key of their window."""

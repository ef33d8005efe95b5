"""The parameters of an image encoder, from a model's config alone.

::

    patches     3 channels x patch^2 x width
    positions   one vector per position
    each layer  attention 4 x width^2, an MLP of 2 or 3 x width x inner width
    projector   from the encoder's width to that of the language model

Norms and biases are left out.
"""

from collections.abc import Mapping
from typing import Any

from ostinato.core.errors import ConfigError

_GATED = frozenset({"mistral3", "qwen2_5_vl", "gemma4"})
"""Families whose encoder has MLPs of three matrices."""


def encoder_weights(config: Mapping[str, Any]) -> int:
    """Count an encoder's parameters.

    Args:
        config: The model's ``config.json``, parsed.

    Raises:
        ConfigError: The config is incomplete, or its encoder is unknown.
    """
    kind = str(config.get("model_type"))
    vision = dict(config.get("vision_config") or {})
    text = dict(config.get("text_config") or config)
    try:
        if kind.startswith("qwen"):
            return _qwen(kind, vision)
        width, inner = vision["hidden_size"], vision["intermediate_size"]
        layers = vision["num_hidden_layers"] * (4 * width**2 + _matrices(kind) * width * inner)
        patches = 3 * vision["patch_size"] ** 2 * width
        return int(layers + patches + _around(kind, config, vision, text["hidden_size"]))
    except KeyError as error:
        raise ConfigError(
            f"image: the config lacks {error} of the encoder, so its memory is unknown"
        ) from error


def _matrices(kind: str) -> int:
    return 3 if kind in _GATED else 2


def _around(kind: str, config: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> int:
    """Count positions and projector."""
    width = vision["hidden_size"]
    positions = (vision.get("image_size", 0) // vision["patch_size"]) ** 2 * width
    match kind:
        case "llava":
            return int(positions + width * hidden + hidden**2)
        case "gemma3":
            return int(positions + width * hidden)
        case "mistral3":
            merged = config.get("spatial_merge_size", 2) ** 2 * width
            return int(merged * width + width * hidden + hidden**2)
        case "gemma4":
            return int(2 * vision.get("position_embedding_size", 10240) * width + width * hidden)
    raise ConfigError(f"image: the encoder of {kind!r} is unknown, and so is its memory")


def _qwen(kind: str, vision: Mapping[str, Any]) -> int:
    is_second = kind == "qwen2_vl"
    width = vision["embed_dim" if is_second else "hidden_size"]
    inner = width * vision.get("mlp_ratio", 4) if is_second else vision["intermediate_size"]
    out = vision["hidden_size" if is_second else "out_hidden_size"]
    layers = vision["depth"] * (4 * width**2 + _matrices(kind) * width * inner)
    merged = vision.get("spatial_merge_size", 2) ** 2 * width
    merger = merged**2 + merged * out
    patches = 3 * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2 * width
    if kind.startswith("qwen2"):
        return int(layers + patches + merger)
    num_mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    positions = vision.get("num_position_embeddings", 2304) * width
    return int(layers + patches + positions + num_mergers * merger)

"""The prompt tokens of an image, and the parameters of its encoder, from a model's config alone.

Where the image processor's settings matter, those of the published checkpoints are assumed, since
they are in a separate file.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostinato.core.errors import ConfigError

_QWEN_PIXELS = {14: (56 * 56, 14 * 14 * 4 * 16384), 16: (256 * 256, 4096 * 4096)}
"""Fewest and most pixels after resizing, by the size of a patch: Qwen2-VL and 2.5, and those from
Qwen3-VL on."""

_LONGEST_EDGE = {14: 1540, 16: 1024}
"""Maximum edge after resizing, by patch size: Mistral Small 3.1 and later, and Pixtral."""

_GEMMA4_TOKENS = 280
"""Maximum tokens of an image, Gemma 4's default."""

_IMAGE = re.compile(r"<(?:image|image_url|input_image) (\{.*?\})>")
"""The placeholder that ``request_parts`` writes for an image."""

_QWEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})


def read_size(text: str) -> tuple[int, int]:
    """Return width and height of ``1024x768``.

    Raises:
        ConfigError: It is not a size.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise ConfigError(f"image={text!r}: must be a width and a height, such as 1024x768")
    return int(match[1]), int(match[2])


def image_tokens(config: Mapping[str, Any], width: int, height: int) -> int:
    """Return the number of tokens of an image of ``width`` x ``height`` pixels.

    Raises:
        ConfigError: The model is not known to accept images.
    """
    kind, vision = config.get("model_type"), config.get("vision_config") or {}
    if kind == "gemma3":
        return int(config.get("mm_tokens_per_image", 256))
    if kind == "llava":
        side = vision.get("image_size", 336) // vision.get("patch_size", 14)
        has_class_token = vision.get("model_type", "clip_vision_model").startswith("clip")
        is_dropped = config.get("vision_feature_select_strategy", "default") == "default"
        return int(side**2 + has_class_token - is_dropped)
    if kind in _QWEN:
        patch = vision.get("patch_size", 14 if kind.startswith("qwen2") else 16)
        merged = patch * vision.get("spatial_merge_size", 2)
        return _resized_tokens(width, height, merged, *_QWEN_PIXELS.get(patch, _QWEN_PIXELS[16]))
    if kind == "mistral3":
        patch = vision.get("patch_size", 14)
        factor = patch * config.get("spatial_merge_size", 2)
        longest = _LONGEST_EDGE.get(patch, 1540)
        ratio = max(1.0, height / longest, width / longest)
        rows, columns = (-(-int(side // ratio) // factor) for side in (height, width))
        return int(rows * (columns + 1))  # a token ends each row
    if kind == "gemma4":
        rows, columns = _gemma4_grid(width, height)
        return min(_GEMMA4_TOKENS, rows * columns)
    raise ConfigError(f"image: models of type {kind!r} accept no images; do not give --image")


def output_values(config: Mapping[str, Any], num_tokens: int) -> int:
    """Return the number of values in the encoder's output for an image."""
    later = (config.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
    width = (config.get("text_config") or config).get("hidden_size", 0)
    return int(num_tokens * (1 + len(later)) * width)


def tokens_of_log(
    text: str, tokenize: Callable[[str], Sequence[int]], num_tokens: int
) -> list[int]:
    """Return the ids of a logged prompt with images.

    Args:
        text: The prompt from ``request_parts``, with placeholders for images.
        tokenize: Returns the ids of a text.
        num_tokens: Tokens per image; they repeat a number that stands for its content.
    """
    ids: list[int] = []
    for place, piece in enumerate(_IMAGE.split(text)):
        if place % 2:
            digest = hashlib.sha256(piece.encode("utf-8", "surrogatepass")).digest()
            ids += [2**31 + int.from_bytes(digest[:4], "little") // 2] * num_tokens
        elif piece:
            ids += tokenize(piece)
    return ids


def _gemma4_grid(width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of the largest allowed grid of the image's shape."""
    scale = math.sqrt(_GEMMA4_TOKENS / (height * width))
    rows, columns = int(scale * height), int(scale * width)
    if not rows:
        return 1, min(width // height, _GEMMA4_TOKENS)
    return (rows, columns) if columns else (min(height // width, _GEMMA4_TOKENS), 1)


def _resized_tokens(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> int:
    """Count squares of ``factor`` pixels after Qwen2-VL's resizing (arXiv 2409.12191)."""
    sides = [max(1, round(side / factor)) for side in (height, width)]
    pixels = sides[0] * sides[1] * factor**2
    if pixels > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        sides = [max(1, math.floor(side / scale / factor)) for side in (height, width)]
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        sides = [math.ceil(side * scale / factor) for side in (height, width)]
    return sides[0] * sides[1]


_GATED = frozenset({"mistral3", "qwen2_5_vl", "gemma4"})
"""Families whose encoder has MLPs of three matrices."""


def encoder_weights(config: Mapping[str, Any]) -> int:
    """Count the parameters of a model's encoder.

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

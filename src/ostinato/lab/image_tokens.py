"""The tokens that an image takes in a prompt, by a model's config alone."""

import math
import re
from collections.abc import Mapping
from typing import Any

from ostinato.core.errors import ConfigError

_QWEN_PIXELS = 56 * 56, 14 * 14 * 4 * 16384
"""Fewest and most pixels after resizing, in the published checkpoints of Qwen2-VL and Qwen2.5-VL;
they are in the processor's config, not in the model's."""


def read_size(text: str) -> tuple[int, int]:
    """Return width and height of ``1024x768``.

    Raises:
        ConfigError: It is no such size.
    """
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found is None:
        raise ConfigError(f"image={text!r}: must be a width and a height, such as 1024x768")
    return int(found[1]), int(found[2])


def image_tokens(config: Mapping[str, Any], width: int, height: int) -> int:
    """Return how many tokens an image of some size has.

    Args:
        config: Of the model, as in its ``config.json``.
        width: Of the image, in pixels.
        height: Likewise.

    Raises:
        ConfigError: The model takes no images, as far as is known here.
    """
    kind, vision = config.get("model_type"), config.get("vision_config") or {}
    if kind == "gemma3":
        return int(config.get("mm_tokens_per_image", 256))
    if kind == "llava":
        side = vision.get("image_size", 336) // vision.get("patch_size", 14)
        has_class_token = vision.get("model_type", "clip_vision_model").startswith("clip")
        is_dropped = config.get("vision_feature_select_strategy", "default") == "default"
        return int(side**2 + has_class_token - is_dropped)
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        factor = vision.get("patch_size", 14) * vision.get("spatial_merge_size", 2)
        return _resized_tokens(width, height, factor)
    raise ConfigError(f"image: models of type {kind!r} take no images here; leave --image out")


def _resized_tokens(width: int, height: int, factor: int) -> int:
    """Count squares of ``factor`` pixels after Qwen2-VL's resizing (arXiv 2409.12191)."""
    fewest, most = _QWEN_PIXELS
    sides = [max(1, round(side / factor)) for side in (height, width)]
    pixels = sides[0] * sides[1] * factor**2
    if pixels > most:
        scale = math.sqrt(height * width / most)
        sides = [max(1, math.floor(side / scale / factor)) for side in (height, width)]
    elif pixels < fewest:
        scale = math.sqrt(fewest / (height * width))
        sides = [math.ceil(side * scale / factor) for side in (height, width)]
    return sides[0] * sides[1]

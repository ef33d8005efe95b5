"""The layout of images in each family of models.

============== ================================ ============================================
family         positions of an image's tokens   attention among them
============== ================================ ============================================
LLaVA          one after the other              causal
Mistral 3      one after the other              causal; a token ends each row of patches
Qwen-VL, 3.5   time, row and column             causal
Gemma 3        one after the other              each sees all, in every layer
Gemma 4        one after the other              causal, or each sees all within windows
============== ================================ ============================================

The number of an image's tokens follows from its size, so a prompt is built without the encoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ostinato.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The layout of an image's tokens, row by row."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the image in a prompt."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """What differs between families.

    Attributes:
        parts: The encoder's modules beside the language model.
        grid: From config, image processor, height and width.
        inputs: The encoder's inputs among the processor's outputs.
        row_ends: Tokens after each row of an image, and after the last; empty for none.
        has_grid_positions: Whether an image's tokens have a position in time, row and column.
        sees_ahead: From the text model's config: whether an image's tokens see later ones of it.
        only_in_windows: Whether they do so only in layers with a sliding window.
        options: From the config: further arguments of the image processor.
        spelling: From config and tokenizer: the name of an image in texts, and how the model's
            processor writes it; None if that is the placeholder.
    """

    parts: tuple[str, ...]
    grid: Callable[[Any, Any, int, int], ImageGrid]
    inputs: tuple[str, ...] = ("pixel_values",)
    row_ends: tuple[str, ...] = ()
    has_grid_positions: bool = False
    sees_ahead: Callable[[Any], bool] = lambda config: False
    only_in_windows: bool = False
    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    spelling: Callable[[Any, PreTrainedTokenizerBase], tuple[str, str]] | None = None


def _llava_grid(config: Any, _processor: Any, _height: int, _width: int) -> ImageGrid:
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    has_class_token = vision.model_type.startswith("clip")
    is_first_dropped = config.vision_feature_select_strategy == "default"
    return ImageGrid(1, num_patches + has_class_token - is_first_dropped)


def _mistral_patch(config: Any) -> int:
    return int(config.vision_config.patch_size * config.spatial_merge_size)


def _mistral_grid(config: Any, processor: Any, height: int, width: int) -> ImageGrid:
    patch, longest = _mistral_patch(config), processor.size["longest_edge"]
    # The function only uses the shape of the image.
    shape = _Shape((3, height, width))
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    height, width = get_resize_output_image_size(shape, longest, patch, "channels_first")
    return ImageGrid(height // patch, width // patch + 1)


def _qwen_grid(_config: Any, processor: Any, height: int, width: int) -> ImageGrid:
    factor = processor.patch_size * processor.merge_size
    size = processor.size
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    height, width = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
    return ImageGrid(height // factor, width // factor)


def _gemma3_grid(config: Any, processor: Any, _height: int, _width: int) -> ImageGrid:
    if processor.do_pan_and_scan:
        raise UnsupportedModel("its processor cuts images into crops (do_pan_and_scan)")
    return ImageGrid(1, config.mm_tokens_per_image)


def _gemma4_grid(config: Any, processor: Any, height: int, width: int) -> ImageGrid:
    if config.text_config.hidden_size_per_layer_input:
        raise UnsupportedModel("its layers have embeddings of their own (Gemma 4 E2B and E4B)")
    pooled, patch = processor.pooling_kernel_size, processor.patch_size
    max_patches = processor.max_soft_tokens * pooled**2
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    height, width = get_aspect_ratio_preserving_size(height, width, patch, max_patches, pooled)
    return ImageGrid(1, height * width // (patch * pooled) ** 2)


def _gemma3_spelling(config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    ids = [config.boi_token_index, config.image_token_id, config.eoi_token_index]
    begin, image, end = tokenizer.convert_ids_to_tokens(ids)
    return begin, f"\n\n{begin}{image}{end}\n\n"


def _gemma4_spelling(config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    ids = [config.boi_token_id, config.image_token_id, config.eoi_token_id]
    begin, image, end = tokenizer.convert_ids_to_tokens(ids)
    return image, f"{begin}{image}{end}"


class _Shape(tuple[int, ...]):
    """The shape of an image, without pixels."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self)


_TOWER = ("vision_tower", "multi_modal_projector")
_QWEN = VisionFamily(
    ("visual",), _qwen_grid, ("pixel_values", "image_grid_thw"), has_grid_positions=True
)
FAMILIES = {
    "llava": VisionFamily(_TOWER, _llava_grid),
    "mistral3": VisionFamily(
        _TOWER,
        _mistral_grid,
        ("pixel_values", "image_sizes"),
        row_ends=("[IMG_BREAK]", "[IMG_END]"),
        options=lambda config: {"patch_size": _mistral_patch(config)},
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": VisionFamily(
        _TOWER, _gemma3_grid, sees_ahead=lambda config: True, spelling=_gemma3_spelling
    ),
    "gemma4": VisionFamily(
        ("vision_tower", "embed_vision"),
        _gemma4_grid,
        ("pixel_values", "image_position_ids"),
        sees_ahead=lambda config: config.use_bidirectional_attention == "vision",
        only_in_windows=True,
        spelling=_gemma4_spelling,
    ),
}
"""By model type; models of other types only serve text."""

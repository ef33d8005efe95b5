"""Turns an image into rows of the model's input.

A model for images and text has an encoder, which turns an image into as many vectors as the image
has placeholder tokens; they take the places of the placeholders' embeddings. The encoder is taken
out of the model, so that everything else sees a text model::

    pixels ─► image processor ─► encoder ─► (num_tokens, width)
                                                   │
    ids ─► embedding ─► (num_tokens, width) ◄──────┘  rows of placeholders ─► layers

============== ================================ ============================================
family         positions of an image's tokens   attention among them
============== ================================ ============================================
LLaVA          one after the other              causal
Qwen2(.5)-VL   time, row and column             causal
Gemma 3        one after the other              each sees all, in every layer
============== ================================ ============================================

How many tokens an image has follows from its size, so a prompt is laid out without the encoder.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from ostinato.core.errors import RequestError, UnsupportedModel

Pixels = npt.NDArray[np.uint8]

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_TRIED_SIZE = 56
"""Height and width of the image that each encoder is tried with."""


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """How an image's tokens are laid out: row by row."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class _Family:
    """What differs between families.

    Attributes:
        parts: The encoder's modules beside the language model.
        grid: From config, image processor, height and width.
        inputs: What the encoder takes of the processor's output.
        sees_ahead: Whether an image's tokens see those of it that follow them.
        has_grid_positions: Whether they have a position in time, row and column.
    """

    parts: tuple[str, ...]
    grid: Callable[[Any, Any, int, int], ImageGrid]
    inputs: tuple[str, ...] = ("pixel_values",)
    sees_ahead: bool = False
    has_grid_positions: bool = False


def _llava_grid(config: Any, _processor: Any, _height: int, _width: int) -> ImageGrid:
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    has_class_token = vision.model_type.startswith("clip")
    is_first_dropped = config.vision_feature_select_strategy == "default"
    return ImageGrid(1, num_patches + has_class_token - is_first_dropped)


def _qwen_grid(_config: Any, processor: Any, height: int, width: int) -> ImageGrid:
    factor = processor.patch_size * processor.merge_size
    size = processor.size
    height, width = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
    return ImageGrid(height // factor, width // factor)


def _gemma_grid(config: Any, processor: Any, _height: int, _width: int) -> ImageGrid:
    if processor.do_pan_and_scan:
        raise UnsupportedModel("its processor cuts images into crops (do_pan_and_scan)")
    return ImageGrid(1, config.mm_tokens_per_image)


_QWEN = _Family(
    ("visual",), _qwen_grid, ("pixel_values", "image_grid_thw"), has_grid_positions=True
)
FAMILIES = {
    "llava": _Family(("vision_tower", "multi_modal_projector"), _llava_grid),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "gemma3": _Family(("vision_tower", "multi_modal_projector"), _gemma_grid, sees_ahead=True),
}
"""By model type; images of other types are refused, their text is served."""


class Vision:
    """A model's encoder, and how its images are laid out.

    Attributes:
        placeholder_id: Token that stands for each vector of an image.
        settings: SHA-256 over everything besides pixels and weights that a vector depends on.
        sees_ahead: Whether an image's tokens see those of it that follow them.
        has_grid_positions: Whether they have a position in time, row and column.
    """

    def __init__(
        self,
        encoder: nn.Module,
        embedding: nn.Module,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Take an encoder as ``take_encoder`` returns it, and the model's embedding."""
        config = cast(Any, encoder.config)
        self._encoder, self._embedding, self._processor = encoder, embedding, processor
        self._config, self._family = config, FAMILIES[config.model_type]
        self.sees_ahead = self._family.sees_ahead
        self.has_grid_positions = self._family.has_grid_positions
        self.placeholder_id: int = config.image_token_id
        self.settings = hashlib.sha256(processor.to_json_string().encode()).digest()
        self._spellings = _spellings(config, tokenizer)

    def grid(self, height: int, width: int) -> ImageGrid:
        """Return the layout of an image of some size.

        Raises:
            RequestError: The model takes no image of this shape.
        """
        try:
            return self._family.grid(self._config, self._processor, height, width)
        except (ValueError, ZeroDivisionError) as error:
            raise RequestError(f"an image of {width} x {height} pixels: {error}") from error

    def spelled(self, text: str) -> str:
        """Return a text with one placeholder token for each image that it names otherwise."""
        for name, spelling in self._spellings:
            text = text.replace(name, spelling)
        return text

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> Tensor:
        """Return an image's vectors, shape (num_tokens, width).

        Args:
            pixels: RGB, shape (height, width, 3).
        """
        processed = self._processor(
            images=[pixels], return_tensors="pt", input_data_format="channels_last"
        )
        weight = next(self._encoder.parameters())
        inputs = {name: processed[name].to(weight.device) for name in self._family.inputs}
        inputs["pixel_values"] = inputs["pixel_values"].to(weight.dtype)
        output = cast(Any, self._encoder).get_image_features(**inputs, return_dict=True)
        pooled = output.pooler_output
        vectors = pooled[0] if isinstance(pooled, (list, tuple)) else pooled.flatten(0, -2)
        expected = self.grid(*pixels.shape[:2]).num_tokens
        if vectors.shape[0] != expected:
            raise UnsupportedModel(
                f"the encoder gives {vectors.shape[0]} vectors for {expected} placeholder tokens"
            )
        return cast(Tensor, vectors)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, fresh, shape (num_tokens, width)."""
        return cast(Tensor, self._embedding(ids[None])[0]).clone()

    def replace_weights(self, other: "Vision") -> None:
        """Take over the weights of the same model's encoder."""
        self._encoder.load_state_dict(other._encoder.state_dict())


def take_encoder(model: PreTrainedModel) -> nn.Module | None:
    """Take the encoder out of a model for images and text.

    Returns:
        What is left of the model's base without its language model; None if images of this type
        are not served.

    Effects: the model keeps its language model and head.
    """
    base, family = model.base_model, FAMILIES.get(model.config.model_type)
    if family is None or base is model:
        return None
    encoder: nn.Module = copy.copy(base)
    encoder._modules = {name: base._modules[name] for name in family.parts}
    encoder.config = copy.deepcopy(base.config)
    for name in family.parts:
        setattr(base, name, None)
    return encoder


def load_vision(
    path: Path,
    encoder: nn.Module,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Vision:
    """Make an encoder ready, and try it.

    Raises:
        UnsupportedModel: Why the checkpoint's images cannot be served.
    """
    if not any((path / name).exists() for name in _PROCESSOR_FILES):
        raise UnsupportedModel(f"the checkpoint has no {' or '.join(_PROCESSOR_FILES)}")
    for part in encoder.children():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation("sdpa")
    try:
        processor: Any = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False
        )
        vision = Vision(encoder, model.get_input_embeddings(), processor, tokenizer)
        vision.encode(np.full((_TRIED_SIZE, _TRIED_SIZE, 3), 127, dtype=np.uint8))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what is unknown about an encoder shows in any way
        raise UnsupportedModel(f"{type(error).__name__}: {error}") from error
    return vision


def _spellings(
    config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[tuple[str, str], ...]:
    """Return what stands for an image in texts, and how its processor writes it."""
    if config.model_type != "gemma3" or tokenizer is None:
        return ()
    ids = [config.boi_token_index, config.image_token_id, config.eoi_token_index]
    begin, image, end = tokenizer.convert_ids_to_tokens(ids)
    return ((begin, f"\n\n{begin}{image}{end}\n\n"),)

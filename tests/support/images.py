"""Tiny models for images and text: checkpoints with processors, pictures, and references."""

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.checkpoints import (
    COMPOSITES,
    VOCAB_SIZE,
    Checkpoints,
    make_config,
    make_tokenizer,
    save_checkpoint,
)

BEGIN, IMAGE, END = "<boi>", "<image>", "<eoi>"
SIZE = 56
"""Height and width that the fixed encoders want."""

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

PROCESSORS: dict[str, Any] = {
    "llava": lambda: CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    ),
    "qwen2_5_vl": lambda: Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
    ),
    "gemma3": lambda: Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}),
}
FAMILIES = tuple(PROCESSORS)
PLACES = {"llava": IMAGE, "qwen2_5_vl": BEGIN + IMAGE + END, "gemma3": BEGIN}
"""What a text has where an image belongs."""


def image_checkpoint(checkpoints: Checkpoints, family: str) -> Path:
    """Return a checkpoint that takes images."""
    path = checkpoints.path(family).with_name(f"{family}-with-images")
    if not path.exists():
        save_image_checkpoint(path, family)
    return path


def save_image_checkpoint(path: Path, family: str) -> None:
    """Write a tiny model with its processor, tokenizer and chat template."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, IMAGE, END]})
    tokenizer.chat_template = TEMPLATE.replace("PLACE", PLACES[family])
    begin, image, end = tokenizer.convert_tokens_to_ids([BEGIN, IMAGE, END])
    config: Any = make_config(family)
    config.text_config.vocab_size = VOCAB_SIZE + 8
    config.image_token_id = image
    if family == "gemma3":
        config.boi_token_index, config.eoi_token_index = begin, end
        config.mm_tokens_per_image = 16
    if family == "llava":
        config.vision_config.projection_dim = 16
    if family != "qwen2_5_vl":
        config.vision_config.image_size = SIZE
    if family == "qwen2_5_vl":
        config.vision_start_token_id, config.vision_end_token_id = begin, end
        config.video_token_id = VOCAB_SIZE + 7
    save_checkpoint(path, config)
    tokenizer.save_pretrained(path)
    PROCESSORS[family]().save_pretrained(path)


def picture(seed: int, width: int = 56, height: int = 84) -> Image.Image:
    """Draw an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """Return an image as a file."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


class ImageReference:
    """What ``transformers`` generates, with its own processor, attention and positions."""

    def __init__(self, path: Path) -> None:
        """Load a checkpoint in float64."""
        self._model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self._processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")

    @functools.cached_property
    def placeholder(self) -> int:
        """Id of the token that stands for an image."""
        return int(self._model.config.image_token_id)

    def generated(self, prompt: list[int], images: list[Image.Image], num_new: int) -> list[int]:
        """Continue a prompt, whose placeholders are all there, greedily."""
        row = torch.tensor([prompt])
        inputs: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        kinds = (row == self.placeholder).long()
        if images:
            inputs |= self._processor(images=images, return_tensors="pt")
            inputs["pixel_values"] = inputs["pixel_values"].double()
            inputs.pop("num_crops", None)
        if self._model.config.model_type == "gemma3":
            inputs["token_type_ids"] = kinds
        if self._model.config.model_type == "qwen2_5_vl":
            inputs["mm_token_type_ids"] = kinds
        with torch.inference_mode():
            self._model.generation_config.eos_token_id = None
            whole = self._model.generate(**inputs, max_new_tokens=num_new, do_sample=False)
        return whole[0, len(prompt) :].tolist()


assert set(FAMILIES) <= set(COMPOSITES)

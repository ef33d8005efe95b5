"""Tiny models for images and text: checkpoints with processors, pictures, and references."""

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.models.checkpoints import (
    Checkpoints,
    make_config,
    make_tokenizer,
    save_checkpoint,
)
from tests.support.models.model_families import COMPOSITE_HYBRIDS, COMPOSITES, VOCAB_SIZE
from tests.support.models.references import generate, reference_model

BEGIN, IMAGE, END = "<boi>", "<image>", "<eoi>"
ROW_ENDS = "[IMG_BREAK]", "[IMG_END]"
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
    "mistral3": lambda: PixtralImageProcessorPil(
        patch_size={"height": 14, "width": 14}, size={"longest_edge": 112}
    ),
    "qwen2_5_vl": lambda: _qwen_processor(14),
    "qwen3_vl": lambda: _qwen_processor(16),
    "qwen3_5": lambda: _qwen_processor(16),
    "gemma3": lambda: Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}),
    "gemma4": lambda: Gemma4ImageProcessorPil(
        patch_size=14, max_soft_tokens=70, pooling_kernel_size=2
    ),
}
FAMILIES = tuple(family for family in PROCESSORS if family not in COMPOSITE_HYBRIDS)
PLACES = {family: BEGIN + IMAGE + END for family in PROCESSORS if family.startswith("qwen")}
PLACES |= {"llava": IMAGE, "mistral3": IMAGE, "gemma3": BEGIN, "gemma4": IMAGE}
"""What a text has where an image belongs."""


def _qwen_processor(patch_size: int) -> Qwen2VLImageProcessorPil:
    side = 2 * patch_size
    size = {"shortest_edge": side**2, "longest_edge": 12 * side**2}
    return Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, size=size)


def image_checkpoint(checkpoints: Checkpoints, family: str) -> Path:
    """Return a checkpoint that takes images."""
    path = checkpoints.path(family).with_name(f"{family}-with-images")
    if not path.exists():
        save_image_checkpoint(path, family)
    return path


def save_image_checkpoint(path: Path, family: str) -> None:
    """Write a tiny model with its processor, tokenizer and chat template."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, IMAGE, END, *ROW_ENDS]})
    tokenizer.chat_template = TEMPLATE.replace("PLACE", PLACES[family])
    begin, image, end = tokenizer.convert_tokens_to_ids([BEGIN, IMAGE, END])
    config: Any = make_config(family)
    config.text_config.vocab_size = VOCAB_SIZE + 8
    config.image_token_id = image
    match family:
        case "llava":
            config.vision_config.projection_dim = 16
            config.vision_config.image_size = SIZE
        case "gemma3":
            config.boi_token_index, config.eoi_token_index = begin, end
            config.mm_tokens_per_image, config.vision_config.image_size = 16, SIZE
        case "gemma4":
            config.boi_token_id, config.eoi_token_id = begin, end
            config.text_config.use_bidirectional_attention = "vision"
            config.video_token_id = config.audio_token_id = VOCAB_SIZE + 7
            config.vision_config.pooling_kernel_size = 2
            config.vision_config.num_key_value_heads, config.vision_config.head_dim = 2, 8
        case "mistral3":
            config.spatial_merge_size = 2
        case _:
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
        self._model: Any = reference_model(path, AutoModelForImageTextToText)
        self._processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
        is_mistral = self._model.config.model_type == "mistral3"
        self._options = {"patch_size": 28} if is_mistral else {}

    @functools.cached_property
    def placeholder(self) -> int:
        """Id of the token that stands for an image."""
        return int(self._model.config.image_token_id)

    def generated(self, prompt: list[int], images: list[Image.Image], num_new: int) -> list[int]:
        """Continue a prompt, whose placeholders are all there, greedily."""
        return self.answers(prompt, images, num_new)[0]

    def answers(
        self, prompt: list[int], images: list[Image.Image], num_new: int, width: int = 1
    ) -> list[list[int]]:
        """Return the answers of a beam search, the best first; one beam is greedy."""
        options = self._inputs(prompt, images) | {"num_beams": width, "num_return_sequences": width}
        whole = generate(self._model, prompt, num_new, **options)
        return whole[:, len(prompt) :].tolist()

    def read(self, prompt: list[int], images: list[Image.Image]) -> tuple[Tensor, Tensor]:
        """Return the last hidden states, after the final norm, and the logits of all rows."""
        with torch.inference_mode():
            output = self._model(**self._inputs(prompt, images), output_hidden_states=True)
        return output.hidden_states[-1][0], output.logits[0]

    def _inputs(self, prompt: list[int], images: list[Image.Image]) -> dict[str, Any]:
        row = torch.tensor([prompt])
        inputs: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        kinds = (row == self.placeholder).long()
        kind = self._model.config.model_type
        if images:
            inputs |= self._processor(images=images, return_tensors="pt", **self._options)
            inputs["pixel_values"] = inputs["pixel_values"].double()
            for count in ("num_crops", "num_soft_tokens_per_image"):
                inputs.pop(count, None)
        if kind == "gemma3":
            inputs["token_type_ids"] = kinds
        if kind == "gemma4" or kind.startswith("qwen"):
            inputs["mm_token_type_ids"] = kinds
        return inputs


assert set(PROCESSORS) <= {*COMPOSITES, *COMPOSITE_HYBRIDS}


def repeated_scans(image: Image.Image, num_repetitions: int) -> bytes:
    """Return a progressive JPEG whose last scan is written several times."""
    file = io.BytesIO()
    image.save(file, "JPEG", progressive=True)
    content = file.getvalue()
    head, scan = content[: content.rindex(b"\xff\xda")], content[content.rindex(b"\xff\xda") : -2]
    return head + scan * num_repetitions + content[-2:]

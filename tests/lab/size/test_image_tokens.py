"""An image's tokens by the model's config alone, as its processor lays it out."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from ostinato.core.errors import ConfigError
from ostinato.lab.size.image_tokens import encoder_weights, image_tokens, read_size, tokens_of_log
from ostinato.runner.images.vision_families import FAMILIES

QWEN = {"model_type": "qwen2_5_vl"}
SIZES = ["1x1", "20x3000", "1024x768", "640x480", "9000x7000", "28x57"]


@pytest.mark.parametrize("size", SIZES)
def test_qwens_images_are_resized_as_its_processor_does(size: str):
    width, height = read_size(size)
    rows, columns = smart_resize(height, width, 28, 56 * 56, 12845056)

    assert image_tokens(QWEN, width, height) == rows * columns // 28**2


@pytest.mark.parametrize("size", SIZES)
def test_mistrals_and_gemma_4s_images_are_resized_as_by_their_processors(size: str):
    width, height = read_size(size)
    pixels = np.broadcast_to(np.uint8(0), (height, width, 3))
    rows, columns = (n // 28 for n in get_resize_output_image_size(pixels, 1540, 28))
    tall, wide = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)

    assert image_tokens({"model_type": "mistral3"}, width, height) == rows * (columns + 1)
    assert image_tokens({"model_type": "gemma4"}, width, height) == tall * wide // 48**2


KINDS = ["llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_has_the_weights_that_its_config_says(kind: str):
    """Those of the real model, built without memory, but for norms and biases."""
    vision = {"vision_use_head": False} if kind == "gemma3" else {}
    config = CONFIG_MAPPING[kind](vision_config=vision)
    config.text_config.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).base_model
    parts = [getattr(model, name) for name in FAMILIES[kind].parts]
    counted = sum(weight.numel() for part in parts for weight in part.parameters())

    assert encoder_weights(config.to_dict()) == pytest.approx(counted, rel=0.02)


def test_an_image_of_a_log_has_as_many_tokens_as_asked_for_and_is_known_again():
    part = '<image_url {"image_url": {"url": "data:image/png sha256:%s"}}>'
    cats, dogs = (f"See: {part % name} Whose?" for name in ("cats", "dogs"))

    ids = tokens_of_log(cats, lambda text: list(text.encode()), 576)

    assert len(ids) == 576 + len("See:  Whose?") and len(set(ids[5:581])) == 1
    assert ids == tokens_of_log(cats, lambda text: list(text.encode()), 576)
    assert ids[5] != tokens_of_log(dogs, lambda text: list(text.encode()), 576)[5]


def test_images_of_one_size_have_as_many_tokens_as_the_config_says():
    llava = {"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": 14}}
    assert image_tokens(llava, 9, 9) == 576
    assert image_tokens({"model_type": "gemma3"}, 9, 9) == 256


def test_what_is_no_size_or_takes_no_images_is_refused():
    with pytest.raises(ConfigError, match="such as 1024x768"):
        read_size("1024")
    with pytest.raises(ConfigError, match="'llama' accept no images"):
        image_tokens({"model_type": "llama"}, 9, 9)

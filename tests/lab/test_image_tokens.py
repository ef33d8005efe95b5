"""An image's tokens by the model's config alone, as its processor lays it out."""

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from ostinato.core.errors import ConfigError
from ostinato.lab.image_tokens import image_tokens, read_size

QWEN = {"model_type": "qwen2_5_vl"}


@pytest.mark.parametrize("size", ["1x1", "20x3000", "1024x768", "640x480", "9000x7000", "28x57"])
def test_qwens_images_are_resized_as_its_processor_does(size: str):
    width, height = read_size(size)
    rows, columns = smart_resize(height, width, 28, 56 * 56, 12845056)

    assert image_tokens(QWEN, width, height) == rows * columns // 28**2


def test_images_of_one_size_have_as_many_tokens_as_the_config_says():
    llava = {"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": 14}}
    assert image_tokens(llava, 9, 9) == 576
    assert image_tokens({"model_type": "gemma3"}, 9, 9) == 256


def test_what_is_no_size_or_takes_no_images_is_refused():
    with pytest.raises(ConfigError, match="such as 1024x768"):
        read_size("1024")
    with pytest.raises(ConfigError, match="'llama' take no images"):
        image_tokens({"model_type": "llama"}, 9, 9)

"""Prompts with images are checked in full before anything is added."""

import base64

import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.errors import RequestError
from tests.images.conftest import MakeImageLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.images import IMAGE, picture, png

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
URL = "data:image/png;base64," + base64.b64encode(png(picture(1))).decode()


def question(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "none", "multi_modal_data": {"image": picture(1)}}, "1 images and 0 places"),
        ({"prompt": IMAGE * 2, "multi_modal_data": {"image": picture(1)}}, "1 images and 2 places"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": b"broken"}}, "image 1 cannot be decoded"),
        ({"prompt": IMAGE, "multi_modal_data": {"audio": b""}}, "audio and video are not served"),
        ({"prompt": IMAGE * 3, "multi_modal_data": {"image": [b""] * 3}}, "'image': 2"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": picture(1, 99, 99)}}, "9801 pixels"),
    ],
)
def test_a_prompt_whose_images_cannot_be_placed_is_refused(
    prompt: dict[str, object], said: str, make_image_llm: MakeImageLLM
):
    llm = make_image_llm(limit_mm_per_prompt={"image": 2}, max_image_pixels=9000)

    with pytest.raises(RequestError, match=said):
        llm.generate([prompt, {"prompt": "well"}], ONE, use_tqdm=False)
    assert not llm.engine.has_work


def test_a_text_model_refuses_images_and_says_why(checkpoints: Checkpoints):
    llm = LLM(checkpoints.path("llama"), num_blocks=8)
    prompt = {"prompt": "What?", "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(RequestError, match="serves text alone: images of llama are not served"):
        llm.generate(prompt, ONE, use_tqdm=False)


def test_a_limit_of_none_leaves_the_encoder_out(make_image_llm: MakeImageLLM):
    llm = make_image_llm(limit_mm_per_prompt={"image": 0})
    assert llm.engine.loaded.vision is None
    with pytest.raises(RequestError, match="limit_mm_per_prompt"):
        llm.chat(question({"type": "image_url", "image_url": {"url": URL}}), ONE, use_tqdm=False)


def test_chats_take_images_as_urls_and_as_objects(make_image_llm: MakeImageLLM):
    """The second turn hits all of the first, image and answer included."""
    llm = make_image_llm()
    by_url = question({"type": "image_url", "image_url": {"url": URL}})
    by_object = question({"type": "image", "image": picture(1)})

    [first] = llm.chat(by_url, ONE, use_tqdm=False)
    answer = {"role": "assistant", "content": first.outputs[0].text}
    turns = [*by_object, answer, {"role": "user", "content": "And?"}]
    [second] = llm.chat(turns, ONE, use_tqdm=False)

    assert first.prompt_token_ids.count(llm.engine.loaded.vision.placeholder_id) == 16
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 4 * 4
    with pytest.raises(RequestError, match="an image part without an image"):
        llm.chat(question({"type": "image_url"}), ONE, use_tqdm=False)


def test_token_ids_may_have_one_placeholder_or_all(make_image_llm: MakeImageLLM):
    llm = make_image_llm()
    image = {"image": picture(1)}
    [text] = llm.generate({"prompt": f"a {IMAGE} b", "multi_modal_data": image}, ONE)
    [ids] = llm.generate(
        {"prompt_token_ids": text.prompt_token_ids, "multi_modal_data": image}, ONE
    )

    assert ids.prompt_token_ids == text.prompt_token_ids
    assert ids.num_cached_tokens == 16

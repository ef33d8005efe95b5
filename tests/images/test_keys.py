"""Which images may share a prefix? The worked figures of vLLM's rule, in both indexes."""

from array import array

import numpy as np
import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.images.picture import as_picture, decode
from tests.images.conftest import MakeImageLLM
from tests.support.images import IMAGE, picture, png

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
CATS, DOGS, BIRDS = picture(1), picture(2), picture(3)


def hits(llm: LLM, text: str, *images: object, salt: str = "") -> int:
    """Return how many tokens of a prompt hit."""
    prompt = {"prompt": text, "multi_modal_data": {"image": list(images)}, "cache_salt": salt}
    [output] = llm.generate([prompt], ONE, use_tqdm=False)
    return output.num_cached_tokens


@pytest.fixture(params=["radix", "hash"])
def llm(request: pytest.FixtureRequest, make_image_llm: MakeImageLLM) -> LLM:
    return make_image_llm(index=request.param)


def test_an_image_hits_by_its_pixels_at_the_same_place_for_one_tenant(llm: LLM):
    text = f"{IMAGE}{IMAGE}{IMAGE}."
    assert hits(llm, text, CATS, DOGS, BIRDS) == 0
    assert hits(llm, text, png(CATS), DOGS, BIRDS) == 48, "the same pixels, by another way"
    assert hits(llm, text, CATS, DOGS, CATS) == 32, "the third of three is another"
    assert hits(llm, text, DOGS, DOGS, BIRDS) == 0, "the same placeholders, another image"
    assert hits(llm, "a" + text, CATS, DOGS, BIRDS) == 0, "moved by one token"
    assert hits(llm, text, CATS, DOGS, BIRDS, salt="other") == 0
    with_text_alone = [{"prompt_token_ids": [llm.engine.loaded.vision.placeholder_id] * 20}]
    assert llm.generate(with_text_alone, ONE, use_tqdm=False)[0].num_cached_tokens == 0


def test_the_worked_figures_of_vllms_design_document_hold():
    """Text of 8 tokens, an image of 41, one token behind; blocks of 16: three full blocks."""
    span = ImageSpan(b"digest", 8, 41)
    key = PrefixKey(Identity(), array("I", range(50)), [span])

    extras = [key.extra(start, start + 16) for start in (0, 16, 32, 48)]

    offsets = [None if e is None else int.from_bytes(e.encoded[10:18], "little", signed=True)
               for e in extras]  # fmt: skip
    assert offsets == [8, -8, -24, -40]


def test_the_explanation_names_the_image(llm: LLM):
    text = f"Look: {IMAGE} What is it?"
    hits(llm, text, CATS)
    prompt = {"prompt": text, "multi_modal_data": {"image": DOGS}}
    [output] = llm.generate([prompt], ONE, use_tqdm=False)

    said = str(llm.explain(output))

    assert "another image" in said


def test_a_covered_image_runs_neither_processor_nor_encoder(
    make_image_llm: MakeImageLLM, monkeypatch: pytest.MonkeyPatch
):
    llm = make_image_llm(mm_encoder_cache_bytes=0)
    text = f"Look: {IMAGE} What is it?"
    hits(llm, text, CATS)
    hits(llm, "?" + text, DOGS)  # the output for the first image is dropped
    monkeypatch.setattr(llm.engine.loaded.vision, "_processor", None)

    assert hits(llm, text + " And why?", CATS) > 16


def test_erasing_a_tenant_drops_what_the_encoder_made_of_its_images(make_image_llm: MakeImageLLM):
    llm = make_image_llm()
    images = llm.engine.runner.images
    assert images is not None
    hits(llm, IMAGE + "a", CATS, salt="alice")
    hits(llm, IMAGE + "a", CATS, salt="bob")
    assert len(images) == 2, "no tenant can find out what another has sent"

    llm.erase("alice")

    assert len(images) == 1
    assert hits(llm, IMAGE + "a", CATS, salt="bob") == 16


def test_files_of_the_same_pixels_are_one_image():
    upright = as_picture(CATS, 10**6)
    assert decode(png(CATS), 10**6).digest == upright.digest == as_picture(upright, 1).digest
    assert as_picture(CATS.transpose(2), 10**6).digest != upright.digest
    turned = np.asarray(CATS).reshape(56, 84, 3)
    assert as_picture(turned, 10**6).digest != upright.digest, "the same bytes, another shape"

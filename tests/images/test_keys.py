"""Which images share a prefix: the worked figures of vLLM's rule, in both indexes."""

from array import array

import numpy as np
import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.engine.loop.kv_events_wire import BatchEncoder, BlockStored
from ostinato.engine.loop.kv_events_wire import decode as decode_batch
from ostinato.images.picture import as_picture, decode
from ostinato.runner.images.store import ServedImage
from tests.images.conftest import MakeImageLLM
from tests.support.models.images import IMAGE, picture, png
from tests.support.servers.memory_search import search

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

    extras = [key.block_key(start, start + 16).extra for start in (0, 16, 32, 48)]

    offsets = [int.from_bytes(extra[10:18], "little", signed=True) for extra in extras]
    assert offsets == [8, -8, -24, -40]


def test_events_tell_images_and_offsets_as_vllm_does(make_image_llm: MakeImageLLM):
    """Blocks of 4; one image of 16 tokens behind two of text, and one that begins a block."""
    llm = make_image_llm(keep_event_batches=8)
    hits(llm, f"::{IMAGE}??{IMAGE}", CATS, DOGS)
    snapshot = llm.engine.cache.snapshot()
    assert snapshot is not None

    [event] = decode_batch(BatchEncoder("CPU").encode(snapshot)).events

    assert isinstance(event, BlockStored) and event.extra_keys is not None
    pairs = [keys[0] for keys in event.extra_keys if keys is not None]
    assert [offset for _, offset in pairs] == [2, -2, -6, -10, -14, 0, -4, -8, -12]
    cats, dogs = pairs[0][0], pairs[5][0]
    assert [name for name, _ in pairs] == [cats] * 5 + [dogs] * 4
    assert len(bytes.fromhex(cats)) == len(bytes.fromhex(dogs)) == 32 and cats != dogs


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
    monkeypatch.setattr(llm.engine.loaded.vision, "encode", None)

    assert hits(llm, text + " And why?", CATS) > 16


def test_nothing_of_an_erased_tenants_images_is_found_again(make_image_llm: MakeImageLLM):
    """Neither its digest nor its vectors; another tenant's, of the same image, still hits."""
    llm = make_image_llm(keep_event_batches=8)
    images, vision = llm.engine.runner.images, llm.engine.loaded.vision
    assert images is not None and vision is not None
    for salt in ("alice", "bob"):
        hits(llm, IMAGE + "a", CATS, salt=salt)
    assert len(images) == 2, "no tenant can find out what another has sent"
    digest = ServedImage.of(
        np.asarray(CATS), as_picture(CATS, 10**6).digest, vision, b"alice"
    ).digest
    vectors = images.vectors(digest)
    engine = llm.engine
    books = [value for value in vars(engine).values() if isinstance(value, (dict, list))]
    places = [engine.cache, engine.scheduler, engine.image_encoder, images, *books]
    assert search(places, b"alice", digests=[digest]).digests

    llm.erase("alice")

    found = search(places, b"alice", digests=[digest, digest.hex().encode()])
    assert (found.salts, found.digests) == (0, 0)
    assert len(images) == 1 and not vectors.any()
    assert hits(llm, IMAGE + "a", CATS, salt="bob") == 16


def test_files_of_the_same_pixels_are_one_image():
    upright = as_picture(CATS, 10**6)
    assert decode(png(CATS), 10**6).digest == upright.digest == as_picture(upright, 1).digest
    assert as_picture(CATS.transpose(2), 10**6).digest != upright.digest
    turned = np.asarray(CATS).reshape(56, 84, 3)
    assert as_picture(turned, 10**6).digest != upright.digest, "the same bytes, another shape"

"""Prompts with images are continued as ``transformers`` does, in float64, whatever is cached."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ostinato import LLM, LoRARequest, RequestOutput, SamplingParams
from ostinato.engine.requests.prompts import parse_prompt
from tests.images.conftest import MakeImageLLM
from tests.support.models.adapters import save_adapter
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.images import FAMILIES, PLACES, ImageReference, image_checkpoint, picture

NUM_NEW = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
FIRST, SECOND = picture(1), picture(2, 84, 56)
ReferenceOf = Callable[[str], ImageReference]


def prompt(text: str, *images: Image.Image) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def serve(llm: LLM, *prompts: dict[str, Any]) -> list[RequestOutput]:
    return llm.generate(list(prompts), GREEDY, use_tqdm=False)


def assert_exact(output: RequestOutput, given: dict[str, Any], reference: ImageReference) -> None:
    images = given.get("multi_modal_data", {}).get("image", [])
    expected = reference.generated(list(output.prompt_token_ids), images, NUM_NEW)
    assert list(output.outputs[0].token_ids) == expected


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("family", "budget"),
    [
        *((family, 31 if family.startswith("gemma") else 7) for family in FAMILIES),
        *((family, 512) for family in ("llava", "qwen3_vl", "gemma4")),
    ],
)
def test_cold_and_warm_prompts_are_continued_as_by_transformers(
    family: str, budget: int, make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    """Chunks end within images; beside a stranger; hits end before, inside and behind images."""
    llm = make_image_llm(family, max_num_batched_tokens=budget, max_num_seqs=3)
    place, reference = PLACES[family], reference_of(family)
    both = prompt(f"Once upon {place} a time {place} there was", FIRST, SECOND)
    asked = prompt(f"Once upon {place} a time {place} who was it?", FIRST, SECOND)
    other = prompt(f"Once upon {place} a time {place} there was", FIRST, FIRST)
    stranger = {"prompt": "Another prefix, another block of sixteen tokens"}

    cold = serve(llm, both, stranger)
    warm = serve(llm, asked, other, both)
    num_encoded = llm.engine.runner.images.num_encoded

    assert [output.num_cached_tokens for output in cold] == [0, 0]
    assert warm[0].num_cached_tokens > warm[1].num_cached_tokens >= 8, "behind, and before"
    assert warm[2].num_cached_tokens == len(warm[2].prompt_token_ids) - 1
    assert num_encoded == 2, "an image that was seen is not encoded again"
    for output, given in zip([*cold, *warm], [both, stranger, asked, other, both], strict=True):
        assert_exact(output, given, reference)


def test_prompts_of_hybrids_are_continued_as_by_transformers(
    make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    """Qwen3.5 carries states over images: hits end where one was saved."""
    llm = make_image_llm("qwen3_5", max_num_batched_tokens=80, max_num_seqs=3, block_size=16)
    words, place = "Once upon a time there was a block of sixteen tokens. ", PLACES["qwen3_5"]
    given = prompt(f"Look: {place} {4 * words}{place} Whose is it?", FIRST, SECOND)

    [cold], [warm] = serve(llm, given), serve(llm, given)

    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens >= 64
    for output in (cold, warm):
        assert_exact(output, given, reference_of("qwen3_5"))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_may_end_inside_an_image(
    family: str, make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    """A request is cancelled when half of its image is computed; the next one finds that half."""
    given = prompt(f"Hi {PLACES[family]} you", SECOND)
    llm = make_image_llm(family, max_num_batched_tokens=4, max_num_seqs=2)
    made = llm.engine.make_request(parse_prompt(given), GREEDY)
    [span] = made.request.images
    llm.engine.add(made)
    half = span.start // 4 * 4 + 4
    while llm.engine.runner.num_tokens_computed < half:
        llm.engine.step()
    llm.engine.cancel(made.request.request_id)

    [warm] = serve(llm, given)

    assert span.start < warm.num_cached_tokens == half < span.end
    assert_exact(warm, given, reference_of(family))


def test_a_waiting_request_holds_its_images(make_image_llm: MakeImageLLM):
    """The pixels outlive the caller's references until the request has been computed."""
    engine = make_image_llm().engine
    engine.add(engine.make_request(parse_prompt(prompt(f"Hi {PLACES['llava']}", FIRST)), GREEDY))
    gc.collect()

    while engine.has_work:
        errors = [state.error for state in engine.step()]

    assert errors == [None]


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
def test_an_image_is_encoded_again_when_its_output_was_dropped(
    family: str, make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    """Only the newest output is kept, and two images take turns in chunks of one step."""
    llm = make_image_llm(
        family, max_num_batched_tokens=16, max_num_seqs=2, mm_encoder_cache_bytes=0
    )
    first, second = (prompt(f"{PLACES[family]} what is it?", image) for image in (FIRST, SECOND))

    for output, given in zip(serve(llm, first, second), [first, second], strict=True):
        assert_exact(output, given, reference_of(family))
    images = llm.engine.runner.images
    assert images is not None and len(images) == 1


def test_the_rest_of_an_image_is_computed_ahead_with_the_adapter_of_its_request(
    make_image_llm: MakeImageLLM, checkpoints: Checkpoints, tmp_path: Path
):
    """Chunks that end within an image change nothing, with an adapter as without."""
    given = prompt(f"A block {PLACES['gemma3']} of sixteen", SECOND)
    base = image_checkpoint(checkpoints, "gemma3")
    layers = [f"language_model.layers.{n}.self_attn" for n in range(2)]
    wanted = [f"{layer}.{name}_proj" for layer in layers for name in "qkv"]
    adapter = save_adapter(base, tmp_path / "adapter", 1, target_modules=wanted)
    scored, said = replace(GREEDY, logprobs=0), []
    for budget in (512, 8):
        llm = make_image_llm(
            "gemma3", max_num_batched_tokens=budget, max_num_seqs=2, enable_lora=True
        )
        request = LoRARequest("one", 1, str(adapter))
        [output] = llm.generate([given], scored, use_tqdm=False, lora_request=request)
        said.append(output.outputs[0].cumulative_logprob)

    assert said[0] == pytest.approx(said[1], abs=1e-9)

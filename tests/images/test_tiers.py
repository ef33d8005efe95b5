"""Prefixes with images outlive the process, and are found by the images' content and place."""

from pathlib import Path
from typing import Any

from ostinato import LLM, RequestOutput, SamplingParams
from tests.images.conftest import MakeImageLLM
from tests.support.models.images import IMAGE, picture

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CATS, DOGS, BIRDS = picture(1), picture(2), picture(3)
TEXT = f"One: {IMAGE} and two: {IMAGE} differ in what?"


def ask(llm: LLM, *images: Any) -> RequestOutput:
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": list(images)}}
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0]


def test_an_image_is_found_on_the_disk_by_its_pixels(make_image_llm: MakeImageLLM, tmp_path: Path):
    """After a restart all whole blocks are loaded; with another second image, those before it."""
    settings = {"kv_disk": tmp_path / "kv", "kv_disk_bytes": 2**24}
    llm = make_image_llm(**settings)
    before, other = ask(llm, CATS, DOGS), ask(llm, CATS, BIRDS)
    ids = list(before.prompt_token_ids)
    llm.erase("")
    again = ask(llm, CATS, DOGS)
    assert again.num_cached_tokens == 0, "erased from the disk, too"
    llm.engine.close()

    llm = make_image_llm(**settings)
    after = ask(llm, CATS, DOGS)
    assert llm.engine.runner.images.num_encoded == 0, "what is loaded is not encoded"
    assert after.cached_tokens_from == {"disk": (len(ids) - 1) // 4 * 4}
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.reset_prefix_cache()
    second = len(ids) - 1 - ids[::-1].index(llm.engine.loaded.vision.placeholder_id) - 15
    changed = ask(llm, CATS, BIRDS)
    assert changed.cached_tokens_from == {"disk": second // 4 * 4}
    assert changed.outputs[0].token_ids == other.outputs[0].token_ids
    assert ask(llm, BIRDS, CATS).num_cached_tokens < second // 2
    llm.engine.close()

"""Prompts with images are embedded, compared and searched as by ``transformers``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import BeamSearchParams, PoolingParams
from ostinato.errors import RequestError
from tests.exactness.test_logits import TOLERANCE
from tests.images.conftest import MakeImageLLM
from tests.support.models.images import PLACES, ImageReference, picture

FIRST, SECOND = picture(1), picture(2, 84, 56)
ReferenceOf = Callable[[str], ImageReference]
ONE_EACH = pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])


def prompt(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


@ONE_EACH
def test_an_embedding_is_the_last_hidden_state_behind_images(
    family: str, make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    llm, place = make_image_llm(family), PLACES[family]
    given = prompt(f"Look: {place} and {place} whose is it?", FIRST, SECOND)
    raw = PoolingParams(normalize=False)

    [cold], [warm] = (llm.embed(given, pooling_params=raw, use_tqdm=False) for _ in range(2))

    states, _ = reference_of(family).read(list(cold.prompt_token_ids), [FIRST, SECOND])
    for output in (cold, warm):
        assert output.outputs.embedding == pytest.approx(states[-1].tolist(), abs=TOLERANCE)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == len(warm.prompt_token_ids) - 1
    with pytest.raises(RequestError, match="images is not cut"):
        llm.embed(given, pooling_params=PoolingParams(truncate_prompt_tokens=9), use_tqdm=False)


@ONE_EACH
def test_a_choice_behind_an_image_is_as_likely_as_its_tokens(
    family: str, make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    llm = make_image_llm(family)
    given, choices = prompt(f"Look: {PLACES[family]} It is a", SECOND), [" tune", " block", " bass"]

    output = llm.choose(given, choices)

    tokenizer = llm.get_tokenizer()
    [before] = llm.embed(given, use_tqdm=False)
    for choice in output.choices:
        ids = tokenizer(f"x{choice.text}", add_special_tokens=False)["input_ids"]
        tail = ids[len(tokenizer("x", add_special_tokens=False)["input_ids"]) :]
        _, logits = reference_of(family).read([*before.prompt_token_ids, *tail], [SECOND])
        rows = logits[-len(tail) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(tail)[:, None]).sum().item()
        assert choice.logprob == pytest.approx(expected, abs=TOLERANCE)
    assert output.num_cached_tokens == 2 * (len(before.prompt_token_ids) - 1)
    by_ids = {"prompt_token_ids": before.prompt_token_ids, "multi_modal_data": {"image": [SECOND]}}
    assert llm.choose(by_ids, [tail]).best.logprob == pytest.approx(expected, abs=TOLERANCE)


@ONE_EACH
def test_beams_behind_an_image_are_those_of_transformers(
    family: str, make_image_llm: MakeImageLLM, reference_of: ReferenceOf
):
    llm, given = make_image_llm(family), prompt(f"Look: {PLACES[family]} it is", FIRST)
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)

    [cold], [warm] = llm.beam_search([given], params), llm.beam_search([given], params)

    [ids] = [output.prompt_token_ids for output in llm.embed(given, use_tqdm=False)]
    expected = reference_of(family).answers(list(ids), [FIRST], 5, width=3)
    for output in (cold, warm):
        assert [each.tokens[len(ids) :] for each in output.sequences] == expected
    assert warm.num_cached_tokens == len(ids) - 1

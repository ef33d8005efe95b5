"""Models for images and text serve text, with their language model."""

import pytest
from transformers import PreTrainedModel

from ostinato import LLM, SamplingParams
from ostinato.core.errors import RequestError
from ostinato.engine.prompts.chat import render_chat
from ostinato.runner.loading.model_support import auto_class
from ostinato.runner.model_loader import load_model
from tests.runner.bench import random_prompt
from tests.runner.conftest import Served
from tests.support.models.checkpoints import Checkpoints, make_tokenizer
from tests.support.models.model_families import COMPOSITE_HYBRIDS, COMPOSITES
from tests.support.models.references import generate, reference_model

NUM_NEW = 8


def generated(checkpoints: Checkpoints, family: str, prompt: list[int]) -> list[int]:
    """What transformers generates with the whole model, images' encoder included."""
    path = checkpoints.path(family)
    config = load_model(path, "float64").config
    tokens = generate(reference_model(path, auto_class(config)), prompt, NUM_NEW)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", COMPOSITES)
def test_text_is_generated_as_by_the_whole_model(family: str, checkpoints: Checkpoints):
    """Cold in chunks, then with hits, beside a stranger."""
    prompt, stranger = random_prompt(1, 37), random_prompt(2, 21)
    llm = LLM(
        checkpoints.path(family),
        dtype="float64",
        block_size=4,
        num_blocks=128,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)

    cold, _ = llm.generate([prompt, stranger], params, use_tqdm=False)
    warm, _ = llm.generate([prompt, stranger], params, use_tqdm=False)

    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens >= 32
    expected = generated(checkpoints, family, prompt)
    assert list(cold.outputs[0].token_ids) == list(warm.outputs[0].token_ids) == expected


@pytest.mark.parametrize("family", COMPOSITE_HYBRIDS)
def test_text_of_hybrids_is_generated_as_by_the_whole_model(family: str, checkpoints: Checkpoints):
    """Cold in two chunks, then behind a checkpoint."""
    prompt = random_prompt(1, 100)
    llm = LLM(checkpoints.path(family), dtype="float64", max_num_batched_tokens=80, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)

    cold, warm = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))

    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
    expected = generated(checkpoints, family, prompt)
    assert list(cold.outputs[0].token_ids) == list(warm.outputs[0].token_ids) == expected


@pytest.mark.parametrize("family", ["mistral3", "llava"])
def test_a_language_model_of_a_known_build_is_fused(family: str, served: Served):
    assert served(family, "float32").fused is not None


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen2_5_vl"])
def test_encoders_of_images_are_not_kept_in_memory(family: str, served: Served):
    parts = served(family).model.base_model.named_children()

    assert [name for name, part in parts if isinstance(part, PreTrainedModel)] == ["language_model"]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio"])
def test_an_image_in_a_conversation_is_refused_by_its_place(kind: str):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind}]},
    ]

    with pytest.raises(RequestError, match=rf"message 1 .*{kind!r}.*nothing is loaded"):
        render_chat(make_tokenizer(), messages)

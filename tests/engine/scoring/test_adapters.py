"""Embeddings and choices with LoRA adapters: the adapter's numbers, and no block of another's."""

from pathlib import Path

import pytest

from ostinato import LLM, BeamSearchParams, LoRARequest
from ostinato.engine.scoring.pooling_params import PoolingParams
from tests.exactness.reference import PROMPTS
from tests.exactness.test_logits import TOLERANCE
from tests.support.engines import assert_idle
from tests.support.models.adapters import PeftReference, adapters
from tests.support.models.checkpoints import Checkpoints

__all__ = ["adapters"]

RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> LLM:
    path = str(checkpoints.path("llama"))
    return LLM(path, dtype="float64", block_size=4, num_blocks=256, enable_lora=True)


def test_an_embedding_is_that_of_the_adapter(llm: LLM, checkpoints: Checkpoints, adapters: Path):
    """Computed, read from the cache, and beside the base model in the same step."""
    reference = PeftReference(checkpoints.path("llama"), [adapters / "sql", adapters / "fr"])
    requests = [
        LoRARequest("sql", 1, adapters / "sql"),
        LoRARequest("fr", 2, adapters / "fr"),
        None,
    ]
    [prompt, *_] = PROMPTS

    for attempt in range(2):
        outputs = llm.embed([prompt] * 3, pooling_params=RAW, lora_request=requests, use_tqdm=False)
        for output, name in zip(outputs, ("sql", "fr", ""), strict=True):
            expected = reference.last_hidden(prompt, name)
            assert output.outputs.embedding == pytest.approx(expected, abs=TOLERANCE)
            assert output.num_cached_tokens == attempt * (len(prompt) - 1)
    assert_idle(llm.engine)


def test_a_choice_is_as_likely_as_the_adapter_says(
    llm: LLM, checkpoints: Checkpoints, adapters: Path
):
    reference, prompt = PeftReference(checkpoints.path("llama"), [adapters / "sql"]), PROMPTS[1]
    following = reference.generated(prompt, "sql", 3)
    other = reference.generated(prompt, "", 3)
    assert following != other, "the adapter changes what is likely"

    sql = LoRARequest("sql", 1, adapters / "sql")
    llm.reset_prefix_cache()
    with_adapter = llm.choose(prompt, [following, other], lora_request=sql)
    without = llm.choose(prompt, [following, other])

    assert [choice.is_greedy for choice in with_adapter.choices] == [True, False]
    assert [choice.is_greedy for choice in without.choices] == [False, True]
    assert without.num_cached_tokens == with_adapter.num_cached_tokens == len(prompt) - 1
    assert_idle(llm.engine)


def test_beams_are_those_of_the_adapter(llm: LLM, checkpoints: Checkpoints, adapters: Path):
    """Beside the base model's beams of the same prompt, cold and with hits."""
    reference, prompt = PeftReference(checkpoints.path("llama"), [adapters / "sql"]), PROMPTS[2]
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    expected = [reference.generated(prompt, name, 6, num_beams=4) for name in ("sql", "")]
    assert expected[0] != expected[1], "the adapter changes what is likely"
    sql = LoRARequest("sql", 1, adapters / "sql")
    llm.reset_prefix_cache()

    for _ in range(2):
        outputs = llm.beam_search([prompt] * 2, params, lora_request=[sql, None])
        assert [o.sequences[0].tokens[len(prompt) :] for o in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [len(prompt) - 1] * 2
    assert_idle(llm.engine)

"""How well a real model expects a text, in each precision, beside transformers in the same run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.server.state import ServerState
from tests.support.models.real_model import answers

pytestmark = pytest.mark.real

CORPUS = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
NUM_SCORED = 384
"""Tokens of the corpus whose probabilities are compared."""


@pytest.fixture(scope="module")
def folder(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as safetensors, which load in a moment."""
    path = tmp_path_factory.mktemp("smollm2")
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def corpus(shared_state: ServerState, reference: PreTrainedModel) -> tuple[list[int], float]:
    """A fixed part of the corpus, and its perplexity by transformers."""
    if not CORPUS.is_file():
        pytest.skip(f"no corpus: {CORPUS}")
    tokenizer = shared_state.llm.engine.loaded.require_tokenizer()
    ids = list(tokenizer(CORPUS.read_text("utf-8")[:4000])["input_ids"])[:NUM_SCORED]
    with torch.inference_mode():
        loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    return ids, math.exp(loss)


def perplexity(output: RequestOutput) -> float:
    """How far a model is from expecting a prompt; 1 is certainty."""
    assert output.prompt_logprobs is not None
    scored = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    found = [places[token].logprob for token, places in scored if places is not None]
    return math.exp(-sum(found) / len(found))


def test_perplexity_in_float32_is_that_of_transformers(
    state: ServerState, corpus: tuple[list[int], float]
):
    ids, expected = corpus
    (output,) = answers(state, [ids], max_tokens=1, prompt_logprobs=0)

    assert perplexity(output) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        pytest.param({}, 0.01, marks=pytest.mark.nightly),
        pytest.param({"quantization": "int8"}, 0.015, marks=pytest.mark.nightly),
        ({"quantization": "int4"}, 0.03),
        pytest.param({"quantization": "w4a8"}, 0.03, marks=pytest.mark.nightly),
        pytest.param({"kv_cache_dtype": "int8"}, 0.015, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_perplexity_hardly_grows_in_fewer_bits(
    settings: dict[str, Any], loss: float, folder: Path, corpus: tuple[list[int], float]
):
    ids, expected = corpus
    llm = LLM(folder, dtype="bfloat16", num_blocks=64, **settings)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    llm.close()

    assert perplexity(output) == pytest.approx(expected, rel=loss)

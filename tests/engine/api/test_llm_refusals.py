"""What ``LLM`` refuses, and that it changes nothing before it does."""

from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.errors import InvalidSamplingParams, MissingTokenizer, ModelNotFound
from tests.engine.api.llm_calls import GREEDY, PROMPTS, tokens_of
from tests.engine.api.test_llm_chat import conversation
from tests.support.engines import assert_idle
from tests.support.models.checkpoints import Checkpoints, without_tokenizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be an integer, at least 1"),
        ({"n": 0}, "n=0: must be an integer, at least 1"),
        ({"n": 10**9}, "n=1000000000: "),
        ({"temperature": -0.1}, r"temperature=-0\.1: must be a number, at least 0"),
        ({"temperature": float("nan")}, "temperature=nan: must be a number"),
        ({"top_p": 0.0}, r"top_p=0\.0: must be a number, above 0 and at most 1"),
        ({"top_k": -2}, "top_k=-2: must be an integer, at least 0"),
        ({"min_p": 1.5}, r"min_p=1\.5: must be a number, at least 0 and at most 1"),
        ({"presence_penalty": 3}, "presence_penalty=3: must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a number, above 0"),
        ({"seed": "x"}, "seed='x': must be an integer"),
        ({"stop": [""]}, "stop='': must be a string that is not empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1: must be an integer"),
        ({"stop_token_ids": [320]}, "stop_token_ids names token id 320: .* from 0 to 319"),
        ({"logit_bias": {320: 1.0}}, "logit_bias names token id 320: .* from 0 to 319"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias\[5\]=101\.0: must be a number"),
        ({"logprobs": -2}, "logprobs=-2: must be an integer, at least -1"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs=1000000: at most 320 alternatives"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ({"stop": "x", "detokenize": False}, "stop strings need text"),
    ],
)
def test_params_that_cannot_be_are_refused(changes: dict[str, Any], message: str, llm: LLM):
    """The engine goes on: a good request works afterwards."""
    with pytest.raises(InvalidSamplingParams, match=message):
        llm.generate([PROMPTS[0]], SamplingParams(**changes), use_tqdm=False)
    assert_idle(llm.engine)

    assert len(tokens_of(llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False))[0]) == 8


def test_without_a_tokenizer_ids_are_served_and_texts_are_not(
    checkpoints: Checkpoints, tmp_path: Path
):
    path = without_tokenizer(checkpoints.path("llama"), tmp_path / "bare")
    llm = LLM(path, num_blocks=32)
    silent = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, logprobs=1)

    output = llm.generate([PROMPTS[0]], silent, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (4, "")
    assert output.logprobs is not None
    assert {entry.decoded_token for row in output.logprobs for entry in row.values()} == {None}

    for ask in (
        lambda: llm.generate("To be", silent, use_tqdm=False),
        lambda: llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False),
        lambda: llm.chat(conversation("hi"), silent, use_tqdm=False),
        llm.get_tokenizer,
    ):
        with pytest.raises(MissingTokenizer, match="give prompts as token ids and set detokenize"):
            ask()
    assert_idle(llm.engine)


def test_a_model_that_is_not_there_is_refused():
    with pytest.raises(ModelNotFound, match="models known by name: tiny-shakespeare"):
        LLM("/no/such/model")

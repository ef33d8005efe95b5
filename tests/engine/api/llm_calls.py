"""Prompts of tests of ``LLM.generate``, and what came of them."""

from collections.abc import Sequence
from typing import Any

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.requests.outputs import CompletionOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(range(3 + 5 * start, 14 + 5 * start)) for start in range(6)]


def greedy(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    """Return the greedy continuation of a prompt."""
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    return output.outputs[0]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the ids of each request's first continuation."""
    return [output.outputs[0].token_ids for output in outputs]

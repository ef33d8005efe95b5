"""Prompts of tests of ``LLM.generate``, and what came of them."""

from collections.abc import Sequence

from ostinato import RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(range(3 + 5 * start, 14 + 5 * start)) for start in range(6)]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the ids of each request's first continuation."""
    return [output.outputs[0].token_ids for output in outputs]

"""Prompts that share blocks and copy, their answers, and an engine that a test steps by hand."""

from typing import Any

import pytest

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.prompts import Prompt
from tests.engine.api.llm_calls import tokens_of
from tests.support.models.checkpoints import Checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
STEM = list(range(30, 61))
PROMPTS = [STEM, [*STEM[:21], 5, 6, 7], [*STEM[:10], 8], list(range(90, 103)), STEM]
"""Relatives, a stranger, and a twin."""


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> list[list[int]]:
    """Serve the prompts one by one without a cache."""
    path = str(checkpoints.path("llama"))
    llm = LLM(path, dtype="float64", block_size=4, num_blocks=64, enable_prefix_caching=False)
    return [tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


def add(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, **named: Any) -> str:
    """Add a request; returns its name."""
    made = engine.make_request(Prompt(token_ids=prompt), params, **named)
    engine.add(made)
    return made.request.request_id


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left; returns the outputs of what ended."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_work:
        states = [state for state in engine.step() if state.finished]
        ended.update((state.request.request_id, state.output()) for state in states)
    return ended

"""Engines over one tier in memory, restarted one after another."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.loop import engine as engine_module
from ostinato.engine.requests.prompts import parse_prompt
from ostinato.engine.tiers import loads as tier_loads
from ostinato.scheduling.learned_prices import LearnedPrices
from ostinato.scheduling.step_prices import StepPrices
from tests.support.servers.memory_tier import MemoryTier

TEXT = [1 + (i * 37) % 61 for i in range(130)]
"""Eight blocks of sixteen, and two tokens."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)

NewLLM = Callable[..., LLM]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def new_llm(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewLLM]:
    """Makes engines over one tier, one after another: each is a restart of the one before."""
    monkeypatch.setattr(engine_module, "open_tiers", tier.opened)
    monkeypatch.setattr(tier_loads, "FIRST_PATIENCE_S", 60.0)  # a busy machine is no slow disk
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        for earlier in made:
            earlier.close()
        made.append(LLM(num_blocks=64, max_model_len=256, kv_disk="unused", **settings))
        return made[-1]

    yield make
    made[-1].close()


def ask(llm: LLM, tokens: list[int] = TEXT, salt: str = "") -> RequestOutput:
    prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0]


def slow_computing() -> LearnedPrices:
    """Return prices at which a tier may take any time."""
    return LearnedPrices(StepPrices(0.0, 1.0, 0.0))


def engine_prompt(tokens: list[int], salt: str = "") -> Any:
    return parse_prompt({"prompt_token_ids": tokens, "cache_salt": salt})

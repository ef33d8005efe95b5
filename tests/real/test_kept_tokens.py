"""Long conversations with a real model at temperature 1, with and without a server in between."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from ostinato import RequestOutput, SamplingParams
from ostinato.server.state import ServerState

pytestmark = pytest.mark.real

NUM_NEW = 16
Turn = tuple[str, int, int, int]
"""Text of an answer, prompt tokens, cached ones, and tokens of the answer."""

NO_MARKS = {number: -100.0 for number in range(17) if number != 2}
"""Bias against special tokens but the end: an answer that hides one is tokenized by its text."""

Ask = Callable[[list[dict[str, str]], int], Turn]


def num_missed(ask: Ask, num_turns: int) -> int:
    """Count the tokens of earlier turns that missed, but for the last of each (law 4)."""
    messages: list[dict[str, str]] = []
    known, missed = 0, 0
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Tell me {turn + 1} things, in a list."})
        text, num_prompt, num_cached, num_answer = ask(messages, turn)
        messages.append({"role": "assistant", "content": text})
        missed += max(0, known - 1 - num_cached)
        known = num_prompt + num_answer
    return missed


@pytest.mark.nightly
def test_every_turn_hits_all_tokens_of_those_before_it(state: ServerState):
    def ask(messages: list[dict[str, str]], seed: int) -> Turn:
        async def last() -> RequestOutput:
            params = SamplingParams(max_tokens=NUM_NEW, seed=seed, logit_bias=NO_MARKS)
            async for output in state.llm.chat(messages, params):
                found = output
            return found

        output = asyncio.run(last())
        answer, prompt = output.outputs[0], output.prompt_token_ids
        return answer.text, len(prompt), output.num_cached_tokens, len(answer.token_ids)

    assert num_missed(ask, num_turns=20) == 0


def test_every_turn_of_a_client_hits_all_tokens_of_those_before_it(client: openai.OpenAI):
    def ask(messages: Any, seed: int) -> Turn:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=messages,
            max_tokens=NUM_NEW,
            seed=100 + seed,
            temperature=1,
            logit_bias={str(number): -100 for number in NO_MARKS},
        )
        text, usage = answer.choices[0].message.content, answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return text or "", usage.prompt_tokens, cached, usage.completion_tokens

    assert num_missed(ask, num_turns=8) == 0

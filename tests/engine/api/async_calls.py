"""What the tests of ``AsyncLLM`` share: prompts, their answers, and a loop that ends."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, RequestOutput, SamplingParams
from tests.engine.loop.stepping import StepByStep, async_llm, last
from tests.support.models.checkpoints import Checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
STEM = list(range(30, 51))
PROMPTS = [STEM, [*STEM[:13], 5, 6, 7], [*STEM[:10], 8], list(range(90, 103))]


@pytest.fixture
def llm(checkpoints: Checkpoints) -> Iterator[AsyncLLM]:
    """Lend an engine with an event loop; it is idle when the test is over."""
    with async_llm(checkpoints) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> list[list[int]]:
    """Serve the prompts offline, one by one, without a cache."""
    path = str(checkpoints.path("llama"))
    llm = LLM(path, dtype="float64", num_blocks=64, enable_prefix_caching=False)
    outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in outputs]


def run(story: Coroutine[Any, Any, Any]) -> Any:
    """Run a story on an event loop of its own, which may not wait forever."""
    return asyncio.run(asyncio.wait_for(story, timeout=60))


def tokens_of(output: RequestOutput) -> list[int]:
    """Return the ids of the first continuation."""
    return output.outputs[0].token_ids


async def ends(*streams: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """Read streams to their ends, all at once."""
    return list(await asyncio.gather(*map(last, streams)))


async def all_begun(llm: AsyncLLM) -> tuple[StepByStep, list[AsyncGenerator[RequestOutput, None]]]:
    """Return a stream per prompt, each in the middle, and what lets them go on."""
    steps, streams = StepByStep(llm), [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
    await steps.until(asyncio.gather(*map(anext, streams)))
    return steps, streams

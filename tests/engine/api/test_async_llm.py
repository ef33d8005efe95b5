"""``AsyncLLM``: of many callers none is lost, mixed up or left waiting."""

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import ostinato
from ostinato import LLM, AsyncLLM, RequestOutput, SamplingParams
from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine.api import engine_thread
from ostinato.engine.api.engine_thread import CommandQueue
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.setup import ModelSetup, set_up
from ostinato.errors import (
    CacheInUse,
    ConfigError,
    DuplicateRequest,
    EmptyPrompt,
    InvalidSamplingParams,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from tests.engine.api.async_calls import GREEDY, PROMPTS, STEM, all_begun, ends, llm, run, tokens_of
from tests.engine.loop.stepping import StepByStep, async_llm, last
from tests.support.models.checkpoints import Checkpoints
from tests.support.waiting import other_tasks_have_started

__all__ = ["llm"]

# --- streaming ---


async def test_each_output_has_all_of_the_text_so_far(llm: AsyncLLM, expected: list[list[int]]):
    outputs = [output async for output in llm.generate(STEM, GREEDY)]

    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in pairwise(outputs):
        assert tokens_of(after)[: len(tokens_of(before))] == tokens_of(before)
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert tokens_of(outputs[-1]) == expected[0]
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_many_at_once_get_what_each_would_get_alone(llm: AsyncLLM, expected: list[list[int]]):
    outputs = await ends(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS * 5))

    assert [output.prompt_token_ids for output in outputs] == PROMPTS * 5
    assert list(map(tokens_of, outputs)) == expected * 5
    assert len({output.request_id for output in outputs}) == 20


@pytest.mark.parametrize(
    ("asked_for", "lengths"), [(None, [1, 4, 7, 8]), (2, [1, 4, 7, 8]), (5, [1, 6, 8])]
)
async def test_an_interval_makes_fewer_outputs_of_a_stream_the_first_and_the_last_at_once(
    checkpoints: Checkpoints, asked_for: int | None, lengths: list[int]
):
    """The engine wants three tokens for an output; a request may ask for more, not for fewer."""
    params, found = replace(GREEDY, stream_interval=asked_for), []

    with async_llm(checkpoints, stream_interval=3) as llm:
        steps = StepByStep(llm)

        async def read() -> None:
            async for output in llm.generate(STEM, params):
                found.append(len(tokens_of(output)))

        reading = asyncio.ensure_future(read())
        for _ in range(8):  # what a step brought is read before the next one runs
            await steps.reached()
            steps.go_on()
        await reading

    assert found == lengths


async def test_a_continuation_is_streamed_at_once_when_another_has_ended(llm: AsyncLLM):
    """Of two, one ends early; each of the other's tokens is an output of its own from then on."""
    sampled = replace(GREEDY, temperature=1.0, seed=1, n=2)
    found: list[tuple[int, ...]] = []

    first = (await last(llm.generate(STEM, sampled))).outputs[0].token_ids[2]
    params, steps = replace(sampled, stop_token_ids=[first]), StepByStep(llm)

    async def read() -> None:
        async for output in llm.generate(STEM, params):
            found.append(tuple(len(part.token_ids) for part in output.outputs))

    reading = asyncio.ensure_future(read())
    for _ in range(8):
        await steps.reached()
        steps.go_on()
    await reading

    assert found == [(min(step, 3), step) for step in range(1, 9)]


def test_a_slow_reader_misses_no_token_and_holds_up_no_other(
    llm: AsyncLLM, expected: list[list[int]]
):
    """It reads one output, waits until another request has ended, and gets the rest at once."""

    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        steps = StepByStep(llm)
        async with aclosing(llm.generate(STEM, GREEDY)) as slow:
            first = asyncio.ensure_future(anext(slow))
            await steps.until(first)
            steps.go_on(1000)
            await last(llm.generate(PROMPTS[1], GREEDY))
            return [first.result(), *[output async for output in slow]]

    outputs = run(story(llm))

    assert len(outputs) == 2
    assert tokens_of(outputs[-1]) == expected[0]


def test_a_conversation_is_streamed(bard: LLM):
    messages = [{"role": "user", "content": "What news?"}]
    offline = bard.chat(messages, GREEDY, use_tqdm=False)[0]
    llm = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=64)
    try:
        output = run(last(llm.chat(messages, GREEDY)))
    finally:
        llm.shutdown()

    assert output.prompt_token_ids == offline.prompt_token_ids
    assert output.outputs[0].text == offline.outputs[0].text


# --- threads ---


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon_unless_told_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
):
    """They share the cores with Python and the event loop; torch reads it when it is loaded."""
    monkeypatch.setattr(os, "environ", dict(given))
    assert ostinato.AsyncLLM is AsyncLLM
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_model_is_loaded_in_a_thread_that_ends(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """OpenMP would keep the threads that it lent to the loading thread, beside the engine's."""
    loaders: list[threading.Thread] = []

    def load(config: EngineConfig) -> ModelSetup:
        loaders.append(threading.current_thread())
        return set_up(config)

    monkeypatch.setattr("ostinato.engine.loop.engine.set_up", load)
    with async_llm(checkpoints):
        [loader] = loaders
        assert loader is not threading.main_thread() and not loader.is_alive()

    with pytest.raises(ConfigError, match="holds no block"):
        AsyncLLM(str(checkpoints.path("llama")), kv_cache_memory=1)


async def test_a_step_of_many_streams_wakes_the_event_loop_once(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    """Four streams of eight tokens: in steps that all take part in, one call brings all four."""
    posts: list[int] = []

    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe

    def counted(callback: Any, *letters: Any, **more: Any) -> asyncio.Handle:
        if callback is engine_thread.put_all:
            posts.append(len(letters[0]))
        return wake(callback, *letters, **more)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await ends(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))

    assert sum(posts) == len(PROMPTS) * 8, "each token of each stream is posted"
    assert max(posts) == len(PROMPTS), "those of one step together"


# --- turns ---


async def test_the_next_turn_of_who_was_just_answered_misses_no_step(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    """Two talk: while one goes on, the other is answered and asks again, three times."""
    monkeypatch.setattr(engine_thread, "PATIENCE", 1e6)  # a test's steps take no time
    wait_for_turns = CommandQueue.run_until

    async def talk(llm: AsyncLLM, prompt: list[int], lengths: Sequence[int]) -> None:
        for turn, length in enumerate(lengths):
            if turn:  # ask when the engine waits for it: without patience, that is never
                await waits.acquire()
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            prompt = prompt + tokens_of(await last(llm.generate(prompt, params)))
        llm.abort("nobody")  # any command ends the wait for a turn that does not come

    waits = asyncio.Semaphore(0)
    plans = record_plans(llm)
    loop = asyncio.get_running_loop()

    def noted(*arguments: Any) -> int:
        loop.call_soon_threadsafe(waits.release)
        return wait_for_turns(*arguments)

    monkeypatch.setattr(CommandQueue, "run_until", noted)
    await asyncio.gather(talk(llm, [9, 8, 7], [40]), talk(llm, [1, 2, 3], [5, 5, 5]))
    sizes = [len(plan.sequences) for plan in plans]

    together = [size == 2 for size in sizes]
    assert sum(together) == 15, sizes
    assert "".join("12"[both] for both in together).strip("1") == "2" * 15, sizes


def test_callers_who_never_ask_again_are_seldom_waited_for(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    with async_llm(checkpoints, num_blocks=128, max_num_seqs=2) as llm:
        waits: list[int] = []
        count = lambda _, most, __: waits.append(most) or 0  # noqa: E731
        monkeypatch.setattr(CommandQueue, "run_until", count)
        run(ends(*(llm.generate([n + 1], GREEDY) for n in range(40))))

    assert 8 <= len(waits) <= 8 + 40 // 8, waits


def record_plans(llm: AsyncLLM) -> list[StepPlan]:
    """Write down every plan from now on."""
    plans: list[StepPlan] = []
    execute = llm.engine.runner.execute

    def recorded(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(plan)

    llm.engine.runner.execute = recorded
    return plans


# --- refusals ---


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        (None, GREEDY, RequestError),
        ([], GREEDY, EmptyPrompt),
        ("", GREEDY, EmptyPrompt),
        ([320], GREEDY, TokenOutOfRange),
        ([5] * 64, GREEDY, PromptTooLong),
        (STEM, {"max_tokens": 5}, InvalidSamplingParams),
        (STEM, {}, InvalidSamplingParams),
        (STEM, SamplingParams(stop_token_ids=[320]), InvalidSamplingParams),
    ],
)
async def test_a_bad_request_is_refused_and_the_engine_goes_on(
    prompt: Any, params: Any, error: type[Exception], llm: AsyncLLM, expected: list[list[int]]
):
    with pytest.raises(error):
        await last(llm.generate(prompt, params))
    assert tokens_of(await last(llm.generate(STEM, GREEDY))) == expected[0]


async def test_a_name_in_use_is_refused_and_who_had_it_goes_on(
    llm: AsyncLLM, expected: list[list[int]]
):
    """Both were made before either was added; the second one's end must not end the first."""
    steps = StepByStep(llm)
    twins = [asyncio.create_task(last(llm.generate(STEM, GREEDY, request_id="twin")))
             for _ in range(2)]  # fmt: skip
    await other_tasks_have_started()
    steps.go_on(1000)
    results = await asyncio.gather(*twins, return_exceptions=True)
    results, later = results, await last(llm.generate(STEM, GREEDY, request_id="twin"))

    refused = [result for result in results if isinstance(result, DuplicateRequest)]
    served = [tokens_of(result) for result in results if isinstance(result, RequestOutput)]
    assert (len(refused), served) == (1, [expected[0]])
    assert tokens_of(later) == expected[0]


async def test_a_caller_who_is_refused_and_leaves_first_ends_no_other_request(
    llm: AsyncLLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """The refusal is on its way when the second one's task is cancelled."""

    def make_prompt(make: Any) -> PreparedRequest:
        from ostinato.engine.requests.prompts import Prompt

        return make(Prompt(token_ids=STEM), GREEDY, "twin")

    steps = StepByStep(llm)
    make = llm.engine.make_request
    twins = [make_prompt(make) for _ in range(2)]
    monkeypatch.setattr(llm.engine, "make_request", lambda *_: twins.pop())
    first = asyncio.create_task(last(llm.generate(STEM, GREEDY)))
    await steps.reached()
    second = asyncio.create_task(last(llm.generate(STEM, GREEDY)))
    await other_tasks_have_started()
    assert not twins
    second.cancel()
    steps.go_on(1000)
    output = await first

    assert tokens_of(output) == expected[0]
    assert output.outputs[0].finish_reason == "length"


# --- the cache ---


async def test_a_reset_is_refused_while_requests_run_unless_they_are_preempted(
    llm: AsyncLLM, expected: list[list[int]]
):
    steps, streams = await all_begun(llm)
    refused = asyncio.ensure_future(llm.reset_prefix_cache())
    await steps.until(asyncio.gather(refused, return_exceptions=True))
    assert isinstance(refused.exception(), CacheInUse)
    reset = asyncio.ensure_future(llm.reset_prefix_cache(preempt_running=True))
    await steps.until(reset)
    steps.go_on(1000)
    outputs = await ends(*streams)
    assert llm.engine.scheduler_stats.num_preemptions == len(PROMPTS)

    assert list(map(tokens_of, outputs)) == expected

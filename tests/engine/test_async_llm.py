"""``AsyncLLM``: of many callers none is lost, mixed up or left waiting."""

import asyncio
import os
import random
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest

import ostinato
from ostinato import LLM, AsyncLLM, RequestOutput, SamplingParams
from ostinato.core.errors import (
    CacheInUse,
    ConfigError,
    DuplicateRequest,
    EmptyPrompt,
    EngineStopped,
    InvalidSamplingParams,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine import engine_thread, thread_bridge
from ostinato.engine.config import EngineConfig
from ostinato.engine.request_validation import PreparedRequest
from ostinato.engine.setup import Setup, set_up
from ostinato.engine.thread_bridge import CommandQueue
from tests.engine.faults import Sabotage
from tests.engine.stepping import StepByStep, async_llm, last
from tests.support.checkpoints import Checkpoints
from tests.support.tiny_cache import on_both_indexes
from tests.support.waiting import other_tasks_have_started, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
STEM = list(range(30, 51))
PROMPTS = [STEM, [*STEM[:13], 5, 6, 7], [*STEM[:10], 8], list(range(90, 103))]


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


# --- streaming ---


def test_each_output_has_all_of_the_text_so_far(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in llm.generate(STEM, GREEDY)]

    with async_llm(checkpoints) as llm:
        outputs = run(story(llm))

    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in pairwise(outputs):
        assert tokens_of(after)[: len(tokens_of(before))] == tokens_of(before)
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert tokens_of(outputs[-1]) == expected[0]
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_many_at_once_get_what_each_would_get_alone(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        return await ends(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS * 5))

    with async_llm(checkpoints) as llm:
        outputs = run(story(llm))

    assert [output.prompt_token_ids for output in outputs] == PROMPTS * 5
    assert list(map(tokens_of, outputs)) == expected * 5
    assert len({output.request_id for output in outputs}) == 20


def test_a_slow_reader_misses_no_token_and_holds_up_nobody(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    """It reads one output, waits until another request has ended, and gets the rest at once."""

    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        steps = StepByStep(llm)
        async with aclosing(llm.generate(STEM, GREEDY)) as slow:
            first = asyncio.ensure_future(anext(slow))
            await steps.until(first)
            steps.go_on(1000)
            await last(llm.generate(PROMPTS[1], GREEDY))
            return [first.result(), *[output async for output in slow]]

    with async_llm(checkpoints) as llm:
        outputs = run(story(llm))

    assert len(outputs) == 2
    assert tokens_of(outputs[-1]) == expected[0]


def test_a_conversation_is_streamed(bard: LLM) -> None:
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
) -> None:
    """They share the cores with Python and the event loop; torch reads it when it is loaded."""
    monkeypatch.setattr(os, "environ", dict(given))
    assert ostinato.AsyncLLM is AsyncLLM
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_model_is_loaded_in_a_thread_that_ends(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP would keep the threads that it lent to the loading thread, beside the engine's."""
    loaders: list[threading.Thread] = []

    def load(config: EngineConfig) -> Setup:
        loaders.append(threading.current_thread())
        return set_up(config)

    monkeypatch.setattr("ostinato.engine.engine.set_up", load)
    with async_llm(checkpoints):
        [loader] = loaders
        assert loader is not threading.main_thread() and not loader.is_alive()

    with pytest.raises(ConfigError, match="holds no block"):
        AsyncLLM(str(checkpoints.path("llama")), kv_cache_memory=1)


def test_a_step_of_many_streams_wakes_the_event_loop_once(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams of eight tokens: in steps that all take part in, one call brings all four."""
    posts: list[int] = []

    async def story(llm: AsyncLLM) -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(callback: Any, *letters: Any, **more: Any) -> asyncio.Handle:
            if callback is thread_bridge.put_all:
                posts.append(len(letters[0]))
            return wake(callback, *letters, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await ends(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))

    with async_llm(checkpoints) as llm:
        run(story(llm))

    assert sum(posts) == len(PROMPTS) * 8, "each token of each stream is posted"
    assert max(posts) == len(PROMPTS), "those of one step together"


# --- turns ---


def test_the_next_turn_of_who_was_just_answered_misses_no_step(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    async def story(llm: AsyncLLM) -> None:
        loop = asyncio.get_running_loop()

        def noted(*arguments: Any) -> int:
            loop.call_soon_threadsafe(waits.release)
            return wait_for_turns(*arguments)

        monkeypatch.setattr(CommandQueue, "run_until", noted)
        await asyncio.gather(talk(llm, [9, 8, 7], [40]), talk(llm, [1, 2, 3], [5, 5, 5]))

    waits = asyncio.Semaphore(0)
    with async_llm(checkpoints) as llm:
        plans = record_plans(llm)
        run(story(llm))
        sizes = [len(plan.sequences) for plan in plans]

    together = [size == 2 for size in sizes]
    assert sum(together) == 15, sizes
    assert "".join("12"[both] for both in together).strip("1") == "2" * 15, sizes


def test_callers_who_never_ask_again_are_seldom_waited_for(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# --- leaving early ---


def test_who_leaves_the_iteration_is_cancelled(checkpoints: Checkpoints) -> None:
    """The request would go on for long; its blocks are free as soon as the reader has left."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    async def story(llm: AsyncLLM) -> int:
        steps = StepByStep(llm)
        async with aclosing(llm.generate(STEM, long)) as stream:
            first = asyncio.ensure_future(anext(stream))
            await steps.until(first)
        steps.go_on(2)
        await asyncio.wait_for(llm.reset_prefix_cache(), timeout=10)
        return llm.engine.scheduler_stats.num_steps

    with async_llm(checkpoints) as llm:
        assert run(story(llm)) < 40


def test_a_break_is_enough(checkpoints: Checkpoints, expected: list[list[int]]) -> None:
    """``async for`` leaves the closing to the event loop."""

    async def story(llm: AsyncLLM) -> RequestOutput:
        async for output in llm.generate(STEM, GREEDY):
            assert not output.finished
            break
        return await last(llm.generate(PROMPTS[1], GREEDY))

    with async_llm(checkpoints) as llm:
        assert tokens_of(run(story(llm))) == expected[1]


@on_both_indexes
def test_a_follower_takes_over_when_its_leaders_task_is_cancelled(
    index: str, checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    """The leader is in the middle of its prompt: 16 of 21 tokens are computed."""

    async def story(llm: AsyncLLM) -> RequestOutput:
        steps = StepByStep(llm)
        leader = asyncio.create_task(last(llm.generate(STEM, GREEDY)))
        await steps.reached()
        follower = asyncio.create_task(last(llm.generate(STEM, GREEDY)))
        await other_tasks_have_started()
        steps.go_on(1)
        await steps.reached()

        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        steps.go_on(1000)
        return await follower

    with async_llm(checkpoints, index=index, max_chunk_tokens=8) as llm:
        output = run(story(llm))

    assert tokens_of(output) == expected[0]
    assert output.num_cached_tokens >= 8


def test_an_aborted_request_hands_over_what_there_is(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    async def story(llm: AsyncLLM) -> RequestOutput:
        steps = StepByStep(llm)
        stream = llm.generate(STEM, GREEDY, request_id="mine")
        first = asyncio.ensure_future(anext(stream))
        await steps.until(first)
        llm.abort("nobody")
        llm.abort("mine")
        steps.go_on(2)
        return await last(stream)

    with async_llm(checkpoints) as llm:
        output = run(story(llm))

    assert (output.request_id, output.finished, output.error) == ("mine", True, None)
    assert output.outputs[0].finish_reason == "abort"
    assert 1 <= len(tokens_of(output)) < 8
    assert tokens_of(output) == expected[0][: len(tokens_of(output))]


@on_both_indexes
@pytest.mark.parametrize("seed", range(3))
def test_of_many_clients_that_come_and_go_none_is_lost_or_mixed_up(
    seed: int, index: str, checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    """Sixty clients on a pool for three: some leave, some are cancelled, some abort by name."""
    chance = random.Random(seed)

    async def pass_steps(llm: AsyncLLM, most: int) -> None:
        for _ in range(most):
            await llm.look(lambda _: None)  # answered between two steps

    async def cancel_later(llm: AsyncLLM, task: asyncio.Task[str], most: int) -> None:
        await pass_steps(llm, most)
        task.cancel()

    async def client(llm: AsyncLLM, number: int) -> str:
        which, habit = chance.randrange(4), chance.choice(("stay", "stay", "leave", "abort"))
        patience = chance.randrange(1, 8)
        await pass_steps(llm, chance.randrange(20))
        stream = llm.generate(PROMPTS[which], GREEDY, request_id=f"client-{number}")
        got: RequestOutput | None = None
        async with aclosing(stream):
            async for output in stream:
                got = output
                assert tokens_of(got) == expected[which][: len(tokens_of(got))]
                if len(tokens_of(got)) >= patience and habit == "leave":
                    return "left"
                if len(tokens_of(got)) >= patience and habit == "abort":
                    llm.abort(got.request_id)
        assert got is not None and got.finished
        reason = got.outputs[0].finish_reason
        assert reason == "length" or (reason, habit) == ("abort", "abort")
        assert (len(tokens_of(got)) == 8) == (reason == "length")
        return str(reason)

    async def story(llm: AsyncLLM) -> list[str | BaseException]:
        tasks = [asyncio.create_task(client(llm, number)) for number in range(60)]
        for task in chance.sample(tasks, 15):
            tasks.append(asyncio.create_task(cancel_later(llm, task, chance.randrange(30))))
        return (await asyncio.gather(*tasks, return_exceptions=True))[:60]

    settings = {"num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with async_llm(checkpoints, index=index, max_chunk_tokens=8, **settings) as llm:
        results = run(story(llm))

    faults = [r for r in results if isinstance(r, BaseException)]
    assert all(isinstance(fault, asyncio.CancelledError) for fault in faults), faults
    assert "length" in results


def test_an_event_loop_that_is_gone_hurts_nobody(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    """Its stream was never closed, and its question never heard; the next loop is served."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    with async_llm(checkpoints) as llm:
        loop = asyncio.new_event_loop()
        stream = llm.generate(STEM, long)
        loop.run_until_complete(anext(stream))
        question = loop.create_task(llm.reset_prefix_cache())
        loop.run_until_complete(other_tasks_have_started())
        question.cancel()
        loop.run_until_complete(asyncio.gather(question, return_exceptions=True))
        loop.close()

        assert tokens_of(run(last(llm.generate(PROMPTS[1], GREEDY)))) == expected[1]
        del stream, question


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
def test_a_bad_request_is_refused_and_the_engine_goes_on(
    prompt: Any,
    params: Any,
    error: type[Exception],
    checkpoints: Checkpoints,
    expected: list[list[int]],
) -> None:
    async def story(llm: AsyncLLM) -> RequestOutput:
        with pytest.raises(error):
            await last(llm.generate(prompt, params))
        return await last(llm.generate(STEM, GREEDY))

    with async_llm(checkpoints) as llm:
        assert tokens_of(run(story(llm))) == expected[0]


@pytest.mark.parametrize("named", [{"priority": "high"}, {"request_id": 5}])
def test_names_and_priorities_are_checked(named: Any, checkpoints: Checkpoints) -> None:
    async def story(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="must be"):
            await last(llm.generate(STEM, GREEDY, **named))

    with async_llm(checkpoints) as llm:
        run(story(llm))


def test_a_name_in_use_is_refused_and_who_had_it_goes_on(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    """Both were made before either was added; the second one's end must not end the first."""

    async def story(llm: AsyncLLM) -> tuple[Sequence[Any], RequestOutput]:
        steps = StepByStep(llm)
        twins = [asyncio.create_task(last(llm.generate(STEM, GREEDY, request_id="twin")))
                 for _ in range(2)]  # fmt: skip
        await other_tasks_have_started()
        steps.go_on(1000)
        results = await asyncio.gather(*twins, return_exceptions=True)
        return results, await last(llm.generate(STEM, GREEDY, request_id="twin"))

    with async_llm(checkpoints) as llm:
        results, later = run(story(llm))

    refused = [result for result in results if isinstance(result, DuplicateRequest)]
    served = [tokens_of(result) for result in results if isinstance(result, RequestOutput)]
    assert (len(refused), served) == (1, [expected[0]])
    assert tokens_of(later) == expected[0]


def test_who_is_refused_and_leaves_before_it_is_told_ends_nobody_else(
    checkpoints: Checkpoints, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is on its way when the second one's task is cancelled."""

    async def story(llm: AsyncLLM) -> RequestOutput:
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
        return await first

    def make_prompt(make: Any) -> PreparedRequest:
        from ostinato.engine.prompts import Prompt

        return make(Prompt(token_ids=STEM), GREEDY, "twin")

    with async_llm(checkpoints) as llm:
        output = run(story(llm))

    assert tokens_of(output) == expected[0]
    assert output.outputs[0].finish_reason == "length"


# --- the cache ---


def test_a_reset_is_refused_while_requests_run_unless_they_are_preempted(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        steps = StepByStep(llm)
        streams = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
        firsts = asyncio.gather(*map(anext, streams))
        await steps.until(firsts)
        refused = asyncio.ensure_future(llm.reset_prefix_cache())
        await steps.until(asyncio.gather(refused, return_exceptions=True))
        assert isinstance(refused.exception(), CacheInUse)
        reset = asyncio.ensure_future(llm.reset_prefix_cache(preempt_running=True))
        await steps.until(reset)
        steps.go_on(1000)
        return await ends(*streams)

    with async_llm(checkpoints) as llm:
        outputs = run(story(llm))
        assert llm.engine.scheduler_stats.num_preemptions == len(PROMPTS)

    assert list(map(tokens_of, outputs)) == expected


# --- what fails ---


def test_a_failed_step_ends_its_requests_with_an_error_and_no_others(
    checkpoints: Checkpoints, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seat: the second request comes when the first has failed."""

    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        runner = llm.engine.runner
        execute, num_steps = runner.execute, 0

        def fail_once(plan: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                raise Sabotage("no more")
            return execute(plan)

        monkeypatch.setattr(runner, "execute", fail_once)
        return await ends(llm.generate(STEM, GREEDY), llm.generate(STEM, GREEDY))

    with async_llm(checkpoints, max_num_seqs=1) as llm:
        outputs = run(story(llm))

    failed, served = sorted(outputs, key=lambda output: output.error is None)
    assert failed.error == "the forward pass failed: Sabotage: no more"
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, "error")
    assert tokens_of(failed) == expected[0][:2]
    assert tokens_of(served) == expected[0]


@pytest.fixture
def breakable(checkpoints: Checkpoints) -> Iterator[AsyncLLM]:
    """Lend an engine that need not be idle afterwards."""
    llm = AsyncLLM(str(checkpoints.path("llama")), dtype="float64", block_size=4, num_blocks=32)
    yield llm
    llm.shutdown()


def test_when_the_loop_breaks_everybody_is_told(
    breakable: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who run, those who wait, those who ask, and those who come later."""
    llm = breakable

    async def story() -> None:
        steps = StepByStep(llm)
        running = llm.generate(STEM, GREEDY)
        first = asyncio.ensure_future(anext(running))
        await steps.until(first)

        def break_down(*_: Any) -> None:
            raise Sabotage("a bug of ours")

        monkeypatch.setattr(llm.engine.scheduler, "plan", break_down)
        waiting = asyncio.create_task(last(llm.generate(PROMPTS[1], GREEDY)))
        question = asyncio.ensure_future(llm.reset_prefix_cache())
        await other_tasks_have_started()
        steps.go_on(1000)

        results = await asyncio.gather(last(running), waiting, question, return_exceptions=True)
        for result in results[:2]:
            assert isinstance(result, EngineStopped), result
            assert str(result) == "the engine's loop broke: Sabotage('a bug of ours')"
        assert isinstance(results[2], (EngineStopped, CacheInUse))
        with pytest.raises(EngineStopped, match="the engine's loop broke: Sabotage"):
            await last(llm.generate(STEM, GREEDY))
        with pytest.raises(EngineStopped, match="the engine's loop broke: Sabotage"):
            await llm.reset_prefix_cache()
        llm.abort("anybody")

    run(story())


def test_a_question_that_breaks_the_loop_is_answered_with_what_broke_it(
    breakable: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = breakable

    async def story() -> None:
        steps = StepByStep(llm)
        running = llm.generate(STEM, GREEDY)
        first = asyncio.ensure_future(anext(running))
        await steps.until(first)

        def break_down(*_: Any) -> None:
            raise Sabotage("a bug of ours")

        monkeypatch.setattr(llm.engine, "reset_cache", break_down)
        question = asyncio.ensure_future(llm.reset_prefix_cache())
        await other_tasks_have_started()
        steps.go_on(1000)

        with pytest.raises(Sabotage):
            await question
        with pytest.raises(EngineStopped, match="Sabotage"):
            await last(running)

    run(story())


# --- the end ---


def test_a_shutdown_ends_requests_that_are_under_way(
    checkpoints: Checkpoints, expected: list[list[int]]
) -> None:
    """Readers get what there is; those who come later are refused; a second call does nothing."""

    async def story(llm: AsyncLLM) -> list[RequestOutput]:
        steps = StepByStep(llm)
        streams = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
        firsts = asyncio.gather(*map(anext, streams))
        await steps.until(firsts)
        steps.go_on(2)
        await asyncio.to_thread(llm.shutdown)
        outputs = await ends(*streams)

        with pytest.raises(EngineStopped, match="was shut down: make another AsyncLLM"):
            await last(llm.generate(STEM, GREEDY))
        with pytest.raises(EngineStopped, match="was shut down: make another AsyncLLM"):
            await llm.reset_prefix_cache()
        llm.abort("anybody")
        llm.shutdown()
        return outputs

    with async_llm(checkpoints) as llm:
        outputs = run(story(llm))

    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * len(PROMPTS)
    for output, tokens in zip(outputs, expected, strict=True):
        assert 1 <= len(tokens_of(output)) < 8
        assert tokens_of(output) == tokens[: len(tokens_of(output))]


def test_a_request_that_is_being_made_during_the_shutdown_is_refused(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed every check while the engine was there, and comes when it is gone."""
    with async_llm(checkpoints) as llm:
        make = llm.engine.make_request

        def make_late(*arguments: Any) -> PreparedRequest:
            made = make(*arguments)
            llm.shutdown()
            return made

        monkeypatch.setattr(llm.engine, "make_request", make_late)
        with pytest.raises(EngineStopped, match="was shut down"):
            run(last(llm.generate(STEM, GREEDY)))


def test_requests_in_the_queue_during_the_shutdown_are_refused(checkpoints: Checkpoints) -> None:
    """The engine is in the middle of a step, so none of them is added before it is closed."""

    async def story(llm: AsyncLLM) -> list[Any]:
        steps = StepByStep(llm)
        tasks = [asyncio.create_task(last(llm.generate(STEM, GREEDY)))]
        await steps.reached()
        tasks += [asyncio.create_task(last(llm.generate(p, GREEDY))) for p in PROMPTS]
        tasks.append(asyncio.create_task(llm.reset_prefix_cache()))
        await other_tasks_have_started()
        closing = asyncio.create_task(asyncio.to_thread(llm.shutdown))
        await until(lambda: not llm.is_running)
        steps.go_on(1000)
        await closing
        return await asyncio.gather(*tasks, return_exceptions=True)

    with async_llm(checkpoints) as llm:
        first, *others = run(story(llm))

    assert first.outputs[0].finish_reason == "abort"
    assert len(others) == len(PROMPTS) + 1
    assert all(isinstance(other, EngineStopped) for other in others), others


def test_a_context_shuts_down_at_its_end(checkpoints: Checkpoints) -> None:
    path = str(checkpoints.path("llama"))

    async def story() -> tuple[AsyncLLM, RequestOutput]:
        async with AsyncLLM(path, dtype="float64", num_blocks=32) as llm:
            return llm, await last(llm.generate(STEM, GREEDY))

    llm, output = run(story())

    assert output.finished
    with pytest.raises(EngineStopped):
        run(last(llm.generate(STEM, GREEDY)))


def test_counters_can_be_read_at_any_time(checkpoints: Checkpoints) -> None:
    with async_llm(checkpoints) as llm:
        run(last(llm.generate(STEM, GREEDY)))
        run(last(llm.generate(STEM, GREEDY)))

        assert (llm.cache_stats.first.query_tokens, llm.cache_stats.first.hit_tokens) == (42, 20)

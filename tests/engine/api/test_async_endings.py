"""Requests of ``AsyncLLM`` that end early or fail, and the end of the engine itself."""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from ostinato import AsyncLLM, RequestOutput, SamplingParams
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.errors import CacheInUse, EngineStopped
from tests.engine.api.async_calls import GREEDY, PROMPTS, STEM, all_begun, ends, llm, run, tokens_of
from tests.engine.loop.faults import Sabotage
from tests.engine.loop.stepping import StepByStep, async_llm, last
from tests.support.models.checkpoints import Checkpoints
from tests.support.waiting import other_tasks_have_started, until

__all__ = ["llm"]

# --- leaving early ---


async def test_who_leaves_the_iteration_is_cancelled(llm: AsyncLLM):
    """The request would go on for long; its blocks are free as soon as the reader has left."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    steps = StepByStep(llm)
    async with aclosing(llm.generate(STEM, long)) as stream:
        first = asyncio.ensure_future(anext(stream))
        await steps.until(first)
    steps.go_on(2)
    await asyncio.wait_for(llm.reset_prefix_cache(), timeout=10)
    assert llm.engine.scheduler_stats.num_steps < 40


async def test_a_break_is_enough(llm: AsyncLLM, expected: list[list[int]]):
    """``async for`` leaves the closing to the event loop."""
    async for output in llm.generate(STEM, GREEDY):
        assert not output.finished
        break
    assert tokens_of(await last(llm.generate(PROMPTS[1], GREEDY))) == expected[1]


async def test_an_aborted_request_hands_over_what_there_is(
    llm: AsyncLLM, expected: list[list[int]]
):
    steps = StepByStep(llm)
    stream = llm.generate(STEM, GREEDY, request_id="mine")
    first = asyncio.ensure_future(anext(stream))
    await steps.until(first)
    llm.abort("nobody")
    llm.abort("mine")
    steps.go_on(2)
    output = await last(stream)

    assert (output.request_id, output.finished, output.error) == ("mine", True, None)
    assert output.outputs[0].finish_reason == "abort"
    assert 1 <= len(tokens_of(output)) < 8
    assert tokens_of(output) == expected[0][: len(tokens_of(output))]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("seed", range(3))
async def test_of_many_clients_that_come_and_go_none_is_lost_or_mixed_up(
    seed: int, index: str, checkpoints: Checkpoints, expected: list[list[int]]
):
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

    settings = {"num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with async_llm(checkpoints, index=index, max_chunk_tokens=8, **settings) as llm:
        tasks = [asyncio.create_task(client(llm, number)) for number in range(60)]
        for task in chance.sample(tasks, 15):
            tasks.append(asyncio.create_task(cancel_later(llm, task, chance.randrange(30))))
        results = (await asyncio.gather(*tasks, return_exceptions=True))[:60]

    faults = [r for r in results if isinstance(r, BaseException)]
    assert all(isinstance(fault, asyncio.CancelledError) for fault in faults), faults
    assert "length" in results


def test_an_event_loop_that_is_gone_hurts_no_other_caller(llm: AsyncLLM, expected: list[list[int]]):
    """Its stream was never closed, and its question never heard; the next loop is served."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

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


# --- what fails ---


async def test_a_failed_step_ends_its_requests_with_an_error_and_no_others(
    checkpoints: Checkpoints, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """One seat: the second request comes when the first has failed."""
    with async_llm(checkpoints, max_num_seqs=1) as llm:
        runner = llm.engine.runner
        execute, num_steps = runner.execute, 0

        def fail_once(plan: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                raise Sabotage("no more")
            return execute(plan)

        monkeypatch.setattr(runner, "execute", fail_once)
        outputs = await ends(llm.generate(STEM, GREEDY), llm.generate(STEM, GREEDY))

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


async def begun(llm: AsyncLLM) -> tuple[StepByStep, AsyncGenerator[RequestOutput, None]]:
    """Return a request that runs, and what lets it go on."""
    steps, running = StepByStep(llm), llm.generate(STEM, GREEDY)
    await steps.until(asyncio.ensure_future(anext(running)))
    return steps, running


def break_down(*_: Any) -> None:
    """Fail where the engine does not expect it."""
    raise Sabotage("a bug of ours")


async def test_when_the_loop_breaks_everybody_is_told(
    breakable: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    """Those who run, those who wait, those who ask, and those who come later."""
    llm = breakable

    steps, running = await begun(llm)
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


async def test_a_question_that_breaks_the_loop_is_answered_with_what_broke_it(
    breakable: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    llm = breakable

    steps, running = await begun(llm)
    monkeypatch.setattr(llm.engine, "reset_cache", break_down)
    question = asyncio.ensure_future(llm.reset_prefix_cache())
    await other_tasks_have_started()
    steps.go_on(1000)

    with pytest.raises(Sabotage):
        await question
    with pytest.raises(EngineStopped, match="Sabotage"):
        await last(running)


# --- the end ---


async def test_a_shutdown_ends_requests_that_are_under_way(
    llm: AsyncLLM, expected: list[list[int]]
):
    """Readers get what there is; those who come later are refused; a second call does nothing."""
    steps, streams = await all_begun(llm)
    steps.go_on(2)
    await asyncio.to_thread(llm.shutdown)
    outputs = await ends(*streams)

    with pytest.raises(EngineStopped, match="was shut down: make another AsyncLLM"):
        await last(llm.generate(STEM, GREEDY))
    with pytest.raises(EngineStopped, match="was shut down: make another AsyncLLM"):
        await llm.reset_prefix_cache()
    llm.abort("anybody")
    llm.shutdown()

    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * len(PROMPTS)
    for output, tokens in zip(outputs, expected, strict=True):
        assert 1 <= len(tokens_of(output)) < 8
        assert tokens_of(output) == tokens[: len(tokens_of(output))]


def test_a_request_that_is_being_made_during_the_shutdown_is_refused(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    """It passed every check while the engine was there, and comes when it is gone."""
    make = llm.engine.make_request

    def make_late(*arguments: Any) -> PreparedRequest:
        made = make(*arguments)
        llm.shutdown()
        return made

    monkeypatch.setattr(llm.engine, "make_request", make_late)
    with pytest.raises(EngineStopped, match="was shut down"):
        run(last(llm.generate(STEM, GREEDY)))


async def test_requests_in_the_queue_during_the_shutdown_are_refused(llm: AsyncLLM):
    """The engine is in the middle of a step, so none of them is added before it is closed."""
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
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)

    assert first.outputs[0].finish_reason == "abort"
    assert len(others) == len(PROMPTS) + 1
    assert all(isinstance(other, EngineStopped) for other in others), others


def test_a_context_shuts_down_at_its_end(checkpoints: Checkpoints):
    path = str(checkpoints.path("llama"))

    async def story() -> tuple[AsyncLLM, RequestOutput]:
        async with AsyncLLM(path, dtype="float64", num_blocks=32) as llm:
            return llm, await last(llm.generate(STEM, GREEDY))

    llm, output = run(story())

    assert output.finished
    with pytest.raises(EngineStopped):
        run(last(llm.generate(STEM, GREEDY)))


def test_counters_can_be_read_at_any_time(llm: AsyncLLM):
    run(last(llm.generate(STEM, GREEDY)))
    run(last(llm.generate(STEM, GREEDY)))

    assert (llm.cache_stats.first.query_tokens, llm.cache_stats.first.hit_tokens) == (42, 20)

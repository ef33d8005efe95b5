"""Cancelled requests, the names of requests, and a cache that is reset while requests run."""

from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.requests.prompts import Prompt
from ostinato.errors import CacheInUse, DuplicateRequest, RequestError
from ostinato.observe.introspection import cached_blocks
from tests.engine.api.llm_calls import tokens_of
from tests.engine.relatives import GREEDY, PROMPTS, STEM, add, expected, run
from tests.support.engines import MakeLLM, assert_idle

__all__ = ["expected"]

# --- cancelling ---


def test_when_a_leader_is_cancelled_its_follower_goes_on_where_it_was(
    index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    """Two chunks of 8 are computed; the follower finds them and computes the other 15 tokens."""
    llm = make_llm("llama", index=index, max_chunk_tokens=8)
    engine = llm.engine
    leader, follower = add(engine, STEM), add(engine, STEM)
    engine.step()
    engine.step()
    assert engine.scheduler.num_waiting == 1

    cut = engine.cancel(leader)
    outputs = run(engine)

    assert cut is not None
    assert (cut.finished, cut.error, cut.outputs[0].finish_reason) == (True, None, "abort")
    assert cut.outputs[0].token_ids == []
    assert list(outputs) == [follower]
    assert outputs[follower].outputs[0].token_ids == expected[0]
    assert outputs[follower].num_cached_tokens == 16
    assert engine.runner.num_tokens_computed == 31 + 5


@pytest.mark.parametrize("num_steps", range(6))
def test_a_cancelled_request_tells_what_it_brought(
    num_steps: int, make_llm: MakeLLM, expected: list[list[int]]
):
    """Before its first step, in the middle of its prompt, and while it decodes."""
    llm = make_llm("llama", max_chunk_tokens=16)
    engine = llm.engine
    name = add(engine, STEM)
    for _ in range(num_steps):
        engine.step()

    output = engine.cancel(name)

    assert output is not None
    assert output.outputs[0].token_ids == expected[0][: max(0, num_steps - 1)]
    assert output.outputs[0].finish_reason == "abort"
    assert (output.timings.first_scheduled is None) == (num_steps == 0)
    assert output.timings.finished is not None
    assert_idle(engine)


def test_all_continuations_of_a_request_are_cancelled(make_llm: MakeLLM):
    llm = make_llm("llama", max_num_seqs=2)
    engine = llm.engine
    name = add(engine, STEM, SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.step()

    output = engine.cancel(name)

    assert output is not None
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4
    assert_idle(engine)


def test_a_cancelled_request_is_not_known_any_more(llm: LLM):
    engine = llm.engine
    name = add(engine, STEM)

    assert engine.cancel(name) is not None
    assert engine.cancel(name) is None
    assert engine.cancel("nobody") is None


# --- names, and the cache in use ---


def test_a_name_is_unique_among_live_requests(llm: LLM):
    engine = llm.engine
    first = engine.make_request(Prompt(token_ids=STEM), GREEDY, "twin")
    second = engine.make_request(Prompt(token_ids=STEM), GREEDY, "twin")
    engine.add(first)

    with pytest.raises(DuplicateRequest, match="request id 'twin' is in use"):
        engine.add(second)
    with pytest.raises(DuplicateRequest, match="wait until that request has ended"):
        engine.make_request(Prompt(token_ids=STEM), GREEDY, "twin")
    run(engine)

    assert add(engine, STEM, request_id="twin") == "twin"
    run(engine)


def test_names_that_are_made_up_avoid_those_in_use(make_llm: MakeLLM):
    llm = make_llm("llama")
    engine = llm.engine
    taken = [add(engine, STEM, request_id=f"request-{number}") for number in (0, 1, 3)]

    names = [add(engine, STEM) for _ in range(2)]

    assert len({*taken, *names}) == 5
    run(engine)


@pytest.mark.parametrize("name", [5, b"x", ["x"]])
def test_a_name_is_a_text(name: Any, llm: LLM):
    with pytest.raises(RequestError, match=r"request_id=.*: must be a str"):
        llm.engine.make_request(Prompt(token_ids=STEM), GREEDY, name)


def test_a_reset_is_refused_while_requests_run_unless_they_are_preempted(
    index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    """A refused reset changes nothing; one that preempts changes no answer."""
    llm = make_llm("llama", index=index)
    engine = llm.engine
    names = [add(engine, prompt) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()

    with pytest.raises(CacheInUse, match=r"5 running sequences hold blocks: .*preempt_running"):
        engine.reset_cache()
    engine.step()
    engine.reset_cache(preempt_running=True)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 5)
    assert list(cached_blocks(engine.cache.manager.index)) == []

    outputs = run(engine)
    assert tokens_of([outputs[name] for name in names]) == expected

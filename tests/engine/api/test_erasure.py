"""Erasing a tenant through ``LLM`` and ``AsyncLLM``: nothing of it is found, and others go on."""

import asyncio

import pytest
import torch

from ostinato import AsyncLLM, EraseReceipt, LeaseStatus, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.prompts import parse_prompt
from ostinato.errors import CacheInUse, ConfigError, EngineStopped, RequestError
from tests.engine.api.async_calls import llm
from tests.engine.loop.stepping import StepByStep, async_llm, last
from tests.engine.tenant_calls import (
    ONE,
    ONE_LONG,
    PROMPT,
    SALT,
    SMALL,
    num_hits,
    salted_prompt,
    tokens_of,
)
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.servers.memory_search import search
from tests.support.waiting import other_tasks_have_started, until

__all__ = ["llm"]


def all_kv(engine: Engine) -> list[list[bytes]]:
    """Return what every slot of every layer holds: one row of bytes per slot."""
    rows = []
    for store in engine.runner.kv_stores:
        slots = torch.arange(store.num_blocks * store.block_size)
        for layer in store.layers:
            for tensor in store.read(layer, slots):
                rows.append([row.numpy().tobytes() for row in tensor])
    return rows


def kv_now(engine: Engine) -> list[set[bytes]]:
    """Return, per layer, the keys and values that are in the store and are not zero."""
    return [{row for row in layer if any(row)} for layer in all_kv(engine)]


def num_found(engine: Engine, wanted: list[set[bytes]]) -> int:
    """Count the rows of the stores that are among these."""
    pairs = zip(all_kv(engine), wanted, strict=True)
    return sum(row in rows for layer, rows in pairs for row in layer)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_erased_tenant_s_keys_and_values_are_nowhere(make_llm: MakeLLM, family: str, index: str):
    """Also those in blocks that were evicted or given back: its second prompt was not stored."""
    llm = make_llm(family, index=index, **SMALL)
    unstored = {**salted_prompt(list(range(40, 60)), SALT), "cache_write": False}
    llm.generate([salted_prompt(PROMPT, SALT), unstored], ONE, use_tqdm=False)
    secrets = kv_now(llm.engine)
    llm.generate(tokens_of(1), ONE, use_tqdm=False)
    assert num_found(llm.engine, secrets) >= 24 * len(secrets) // 2

    receipt = llm.erase(SALT)
    assert num_found(llm.engine, secrets) == 0
    assert receipt.num_blocks >= 6 and receipt.num_zeroed_slots > 0
    assert num_hits(llm, PROMPT, salt=SALT) == 0
    assert num_hits(llm, tokens_of(1)) == 23, "others keep theirs"


def test_what_others_have_cached_is_as_exact_as_before(make_llm: MakeLLM):
    """The neighbour's hit after the erasure gives the tokens that it gives in an empty engine."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    cold = make_llm("llama", **SMALL).generate(tokens_of(1), params, use_tqdm=False)[0]
    llm = make_llm("llama", **SMALL)
    llm.generate([salted_prompt(PROMPT, SALT), tokens_of(1)], ONE, use_tqdm=False)
    llm.erase(SALT)
    warm = llm.generate(tokens_of(1), params, use_tqdm=False)[0]
    assert warm.num_cached_tokens == 23
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_the_receipt_of_an_erasure_counts_every_place(make_llm: MakeLLM):
    """Six blocks and one of a neighbour's: 128 slots, all but the neighbour's four are zeroed."""
    llm = make_llm("llama", keep_event_batches=8, **SMALL)
    llm.generate(salted_prompt(PROMPT, SALT), ONE, use_tqdm=False)
    llm.generate([100, 101, 102, 103], ONE, use_tqdm=False)
    llm.lease(salted_prompt(PROMPT, SALT))
    receipt = llm.erase(SALT)
    assert receipt == EraseReceipt(0, 6, 1, receipt.num_events, 128 - 4)
    assert receipt.num_events >= 2
    assert llm.erase(SALT) == EraseReceipt(num_zeroed_slots=124)


def test_an_erased_tenant_s_states_are_nowhere(make_llm: MakeLLM):
    """Neither its checkpoints nor what its running sequence has left in its slot."""
    llm = make_llm("lfm2", num_state_slots=8, max_num_batched_tokens=256, max_num_seqs=2)
    ids = [5 + i % 50 for i in range(150)]
    for salt in (SALT, "another"):
        llm.generate([{"prompt_token_ids": ids, "cache_salt": salt}], use_tqdm=False)
    tensors = [t for layer in llm.engine.runner.states.spec.layers
               for t in llm.engine.runner.states.states(layer)]  # fmt: skip
    written = {slot for t in tensors for slot in range(8) if t[slot].any()}
    assert len(written) > 2
    llm.erase(SALT)
    kept = {slot for t in tensors for slot in range(8) if t[slot].any()}
    assert kept == llm.engine.cache.admin.live_slots()[-1].keys() != set()
    llm.erase("another")
    assert not any(t.any() for t in tensors)


def test_engine_scheduler_and_cache_know_an_erased_tenant_no_more(make_llm: MakeLLM):
    llm = make_llm("llama", keep_event_batches=8, **SMALL)
    llm.generate(salted_prompt(PROMPT, SALT), ONE, use_tqdm=False)
    engine = llm.engine
    books = [value for value in vars(engine).values() if isinstance(value, (dict, list))]
    places = [engine.cache, engine.scheduler, *books]
    assert search(places, SALT.encode()).salts
    llm.erase(SALT)
    assert search(places, SALT.encode()).salts == 0


def test_while_requests_of_a_tenant_are_live_it_is_erased_only_with_them(make_llm: MakeLLM):
    """One runs and one waits; both are cancelled, if that is asked for."""
    llm = make_llm("llama", max_num_seqs=1, **SMALL)
    engine = llm.engine
    for _ in range(2):
        engine.add(engine.make_request(parse_prompt(salted_prompt(PROMPT, SALT)), ONE_LONG))
    engine.step()
    with pytest.raises(CacheInUse, match=r"2 requests of the tenant are live.*cancel_running=True"):
        llm.erase(SALT)
    assert engine.has_work
    assert llm.erase(SALT, cancel_running=True).num_requests == 2
    assert not engine.has_work


@pytest.mark.parametrize("salt", [5, None, b"salt", "half \ud83d"])
def test_what_is_no_salt_cannot_be_erased_and_the_engine_goes_on(make_llm: MakeLLM, salt):
    llm = make_llm("llama", **SMALL)
    with pytest.raises(RequestError, match="cache_salt="):
        llm.erase(salt)
    assert llm.generate(PROMPT, ONE, use_tqdm=False)[0].finished


# --- with an event loop -------------------------------------------------------------------


async def until_live(llm: AsyncLLM, count: int) -> None:
    """Wait until so many requests of the tenant are live."""
    await until(lambda: len(llm.engine.requests_of(SALT)) >= count)


async def erased_while_it_runs(llm: AsyncLLM) -> tuple[StepByStep, asyncio.Task, asyncio.Task]:
    """Ask for the erasure of a tenant whose request runs; returns the request and the erasure."""
    steps = StepByStep(llm)
    running = asyncio.create_task(last(llm.generate(salted_prompt(PROMPT, SALT), ONE_LONG)))
    await steps.until(asyncio.create_task(until_live(llm, 1)))
    erasing = asyncio.create_task(llm.erase(SALT))
    await other_tasks_have_started()
    return steps, running, erasing


async def test_an_erasure_waits_for_the_tenant_s_requests_and_lets_no_new_ones_in(llm: AsyncLLM):
    """The running one ends as ever; the one that comes meanwhile is refused; later ones are not."""
    steps, running, erasing = await erased_while_it_runs(llm)
    refused = asyncio.create_task(last(llm.generate(salted_prompt(PROMPT, SALT), ONE)))
    other = asyncio.create_task(last(llm.generate(tokens_of(1), ONE)))
    await steps.until(asyncio.gather(refused, other, return_exceptions=True))
    assert not running.done(), "the tenant's request is in the middle"
    with pytest.raises(RequestError, match=r"tenant of the request.* is being erased"):
        refused.result()
    assert other.result().finished, "others come and go"
    steps.go_on(1000)
    receipt = await erasing
    assert running.result().outputs[0].finish_reason == "length"
    assert len(running.result().outputs[0].token_ids) == 30
    assert receipt.num_requests == 0 and receipt.num_blocks > 6
    again = await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))
    assert again.num_cached_tokens == 0


async def test_an_erasure_that_cancels_ends_the_tenant_s_requests_and_no_others(
    checkpoints: Checkpoints,
):
    """Two of the tenant's, one of them waiting; the neighbour's goes on while KV is zeroed."""
    with async_llm(checkpoints) as llm:
        alone = (await last(llm.generate(tokens_of(1), ONE_LONG))).outputs[0].token_ids
    with async_llm(checkpoints, max_num_seqs=2) as llm:
        steps = StepByStep(llm)
        theirs = asyncio.create_task(last(llm.generate(tokens_of(1), ONE_LONG)))
        mine = [
            asyncio.create_task(last(llm.generate(salted_prompt(PROMPT, SALT), ONE_LONG)))
            for _ in range(2)
        ]
        await steps.until(asyncio.create_task(until_live(llm, 2)))
        erasing = asyncio.create_task(llm.erase(SALT, cancel_running=True))
        await steps.until(erasing)
        assert erasing.result().num_requests == 2
        assert not theirs.done(), "the neighbour's request is in the middle"
        for output in await asyncio.gather(*mine):
            assert output.outputs[0].finish_reason == "abort"
        assert search(llm.engine.cache, SALT.encode()).salts == 0
        steps.go_on(1000)
        assert (await theirs).outputs[0].token_ids == alone


async def test_keys_and_values_are_gone_while_others_run(llm: AsyncLLM):
    """The neighbour is between two of its tokens when the tenant's are searched for."""
    await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))
    secrets = kv_now(llm.engine)
    steps = StepByStep(llm)
    theirs = asyncio.create_task(last(llm.generate(tokens_of(1), ONE_LONG)))
    erasing = asyncio.create_task(llm.erase(SALT))
    await other_tasks_have_started()
    assert num_found(llm.engine, secrets) >= 24 * len(secrets)
    await steps.until(erasing)
    assert not theirs.done()
    assert num_found(llm.engine, secrets) == 0
    steps.go_on(1000)
    assert (await theirs).finished


async def test_an_erasure_whose_caller_gave_up_lets_the_tenant_in_again(llm: AsyncLLM):
    """The tenant must not stay shut out."""
    steps, running, erasing = await erased_while_it_runs(llm)
    erasing.cancel()
    await asyncio.gather(erasing, return_exceptions=True)
    steps.go_on(1000)
    await running
    assert (await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))).finished


async def test_the_async_face_leases_erases_and_refuses_like_the_other(llm: AsyncLLM):
    await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))
    receipt = await llm.lease(salted_prompt(PROMPT, SALT))
    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.ACCEPTED, 24)
    for wrong in (llm.lease([9999]), llm.lease(5), llm.erase(5), llm.update_weights({})):
        with pytest.raises((RequestError, ConfigError)):
            await wrong
    assert await llm.end_lease(receipt.lease_id)
    assert not await llm.end_lease(receipt.lease_id)
    assert (await llm.erase(SALT)).num_blocks == 6
    llm.shutdown()
    with pytest.raises(EngineStopped):
        await llm.lease(PROMPT)

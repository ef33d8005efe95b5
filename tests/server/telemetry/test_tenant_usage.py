"""What the cache did for whom: bounded, second by second, and gone when a tenant is erased."""

import asyncio
import threading
from itertools import count

import httpx
import pytest

from ostinato import AsyncLLM, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.outputs import CompletionOutput, RequestOutput, RequestTimings
from ostinato.engine.requests.prompts import Prompt
from ostinato.server.access.callers import Caller
from ostinato.server.call import GenerateCall
from ostinato.server.page.figures import percentiles
from ostinato.server.state import ServerState
from ostinato.server.telemetry.engine_watch import EngineWatch
from ostinato.server.telemetry.observer import ServedRequest, salt_label
from ostinato.server.telemetry.tenant_usage import (
    GAPS_PER_SECOND,
    HISTORY_S,
    MAX_TENANTS,
    OTHERS,
    UNNAMED,
    Second,
    TenantUsage,
    merge,
)
from tests.support.servers.servers import serving
from tests.support.waiting import other_tasks_have_started


def served(tenant: str, hit: int, copied: int = 0, waited: int = 0, took_s: float = 0.5):
    """Return a request of ten prompt tokens that has its first token."""
    call = GenerateCall(
        endpoint="/test", params=SamplingParams(max_tokens=1), prompt=Prompt(text="abc")
    )
    output = RequestOutput(
        "name", None, list(range(10)), [], True, RequestTimings(0.0),
        num_cached_tokens=hit, num_copied_tokens=copied, num_waited_tokens=waited,
    )  # fmt: skip
    record = ServedRequest("name", call, Caller(tenant, f"salt of {tenant}"), "", 0.0)
    record.note(output, took_s)
    record.salt = f"salt of {tenant}"
    return record


def book(usage: TenantUsage, *records: ServedRequest) -> None:
    for record in records:
        usage.accepted(record)
        usage.first_token(record)
        usage.finished(record)


def test_prompt_tokens_are_told_apart_and_add_up():
    usage = TenantUsage(lambda: 7.5)
    book(usage, served("ann", 0), served("ann", 9, copied=2, waited=4))
    prompt = usage.accounts["ann"].prompt
    assert (prompt.computed, prompt.cached, prompt.copied, prompt.waited) == (11, 3, 2, 4)
    assert (prompt.total, prompt.hit, prompt.hit_share) == (20, 9, 0.45)
    assert [first.hit_share for first in usage.accounts["ann"].first_tokens] == [0, 0.9]


def test_generated_tokens_and_waits_are_booked_in_their_seconds():
    """Five tokens: one at once, three half a second apart, and the last when it has ended."""
    ledger = TenantUsage(lambda: 100.0)
    record = served("ann", 0)
    record.output.outputs.append(CompletionOutput(0, "", [1]))
    record.num_generated = 1

    def generate(token: int, now_s: float) -> None:
        record.output.outputs[0].token_ids.append(token)
        record.note(record.output, now_s)

    ledger.accepted(record)
    ledger.first_token(record)
    for token, now_s in ((2, 1.0), (3, 1.5), (4, 2.0)):
        generate(token, now_s)
    for _ in range(2):  # the second time there is nothing new
        ledger.catch_up()
    generate(5, 4.0)
    ledger.finished(record)

    account = ledger.accounts["ann"]
    assert {n: second.generated for n, second in account.seconds.items()} == {
        100: 2,
        101: 2,
        103: 1,
    }
    assert [second.gaps_s for second in account.seconds.values()] == [[0.5], [0.5, 0.5], [2.0]]
    [ended] = account.ended
    assert (ended.output, ended.took_s, ended.id) == (5, 4.0, "name")
    assert percentiles([4.0, 1.0, 2.0, 3.0]) == [3.0, 4.0, 4.0]


def test_of_many_waits_in_one_second_a_sample_is_kept():
    second = Second(0)
    for number in range(10_000):
        second.add_gap(number)
    assert second.num_gaps == 10_000 and len(second.gaps_s) == GAPS_PER_SECOND
    assert max(second.gaps_s) > 5_000 > min(second.gaps_s)


def test_old_seconds_make_room_for_new_ones():
    now = 0.0
    usage = TenantUsage(lambda: now)
    for now in range(HISTORY_S + 50):  # noqa: B007 - the clock reads it
        book(usage, served("ann", 5), served("ann", 5))
    seconds = usage.accounts["ann"].seconds
    assert len(seconds) == HISTORY_S
    assert {second.prompt.total for second in seconds.values()} == {20}
    assert usage.accounts["ann"].prompt.total == 20 * (HISTORY_S + 50)


def test_tenants_beyond_the_bound_are_booked_together():
    usage = TenantUsage()
    for number in range(MAX_TENANTS + 9):
        book(usage, served(f"tenant {number}", 5))
    assert len(usage.accounts) == MAX_TENANTS + 1
    assert usage.accounts[OTHERS].num_requests == 9
    assert merge(usage.accounts.values()).prompt.total == 10 * (MAX_TENANTS + 9)


def test_names_are_known_and_salts_never_shown():
    usage = TenantUsage()
    book(usage, served("ann", 5))
    assert usage.name_of(b"salt of ann") == "ann"
    assert usage.name_of(b"salt of ann\x1fnarrowed") == "ann"
    assert usage.name_of(b"salt of bob") == UNNAMED
    assert usage.erase("ann") and not usage.erase("ann")
    assert usage.name_of(b"salt of ann") == UNNAMED


def test_an_erased_tenant_leaves_page_and_metrics(state: ServerState):
    """Without keys a tenant is the salt that its clients chose."""
    with serving(state) as url:
        body = {"model": "bard", "prompt": "Remember me not, good sir.", "max_tokens": 1}
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/completions", json={**body, "cache_salt": "lethe"})
            assert answer.status_code == 200, answer.text
        assert "lethe" not in httpx.get(f"{url}/ui/state").text, "salts are secrets"
        assert salt_label("lethe") in httpx.get(f"{url}/ui/state").text
        assert "Remember me" in httpx.get(f"{url}/ui/state").text
        receipt = httpx.post(f"{url}/admin/erase", json={"cache_salt": "lethe"}).json()
        after = httpx.get(f"{url}/ui/state").text
    assert "tenant_usage" in receipt["noted_by"]
    assert salt_label("lethe") not in after and "Remember me" not in after
    assert salt_label("lethe") not in state.usage.accounts


def test_a_watch_shows_what_it_saw_last_while_a_step_is_under_way(state: ServerState):
    asyncio.run(watch_while_held_up(state.llm))


async def watch_while_held_up(llm: AsyncLLM) -> None:
    numbers = count()
    watch = EngineWatch(llm, lambda engine: next(numbers), timeout_s=0.05, clock=lambda: 0.0)
    assert await watch.look() == 0
    goes_on = threading.Event()
    holding = asyncio.create_task(llm.look(lambda engine: goes_on.wait(20)))
    await other_tasks_have_started()
    assert await watch.look() == 0
    goes_on.set()
    await holding
    while await watch.look() < 1:
        pass


async def test_a_look_that_took_long_is_not_repeated_at_once(state: ServerState):
    """It takes a second each time, and rests for fifty."""
    now_s = [100.0]

    def slow(engine: Engine) -> float:
        now_s[0] += 1
        return now_s[0]

    watch = EngineWatch(state.llm, slow, clock=lambda: now_s[0])
    assert [await watch.look() for _ in range(5)] == [101.0] * 5
    now_s[0] += 50
    assert await watch.look() == 152.0


def test_the_first_look_at_an_engine_that_has_ended_says_so():
    from ostinato.errors import EngineStopped

    llm = AsyncLLM("tiny-shakespeare", num_blocks=130)
    watch = EngineWatch(llm, lambda engine: "seen")
    assert asyncio.run(watch.look()) == "seen"
    llm.shutdown()
    assert asyncio.run(watch.look()) == "seen"
    with pytest.raises(EngineStopped):
        asyncio.run(EngineWatch(llm, lambda engine: "never").look())

"""KV that outlives the pool: what an engine writes to a tier, leases there, and announces."""

import time
from typing import Any

import pytest

from ostinato import ANTHROPIC_1H, OPENAI_24H
from ostinato.engine.loop.kv_events_wire import BatchEncoder, decode
from ostinato.engine.tiers.stores import PAUSES_S
from ostinato.observe.events import BlockRemoved, BlockStored, EventBatch
from ostinato.tiers.port import LoadFault, StoreResult
from tests.engine.tiers.tiered import TEXT, NewLLM, ask
from tests.support.servers.memory_tier import MemoryTier

NOW = 1_800_000_000.0


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the wall clock, by which tiers keep leases."""
    monkeypatch.setattr(time, "time", lambda: NOW)


def test_what_is_used_a_second_time_is_written_at_once(new_llm: NewLLM, tier: MemoryTier):
    llm = new_llm()
    ask(llm)
    assert not tier.blocks, "nothing was used twice"
    ask(llm)
    llm.engine.tiers.stores.flush(10)
    assert len(tier.blocks) == 8


def test_tiers_are_told_what_requests_used(new_llm: NewLLM, tier: MemoryTier):
    """Also of hits in the pool; the pool's policy ranks what a tier may evict."""
    llm = new_llm()
    ask(llm)
    ask(llm)
    llm.engine.tiers.stores.flush(10)
    assert [prefix.num_blocks for prefix, _ in tier.uses] == [8, 8]
    policy = llm.engine.cache.manager.pool.shares.policy_of(b"")
    assert all(reuse.forecast is policy for _, reuse in tier.uses)


def test_what_may_soon_be_evicted_is_written_before(new_llm: NewLLM, tier: MemoryTier):
    """Seven conversations of nine blocks fill 64: the first is on the disk before it is evicted."""
    llm = new_llm()
    for first in range(7):
        ask(llm, [first, *TEXT])
    llm.engine.tiers.stores.flush(10)
    assert len(tier.blocks) == 7 * 8


def test_refused_stores_are_tried_again_later(
    new_llm: NewLLM, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(PAUSES_S, StoreResult.READ_ONLY, 0.0)
    llm = new_llm()
    tier.refusal = StoreResult.READ_ONLY
    for _ in range(2):
        ask(llm)
    stores = llm.engine.tiers.stores
    stores.flush(0.05)
    tier.refusal = None
    ask(llm)
    stores.flush(10)
    assert len(tier.blocks) == 8


@pytest.mark.usefixtures("wall_clock")
def test_a_lease_of_a_day_survives_a_restart(new_llm: NewLLM, tier: MemoryTier):
    """Once it was loaded, the next engine holds it in its pool, for the time that is left."""
    llm = new_llm()
    ask(llm)
    receipt = llm.lease({"prompt_token_ids": TEXT}, OPENAI_24H)
    assert receipt.num_tokens == 128
    llm.engine.tiers.stores.flush(10)
    assert set(tier.keep_until.values()) == {NOW + 86400}
    tier.keep_until = dict.fromkeys(tier.keep_until, NOW + 3600)
    llm = new_llm()
    ask(llm)
    (lease,) = llm.engine.cache.admin.leases()
    assert lease.terms.ttl_s == 3600 and lease.table.num_computed == 128
    assert llm.end_lease(lease.lease_id)
    llm.engine.tiers.stores.flush(10)
    assert set(tier.keep_until.values()) == {0.0}


@pytest.mark.usefixtures("wall_clock")
def test_a_lease_that_a_use_starts_anew_ends_later_on_the_tier(new_llm: NewLLM, tier: MemoryTier):
    """Closing writes the end that the last use gave it, and a restart holds it for the rest."""
    llm = new_llm()
    ask(llm)
    llm.lease({"prompt_token_ids": TEXT}, ANTHROPIC_1H)
    llm.engine.tiers.stores.flush(10)
    tier.keep_until = dict.fromkeys(tier.keep_until, NOW + 60)  # as if leased an hour ago
    ask(llm)
    llm.close()
    (end,) = set(tier.keep_until.values())
    assert NOW + 60 < end <= NOW + 3600
    llm = new_llm()
    ask(llm)
    (lease,) = llm.engine.cache.admin.leases()
    assert lease.terms == ANTHROPIC_1H, "and each use moves its end again"
    assert lease.expires_s - llm.engine.cache.manager.pool.now() > 60


def test_kv_events_tell_what_tiers_store_lose_and_erase(new_llm: NewLLM, tier: MemoryTier):
    """The same digests as in the pool, with the tier as medium; also of what a restart finds."""
    ask(new_llm(), salt="acme")
    llm = new_llm(keep_event_batches=100)
    assert llm.engine.cache.events is not None
    events: list[Any] = []
    llm.engine.cache.events.subscribe(lambda batch: events.extend(batch.events))
    tier.faults[list(tier.blocks)[5]] = LoadFault.CHECKSUM
    for _ in range(2):  # five blocks are loaded, three computed, and written at their second use
        ask(llm, salt="acme")
        llm.engine.tiers.stores.flush(10)
        llm.engine.tiers.run_idle_work()
    pool = [d for e in events if isinstance(e, BlockStored) and not e.medium for d in e.digests]
    disk = [e for e in events if isinstance(e, BlockStored) and e.medium == "disk"]
    assert [digest for event in disk for digest in event.digests] == pool[:8]
    assert disk[-1].parent == pool[4] and disk[-1].tokens.tolist() == TEXT[80:128]
    llm.erase("acme")
    gone = [e.digests for e in events if isinstance(e, BlockRemoved) and e.medium == "disk"]
    assert {digest for digests in gone for digest in digests} == set(pool[:8])
    kept = llm.engine.cache.events.replay(0) or ()
    assert not any(batch.events for batch in kept), "nothing of the tenant is replayed"
    batch = BatchEncoder("CPU").encode(EventBatch(0, 0.0, (disk[0],)))
    assert decode(batch).events[0].medium == "disk"

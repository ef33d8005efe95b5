"""Tiers whose calls hang: erasures, stores and loads that no step and no close waits for."""

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from ostinato import AsyncLLM
from ostinato.engine.loop import engine as engine_module
from ostinato.engine.tiers import loads as tier_loads
from ostinato.engine.tiers import stores as tier_stores
from ostinato.engine.tiers import tiered_cache
from tests.engine.loop.stepping import async_llm, last
from tests.engine.tenant_calls import ONE, ONE_LONG, PROMPT, SALT, salted_prompt, tokens_of
from tests.engine.tiers.tiered import GREEDY, TEXT, NewLLM, ask, engine_prompt, new_llm
from tests.support.models.checkpoints import Checkpoints
from tests.support.servers.memory_tier import MemoryTier
from tests.support.waiting import until

__all__ = ["new_llm"]


class HangingTier(MemoryTier):
    """A tier whose erasures and stores wait for gates."""

    def __init__(self) -> None:
        super().__init__()
        self.erasing, self.storing = threading.Event(), threading.Event()
        self.erasing.set()
        self.storing.set()
        self.num_erasures = self.num_stores = 0

    def erase(self, salt):
        self.num_erasures += 1
        self.erasing.wait(30)
        return super().erase(salt)

    def store(self, extents):
        self.num_stores += 1
        self.storing.wait(30)
        return super().store(extents)


@pytest.fixture
def tier() -> Iterator[HangingTier]:
    tier = HangingTier()
    yield tier
    for gate in (tier.gate, tier.erasing, tier.storing):
        gate.set()


@pytest.fixture
def llm(
    tier: HangingTier, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AsyncLLM]:
    monkeypatch.setattr(engine_module, "open_tiers", tier.opened)
    with async_llm(checkpoints, kv_disk="unused") as llm:
        yield llm


async def written(llm: AsyncLLM, tier: HangingTier) -> None:
    """Serve a prompt of the tenant twice, and wait until the tier has it."""
    for _ in range(2):
        await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))
    await until(lambda: bool(tier.blocks))


async def test_others_and_the_tenant_itself_go_on_while_a_tier_is_overwritten(
    llm: AsyncLLM, tier: HangingTier
):
    """What is erased is not found from the beginning on; the receipt comes at the end."""
    await written(llm, tier)
    tier.erasing.clear()
    erasing = asyncio.create_task(llm.erase(SALT))
    await until(lambda: tier.num_erasures == 1)
    assert (await last(llm.generate(tokens_of(1), ONE_LONG))).finished
    num_before = tier.num_looked_up
    again = await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))
    assert (again.num_cached_tokens, tier.num_looked_up) == (0, num_before)
    assert not erasing.done()
    tier.erasing.set()
    receipt = await erasing
    assert receipt.num_blocks >= 6 and receipt.tiers[0].num_extents > 0
    assert not tier.blocks


async def test_an_erasure_waits_for_no_store_in_an_engine_step(llm: AsyncLLM, tier: HangingTier):
    """A full disk holds up the writer of all tenants; the stranger's stream goes on."""
    tier.storing.clear()
    for _ in range(2):
        await last(llm.generate(salted_prompt(PROMPT, SALT), ONE))
    await until(lambda: tier.num_stores == 1)
    erasing = asyncio.create_task(llm.erase(SALT))
    assert (await last(llm.generate(tokens_of(1), ONE_LONG))).finished
    assert not erasing.done() and not tier.num_erasures
    tier.storing.set()
    assert (await erasing).tiers[0].num_extents > 0, "what was being stored is erased as well"
    assert not tier.blocks


async def test_an_erasure_whose_caller_gives_up_is_completed(llm: AsyncLLM, tier: HangingTier):
    await written(llm, tier)
    tier.erasing.clear()
    erasing = asyncio.create_task(llm.erase(SALT))
    await until(lambda: tier.num_erasures == 1)
    erasing.cancel()
    await asyncio.gather(erasing, return_exceptions=True)
    tier.erasing.set()
    await until(lambda: not tier.blocks)
    await written(llm, tier)


def test_a_head_whose_read_hangs_is_computed_and_the_read_ends_later(
    new_llm: NewLLM, tier: HangingTier, monkeypatch: pytest.MonkeyPatch
):
    """Nothing was measured before: the first loads are waited for as briefly as later ones."""
    monkeypatch.setattr(tier_loads, "FIRST_PATIENCE_S", 0.0)
    monkeypatch.setattr(tier_loads, "LATE_S", 0.0)
    before = ask(new_llm())
    llm = new_llm()
    tier.gate.clear()
    engine = llm.engine
    engine.add(engine.make_request(engine_prompt(TEXT), GREEDY, "head"))
    output = next(x.output() for _ in range(2000) for x in engine.step() if x.finished)
    assert output.outputs[0].token_ids == before.outputs[0].token_ids
    assert output.cached_tokens_from == {}
    tier.gate.set()
    llm.engine.drain_tiers()
    engine.cache.check()
    assert engine.cache.manager.num_live_tables == 0
    assert ask(llm).outputs[0].token_ids == before.outputs[0].token_ids


def test_closing_leaves_a_disk_that_hangs_and_says_what_was_not_written(
    new_llm: NewLLM, tier: HangingTier, monkeypatch: pytest.MonkeyPatch, caplog
):
    for module in (tier_stores, tiered_cache):
        monkeypatch.setattr(module, "GRACE_S", 0.01)
    monkeypatch.setattr(tiered_cache, "FLUSH_S", 0.01)
    llm = new_llm()
    for first in range(3):
        ask(llm, [first, *TEXT])
    tier.storing.clear()
    with caplog.at_level(logging.WARNING):
        llm.close()
    [warning] = [record.getMessage() for record in caplog.records]
    assert (
        "16 cached blocks of 16 tokens are not written to the tiers, nor what is being" in warning
    )

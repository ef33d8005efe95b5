"""KV that outlives the pool: what an engine loads from a tier, and what it explains."""

from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.cache.block_table import BlockTable
from ostinato.core.errors import PromptTooLong
from ostinato.core.ids import RequestId
from ostinato.engine.tiers.reader import TierReader
from ostinato.scheduling.learned_prices import LearnedPrices
from ostinato.scheduling.step_prices import StepPrices
from ostinato.tiers.port import LoadFault
from tests.engine.relatives import run
from tests.engine.tiers.tiered import GREEDY, TEXT, NewLLM, ask, engine_prompt, slow_computing
from tests.support.servers.memory_tier import MemoryTier


def test_a_conversation_that_returns_after_a_restart_hits(new_llm: NewLLM):
    """All but the last, partial block comes from the disk, and the answer is the same."""
    before = ask(new_llm())
    after = ask(new_llm())
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens == 128
    assert after.cached_tokens_from == {"disk": 128}
    assert after.num_waited_tokens == 0


def test_a_hit_in_the_pool_asks_no_tier(new_llm: NewLLM, tier: MemoryTier):
    llm = new_llm()
    ask(llm)
    num_before = tier.num_looked_up
    assert ask(llm).cached_tokens_from == {"pool": 129}
    assert tier.num_looked_up == num_before


@pytest.mark.parametrize("fault", [LoadFault.CHECKSUM, LoadFault.SHORT, LoadFault.DEADLINE])
def test_a_load_ends_at_the_first_bad_block(new_llm: NewLLM, tier: MemoryTier, fault: LoadFault):
    """Five good blocks are used, the sixth and all after it are computed."""
    before = ask(new_llm())
    llm = new_llm()
    tier.faults[list(tier.blocks)[5]] = fault
    after = ask(llm)
    assert after.cached_tokens_from == {"disk": 80}
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert llm.engine.tiers.counts.load_faults == {str(fault): 1}
    llm.engine.cache.check()


def test_requests_that_begin_alike_share_one_load(new_llm: NewLLM, tier: MemoryTier):
    ask(new_llm())
    llm = new_llm()
    both = llm.generate(
        [{"prompt_token_ids": [*TEXT, end]} for end in (3, 4)], GREEDY, use_tqdm=False
    )
    assert [output.cached_tokens_from for output in both] == [{"disk": 128}] * 2
    assert tier.num_loads == 4, "eight blocks in extents of two, each once"


def test_others_go_on_while_one_loads(new_llm: NewLLM, tier: MemoryTier):
    """The one whose prefix is read comes first and is passed over until it is there."""
    ask(new_llm())
    engine = new_llm().engine
    tier.gate.clear()
    for name, tokens in (("loads", TEXT), ("other", [5, 6, 7])):
        engine.add(engine.make_request(engine_prompt(tokens), GREEDY, name))
    ended = [
        state.request.request_id for _ in range(8) for state in engine.step() if state.finished
    ]
    assert ended == ["other"]
    tier.gate.set()
    outputs = list(run(engine).values())
    assert [output.cached_tokens_from for output in outputs] == [{"disk": 128}]


@pytest.mark.parametrize("deed", ["cancel", "erase", "reset", "weights"])
def test_a_load_that_is_overtaken_leaves_nothing(new_llm: NewLLM, tier: MemoryTier, deed: str):
    """No block leaks, and no bytes of an erased tenant or of old weights can hit."""
    ask(new_llm(), salt="mine")
    llm = new_llm()
    engine = llm.engine
    tier.gate.clear()
    engine.add(engine.make_request(engine_prompt(TEXT, "mine"), GREEDY, "loads"))
    engine.step()
    assert len(engine.tiers.loads) == 1
    tier.gate.set()
    if deed == "cancel":
        engine.cancel("loads")
        engine.drain_tiers()
    elif deed == "erase":
        receipt = llm.erase("mine", cancel_running=True)
        assert receipt.tiers[0].num_extents == 8 and not tier.blocks
    elif deed == "reset":
        llm.engine.reset_cache()
    else:
        name, tensor = next(iter(engine.loaded.model.state_dict().items()))
        llm.update_weights({name: tensor * 1.5})
    while engine.has_work:
        engine.step()
    engine.cache.check()
    assert engine.cache.manager.num_live_tables == 0
    if deed != "cancel":
        assert ask(llm, salt="mine").cached_tokens_from in ({}, {"pool": 129})


def test_other_tenants_and_other_weights_find_nothing(new_llm: NewLLM):
    ask(new_llm(), salt="one")
    llm = new_llm()
    assert ask(llm, salt="two").num_cached_tokens == 0
    llm.engine.tiers.loads.prices = slow_computing()  # no load is too slow
    assert ask(llm, salt="one").cached_tokens_from == {"disk": 128}
    assert ask(new_llm(dtype="float16"), salt="one").num_cached_tokens == 0


def test_what_is_cheaper_to_compute_is_not_loaded(new_llm: NewLLM):
    ask(new_llm())
    llm = new_llm()
    loads = llm.engine.tiers.loads
    loads.reading.add(1, 1.0)  # a byte a second
    loads.prices = LearnedPrices(StepPrices(0.0, 1e-6, 0.0))
    output = ask(llm)
    assert output.num_cached_tokens == 0 and loads.num_cheaper == 1
    assert "was on the disk, cheaper to compute" in str(llm.explain(output))


def test_explanations_tell_what_was_loaded_and_what_was_bad(new_llm: NewLLM, tier: MemoryTier):
    ask(new_llm())
    llm = new_llm()
    tier.faults[list(tier.blocks)[5]] = LoadFault.CHECKSUM
    text = str(llm.explain(ask(llm)))
    assert "0..79   loaded    loaded from the disk" in text
    assert "80..127  computed  was on the disk, but the read failed its checksum" in text


def test_a_preempted_request_loads_again_what_the_pool_has_lost(new_llm: NewLLM):
    """It goes on to the same answer; what it loaded after its first admission is no hit."""
    llm = new_llm()
    before = ask(llm)
    llm.reset_prefix_cache()
    engine = llm.engine
    engine.add(engine.make_request(engine_prompt(TEXT), GREEDY, "preempted"))
    [sequence] = engine.scheduler.requests.live[RequestId("preempted")]
    while sequence.num_computed < 128:  # its look-up may take a moment, and its prompt some steps
        engine.step()
    engine.tiers.stores.queue_everything()
    engine.tiers.stores.flush(10)
    engine.tiers.loads.prices = slow_computing()  # no load is too slow
    engine.reset_cache(preempt_running=True)
    outputs = list(run(engine).values())
    assert outputs[0].outputs[0].token_ids == before.outputs[0].token_ids
    assert outputs[0].cached_tokens_from == {}
    assert engine.tiers.counts.loaded_tokens == {"disk": 128}
    assert engine.scheduler_stats.num_preemptions == 1


def test_a_request_that_is_ready_waits_for_no_tier(
    new_llm: NewLLM, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
):
    """One seat, and answers of one token: after each step nothing runs, and yet one is ready."""
    ask(new_llm())
    engine = new_llm(max_num_seqs=1).engine
    tier.gate.clear()
    one = SamplingParams(max_tokens=1, detokenize=False)
    engine.add(engine.make_request(engine_prompt(TEXT), one, "loads"))
    engine.step()
    for name in ("ready", "next"):
        engine.add(engine.make_request(engine_prompt([5, 6, 7]), one, name))
    waits: list[int] = []
    monkeypatch.setattr(engine.tiers.loads, "wait", lambda _: waits.append(len(engine.request_ids)))
    while len(engine.request_ids) > 1:
        engine.step()
    tier.gate.set()
    assert waits in ([], [1]), "only once the last one waits alone"


def test_steps_wait_for_a_slow_look_up_but_once(
    new_llm: NewLLM, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
):
    """A server that does not answer costs the others two milliseconds, and not two in each step."""
    engine = new_llm().engine
    waits: list[int] = []
    wait_for = TierReader.wait_for

    def counted(reader: TierReader, *arguments: Any) -> None:
        waits.append(len(engine.request_ids))
        wait_for(reader, *arguments)

    monkeypatch.setattr(TierReader, "wait_for", counted)
    tier.look_up_gate.clear()
    for name, tokens in (("slow", TEXT), ("other", [5, 6, 7])):
        engine.add(engine.make_request(engine_prompt(tokens), GREEDY, name))
    while len(engine.request_ids) > 1:
        engine.step()
    tier.look_up_gate.set()
    assert waits.count(2) <= 1


def test_a_step_that_fails_beside_a_load_takes_nothing_from_it(
    new_llm: NewLLM, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
):
    """The load began right before the step: its blocks are its own until it ends."""
    before = ask(new_llm())
    engine = new_llm().engine
    tier.gate.clear()
    for name, tokens in (("loads", TEXT), ("other", [5, 6, 7])):
        engine.add(engine.make_request(engine_prompt(tokens), GREEDY, name))

    def fail(plan: Any) -> Any:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", fail)
        ended = [state.output() for _ in range(3) for state in engine.step()]
    assert [output.request_id for output in ended] == ["other"]
    tier.gate.set()
    outputs = list(run(engine).values())
    assert [output.cached_tokens_from for output in outputs] == [{"disk": 128}]
    assert outputs[0].outputs[0].token_ids == before.outputs[0].token_ids
    engine.cache.check()


def pin(llm: LLM, tokens: list[int]) -> BlockTable:
    """Compute a prompt and pin it, as an embedder of the cache may, beyond the limits of leases."""
    engine = llm.engine
    engine.add(engine.make_request(engine_prompt(tokens), GREEDY, "pinned"))
    [sequence] = engine.scheduler.requests.live[RequestId("pinned")]
    while engine.has_work:
        engine.step()
    return engine.cache.manager.pin(sequence.key, len(tokens))


def test_a_load_without_room_for_ever_ends_and_planning_tells_its_request(
    new_llm: NewLLM, tier: MemoryTier
):
    """Pins hold all but four blocks, and nothing runs that could free one: nothing is read."""
    before = ask(new_llm())
    llm = new_llm()
    engine = llm.engine
    pinned = [pin(llm, [1 + place] * 240) for place in range(4)]
    engine.add(engine.make_request(engine_prompt(TEXT), GREEDY, "refused"))
    assert len(engine.tiers.loads) == 1
    while engine.tiers.loads:
        engine.tiers.begin_step()
    assert tier.num_loads == 0
    with pytest.raises(PromptTooLong, match="no sequence is running that would free more"):
        engine.step()
    engine.cancel("refused")
    engine.cache.check()

    engine.cache.manager.unpin(pinned[0])
    engine.tiers.loads.prices = slow_computing()  # no load is too slow
    after = ask(llm)
    assert after.cached_tokens_from == {"disk": 128}
    assert after.outputs[0].token_ids == before.outputs[0].token_ids

"""KV that outlives the pool: what an engine loads from a tier, writes to it, and says about it."""

import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import valkey

from ostinato import ANTHROPIC_1H, LLM, OPENAI_24H, RequestOutput, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.engine import engine as engine_module
from ostinato.engine.config import EngineConfig
from ostinato.engine.kv_events_wire import BatchEncoder, decode
from ostinato.engine.open_tiers import OpenTiers, open_tiers
from ostinato.engine.tier_stores import PAUSES_S
from ostinato.observe.events import BlockRemoved, BlockStored, EventBatch
from ostinato.runner.block_copies import DeviceCopies
from ostinato.tiers.port import LoadFault, StoreResult, TierListener
from tests.support.memory_tier import MemoryTier
from tests.support.redis_server import redis_server

TEXT = [1 + (i * 37) % 61 for i in range(130)]
"""Eight blocks of sixteen, and two tokens."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)

NewLLM = Callable[..., LLM]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def new_llm(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewLLM]:
    """Makes engines over one tier, one after another: each is a restart of the one before."""
    monkeypatch.setattr(engine_module, "open_tiers", tier.opened)
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        for earlier in made:
            earlier.close()
        made.append(LLM(num_blocks=64, max_model_len=256, kv_disk="unused", **settings))
        return made[-1]

    yield make
    made[-1].close()


def ask(llm: LLM, tokens: list[int] = TEXT, salt: str = "") -> RequestOutput:
    prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0]


def test_a_conversation_that_returns_after_a_restart_hits(new_llm: NewLLM):
    """All but the last, partial block comes from the disk, and the answer is the same."""
    before = ask(new_llm())
    after = ask(new_llm())
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens == 128
    assert after.cached_tokens_from == {"disk": 128}
    assert after.num_waited_tokens == 0


def test_what_is_used_a_second_time_is_written_at_once(new_llm: NewLLM, tier: MemoryTier):
    llm = new_llm()
    ask(llm)
    assert not tier.blocks, "nothing was used twice"
    ask(llm)
    llm.engine.tiers.stores.flush(10)
    assert len(tier.blocks) == 8


def test_a_hit_in_the_pool_asks_no_tier(new_llm: NewLLM, tier: MemoryTier):
    llm = new_llm()
    ask(llm)
    num_before = tier.num_looked_up
    assert ask(llm).cached_tokens_from == {"pool": 129}
    assert tier.num_looked_up == num_before


def test_tiers_are_told_what_requests_used(new_llm: NewLLM, tier: MemoryTier):
    """Also of hits in the pool; the pool's policy ranks what a tier may evict."""
    llm = new_llm()
    ask(llm)
    ask(llm)
    llm.engine.tiers.stores.flush(10)
    assert [prefix.num_blocks for prefix, _ in tier.uses] == [8, 8]
    policy = llm.engine.cache.manager.pool.shares.policy_of(b"")
    assert all(reuse.forecast is policy for _, reuse in tier.uses)


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
    outputs = [
        s.output() for _ in range(500) if engine.has_work for s in engine.step() if s.finished
    ]
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
    assert ask(llm, salt="one").cached_tokens_from == {"disk": 128}
    assert ask(new_llm(dtype="float16"), salt="one").num_cached_tokens == 0


def test_what_is_cheaper_to_compute_is_not_loaded(new_llm: NewLLM):
    ask(new_llm())
    llm = new_llm()
    loads = llm.engine.tiers.loads
    loads.reading.add(1, 1.0)  # a byte a second
    loads.computing.add(1_000_000, 1.0)
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


def test_a_lease_of_a_day_survives_a_restart(new_llm: NewLLM, tier: MemoryTier):
    """Once it was loaded, the next engine holds it in its pool, for the time that is left."""
    llm, since = new_llm(), time.time()
    ask(llm)
    receipt = llm.lease({"prompt_token_ids": TEXT}, OPENAI_24H)
    assert receipt.num_tokens == 128
    llm.engine.tiers.stores.flush(10)
    (end,) = set(tier.keep_until.values())
    assert since + 86400 <= end <= time.time() + 86400
    end = time.time() + 3600
    tier.keep_until = dict.fromkeys(tier.keep_until, end)
    llm = new_llm()
    ask(llm)
    (lease,) = llm.engine.cache.admin.leases()
    assert end - time.time() <= lease.terms.ttl_s <= 3600 and lease.table.num_planned == 128
    assert llm.end_lease(lease.lease_id)
    llm.engine.tiers.stores.flush(10)
    assert set(tier.keep_until.values()) == {0.0}


def test_a_lease_that_a_use_starts_anew_ends_later_on_the_tier(new_llm: NewLLM, tier: MemoryTier):
    """Closing writes the end that the last use gave it, and a restart holds it for the rest."""
    llm = new_llm()
    ask(llm)
    llm.lease({"prompt_token_ids": TEXT}, ANTHROPIC_1H)
    llm.engine.tiers.stores.flush(10)
    tier.keep_until = dict.fromkeys(tier.keep_until, time.time() + 60)  # as if an hour ago
    ask(llm)
    llm.close()
    (end,) = set(tier.keep_until.values())
    assert time.time() + 3000 < end <= time.time() + 3600
    llm = new_llm()
    ask(llm)
    (lease,) = llm.engine.cache.admin.leases()
    assert lease.terms == ANTHROPIC_1H, "and each use moves its end again"
    assert lease.expires_s - llm.engine.cache.manager.pool.now() > 3000


def test_a_preempted_request_loads_again_what_the_pool_has_lost(new_llm: NewLLM):
    """It goes on to the same answer; what it loaded after its first admission is no hit."""
    llm = new_llm()
    before = ask(llm)
    llm.reset_prefix_cache()
    engine = llm.engine
    engine.add(engine.make_request(engine_prompt(TEXT), GREEDY, "preempted"))
    engine.step()
    engine.tiers.stores.queue_everything()
    engine.tiers.stores.flush(10)
    engine.tiers.loads.computing.per_s = 1.0  # no load is too slow
    engine.reset_cache(preempt_running=True)
    outputs = [
        s.output() for _ in range(99) if engine.has_work for s in engine.step() if s.finished
    ]
    assert outputs[0].outputs[0].token_ids == before.outputs[0].token_ids
    assert outputs[0].cached_tokens_from == {}
    assert engine.tiers.counts.loaded_tokens == {"disk": 128}
    assert engine.scheduler_stats.num_preemptions == 1


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
    assert [len(event.digests) for event in disk] == [5, 3]
    assert [digest for event in disk for digest in event.digests] == pool[:8]
    assert disk[1].parent == pool[4] and disk[1].tokens.tolist() == TEXT[80:128]
    llm.erase("acme")
    gone = [e.digests for e in events if isinstance(e, BlockRemoved) and e.medium == "disk"]
    assert {digest for digests in gone for digest in digests} == set(pool[:8])
    kept = llm.engine.cache.events.replay(0) or ()
    assert not any(batch.events for batch in kept), "nothing of the tenant is replayed"
    batch = BatchEncoder("CPU").encode(EventBatch(0, 0.0, (disk[0],)))
    assert decode(batch).events[0].medium == "disk"


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


def test_settings_of_tiers_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match="kv_disk_bytes_per_day=5 without kv_disk"):
        LLM(kv_disk_bytes_per_day=5)
    with pytest.raises(ConfigError, match="must be like 'redis://"):
        LLM(kv_remote="localhost")
    with pytest.raises(ConfigError, match=r"the pool is host memory already.*raise num_blocks"):
        LLM(kv_host_bytes=2**30)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"windows": (512,)}, r"sliding windows \(512 tokens\).*set max_model_len to 512"),
        ({"states": (0, 2)}, "carry a state, which is not kept; leave kv_host_bytes, kv_disk"),
    ],
    ids=["windows", "states"],
)
def test_models_whose_prefixes_tiers_cannot_keep_are_refused_before_a_folder_is_made(
    tmp_path: Path, changes: dict[str, Any], reason: str
):
    windows = changes.get("windows", ())
    loaded = SimpleNamespace(
        name="model",
        state_spec=SimpleNamespace(layers=changes.get("states", ())),
    )
    runner: Any = SimpleNamespace(
        kv_stores=[None] * (1 + len(windows)),
        groups=SimpleNamespace(windows=windows),
        loaded=loaded,
    )
    config = EngineConfig(model="model", kv_disk=tmp_path / "kv")
    with pytest.raises(ConfigError, match=reason):
        open_tiers(config, runner, TierListener())
    assert not (tmp_path / "kv").exists()


def engine_prompt(tokens: list[int], salt: str = "") -> Any:
    from ostinato.engine.prompts import parse_prompt

    return parse_prompt({"prompt_token_ids": tokens, "cache_salt": salt})


def host_memory(config: EngineConfig, runner: Any, listener: TierListener) -> OpenTiers:
    """Open host memory as behind a GPU: torch copies the blocks, here of a pool on a CPU."""
    settings = EngineConfig(model="model", device="cuda", kv_host_bytes=2**26)
    opened = open_tiers(settings, runner, listener)
    return replace(opened, copies=DeviceCopies(runner.kv_stores[0]))


def test_host_memory_behind_a_device_has_what_the_pool_evicts(monkeypatch: pytest.MonkeyPatch):
    """Seven conversations of nine blocks fill 64; the first returns from host memory, as it was."""
    monkeypatch.setattr(engine_module, "open_tiers", host_memory)
    llm = LLM(num_blocks=64, attention="torch", kv_disk="unused", keep_event_batches=100)
    events: list[Any] = []
    llm.engine.cache.events.subscribe(lambda batch: events.extend(batch.events))
    texts = [[first, *TEXT] for first in range(9)]
    outputs = []
    for text in texts:
        outputs.append(ask(llm, text, salt="acme"))
        llm.engine.tiers.stores.flush(10)
    llm.engine.tiers.run_idle_work()
    llm.engine.tiers.loads.computing.per_s = 1.0  # no load is too slow
    again = ask(llm, texts[0], salt="acme")
    assert again.cached_tokens_from == {"host": 128}
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert "loaded from the host" in str(llm.explain(again))
    stored = {event.medium for event in events if isinstance(event, BlockStored)}
    assert stored == {"", "CPU"}, "as vLLM names it"

    (receipt,) = llm.erase("acme").tiers
    assert (receipt.tier, receipt.complete) == ("host", True) and receipt.num_extents > 0
    assert ask(llm, texts[0], salt="acme").cached_tokens_from == {}
    tier = llm.engine.tiers.counts.tiers[0]
    assert (tier.tier, tier.where, tier.limit_bytes) == ("host", "memory", 2**26)
    stores, before = llm.engine.tiers.stores, dict(llm.engine.tiers.stores.results)
    llm.close()
    assert stores.results == before, "what ends with the process is not written"


def test_a_disk_is_read_by_the_next_process(tmp_path: Path):
    """The real tier: what the first engine computed, the second reads, to the same answer."""
    settings = {"num_blocks": 64, "kv_disk": tmp_path / "kv", "kv_disk_bytes": 2**26}
    with LLM(**settings) as llm:
        before = ask(llm)
        with pytest.raises(ConfigError, match="kv_disk"):
            LLM(**settings)
    with LLM(**settings) as llm:
        after = ask(llm)
        assert after.cached_tokens_from == {"disk": 128}
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert llm.erase("").tiers[0].num_extents > 0


@pytest.mark.nightly
def test_an_engine_that_is_never_closed_ends_without_a_word(tmp_path: Path):
    program = """
import sys
from ostinato import LLM
llm = LLM(num_blocks=64, max_model_len=256, kv_disk=sys.argv[1])
llm.generate({"prompt_token_ids": list(range(60))}, use_tqdm=False)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "kv")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Error" not in ended.stderr, ended.stderr


def test_two_engines_share_a_prefix_through_a_server(tmp_path: Path):
    """The second computes none of it, and erasing the tenant leaves nothing on the server."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(16)))
    with redis_server(tmp_path) as url:
        settings = {"num_blocks": 64, "kv_remote": url, "kv_sealed": True, "kv_secret_file": secret}
        with LLM(**settings) as one, LLM(**settings) as two:
            before = [ask(one, salt="acme") for _ in range(2)][-1]
            one.engine.tiers.stores.flush(20)
            after = ask(two, salt="acme")
            assert after.cached_tokens_from == {"remote": 128}
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
            assert two.erase("acme").tiers[0].num_extents > 0
            two.engine.tiers.stores.on_clear(everything=True)
            one.erase("acme")
            assert ask(two, salt="acme").num_cached_tokens == 0


def test_a_byte_search_of_pool_files_and_server_finds_nothing_erased(tmp_path: Path):
    """Tokens and each layer's keys and values are found in all three places, then in none."""
    folder, tokens = tmp_path / "kv", array("I", TEXT[:16]).tobytes()
    with redis_server(tmp_path) as url, LLM(num_blocks=64, kv_disk=folder, kv_remote=url) as llm:
        store, stores = llm.engine.runner.kv_stores[0], llm.engine.tiers.stores
        client: Any = valkey.Valkey.from_url(url)

        def places() -> dict[str, bytes]:
            pool = bytearray(64 * store.block_bytes)
            store.export_blocks(range(64), memoryview(pool))
            files = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
            return {
                "pool": bytes(pool),
                "copies": b"".join(
                    bytes(held) for held in vars(stores).values() if isinstance(held, memoryview)
                ),
                "files": files,
                "server": b"".join(client.get(key) for key in client.scan_iter()),
            }

        ask(llm, salt="acme")
        stores.queue_everything()
        stores.flush(20)
        block = bytes(places()["copies"][: store.block_bytes])
        found = {name: (block in held, tokens in held) for name, held in places().items()}
        assert found == {
            "pool": (True, False), "copies": (True, False),
            "files": (True, True), "server": (True, True),
        }  # fmt: skip
        receipts = llm.erase("acme").tiers
        assert [(receipt.tier, receipt.num_extents > 0) for receipt in receipts] == [
            ("disk", True), ("remote", True),
        ]  # fmt: skip
        assert not any(block in held or tokens in held for held in places().values())

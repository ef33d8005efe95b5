"""Tiers of models with windows and with states: a restored hit continues as one in memory.

Tiny checkpoints in blocks of four; windows see 8 tokens, states are kept at multiples of 64.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, OPENAI_24H, RequestOutput, SamplingParams
from ostinato.engine.loop import engine as engine_module
from ostinato.engine.tiers import loads as tier_loads
from ostinato.observe.events import BlockRemoved, BlockStored
from ostinato.tiers.port import LoadFault
from tests.engine.tiers.tiered import engine_prompt, slow_computing
from tests.support.engines import load_once
from tests.support.models.checkpoints import Checkpoints
from tests.support.servers.memory_tier import MemoryTier

WINDOWS = ["gemma3_text", "mistral", "gpt_oss", "starcoder2", "gemma2"]
STATES = ["qwen3_next", "falcon_h1", "bamba", "lfm2", "mamba2"]
PROMPT = [3 + i * i % 311 for i in range(150)]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=3
)
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "block_size": 4,
    "num_blocks": 120, "max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 4,
}  # fmt: skip

Restart = Callable[..., LLM]


def ask(llm: LLM, tokens: list[int] = PROMPT, salt: str = "") -> RequestOutput:
    prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
    return llm.generate(prompt, PARAMS, use_tqdm=False)[0]


def bits(output: RequestOutput) -> list[Any]:
    """Return the answer with all log-probabilities, which differ if one bit of a state does."""
    [answer] = output.outputs
    assert answer.logprobs is not None
    return [[(t, p.logprob) for t, p in sorted(place.items())] for place in answer.logprobs]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def restart(
    checkpoints: Checkpoints, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Restart]:
    """Makes engines one after another, each after the one before has closed; over one tier."""
    monkeypatch.setattr("ostinato.engine.settings.setup.load_model", load_once)
    monkeypatch.setattr(tier_loads, "FIRST_PATIENCE_S", 60.0)  # a busy machine is no slow disk
    made: list[LLM] = []

    def make(family: str, config: dict[str, Any] | None = None, **settings: Any) -> LLM:
        for earlier in made:
            earlier.close()
        if "kv_disk" not in settings:
            settings["kv_disk"] = "unused"
            monkeypatch.setattr(engine_module, "open_tiers", tier.opened)
        path = str(checkpoints.path(family, **(config or {})))
        made.append(LLM(path, **{**SETTINGS, **settings}))
        made[-1].engine.tiers.loads.prices = slow_computing()
        return made[-1]

    yield make
    made[-1].close()


def hit_of(family: str) -> int:
    """Return where the hit of ``PROMPT`` ends: in whole blocks, or at the last state."""
    return 128 if family in STATES else 148


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("gemma3_text", "float64"), ("mistral", "bfloat16"), ("qwen3_next", "float64")]
    + [
        pytest.param(family, dtype, marks=pytest.mark.nightly)
        for family in [*WINDOWS, *STATES]
        for dtype in ("float64", "bfloat16")
    ],
)
def test_a_restored_hit_equals_a_hit_in_memory_to_the_bit(
    family: str, dtype: str, restart: Restart
):
    """And in float64 the answer is that of a miss; torch's attention rounds others differently."""
    llm = restart(family, dtype=dtype)
    miss, hit = ask(llm), ask(llm, PROMPT[: hit_of(family) + 1])
    llm = restart(family, dtype=dtype)
    restored = ask(llm, PROMPT[: hit_of(family) + 1])

    assert restored.cached_tokens_from == {"disk": hit_of(family)}
    assert bits(restored) == bits(hit)
    llm.engine.cache.check()
    again = ask(restart(family, dtype=dtype))
    assert again.cached_tokens_from == {"disk": hit_of(family)}
    if dtype == "float64":
        assert again.outputs[0].token_ids == miss.outputs[0].token_ids


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_prompt_that_was_sent_once_hits_after_a_restart(family: str, restart: Restart):
    """Its answer was longer than the window: that before the prompt's end is kept as well."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    restart(family).generate({"prompt_token_ids": PROMPT}, long, use_tqdm=False)
    assert ask(restart(family)).cached_tokens_from == {"disk": 148}


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
@pytest.mark.parametrize("group", ["full", "sparse"])
def test_one_bad_block_of_any_group_is_computed_again(
    family: str, group: str, restart: Restart, tier: MemoryTier
):
    """Without a window or a state the rest is of no use: nothing of the load is kept."""
    expected = ask(restart(family))
    llm = restart(family)
    is_sparse = {name: namespace.is_sparse for name, namespace in tier.namespaces.items()}
    bad = [digest for digest, sparse in is_sparse.items() if sparse == (group == "sparse")]
    tier.faults.update(dict.fromkeys(bad, LoadFault.CHECKSUM))

    after = ask(llm)

    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.engine.tiers.counts.load_faults == {"checksum": 1}
    llm.engine.cache.check()


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "lfm2"])
def test_a_hit_ends_where_every_group_has_what_it_needs(
    family: str, restart: Restart, tier: MemoryTier
):
    """The last window or state is lost: the hit ends at the end that was stored before."""
    llm = restart(family)
    ask(llm, PROMPT[:81])
    ask(llm, PROMPT[:81])
    llm.engine.tiers.stores.flush(10)
    before = {name for name, namespace in tier.namespaces.items() if namespace.is_sparse}
    expected = ask(llm)
    llm = restart(family)
    for name in [*tier.namespaces]:
        if tier.namespaces[name].is_sparse and name not in before:
            tier.drop(name)

    after = ask(llm)

    assert after.cached_tokens_from == {"disk": 64 if family in STATES else 80}
    assert after.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_an_erased_tenant_leaves_nothing_in_any_group(
    family: str, restart: Restart, tier: MemoryTier
):
    llm = restart(family)
    ask(llm, salt="mine")
    llm = restart(family)
    assert {namespace.is_sparse for namespace in tier.namespaces.values()} == {False, True}
    llm.erase("mine")
    assert not tier.blocks
    assert ask(llm, salt="mine").num_cached_tokens == 0


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_a_load_that_is_cancelled_leaves_nothing(family: str, restart: Restart, tier: MemoryTier):
    ask(restart(family))
    llm = restart(family)
    engine = llm.engine
    tier.gate.clear()
    engine.add(engine.make_request(engine_prompt(PROMPT), PARAMS, "loads"))
    engine.step()
    assert len(engine.tiers.loads) == 1
    engine.cancel("loads")
    tier.gate.set()
    engine.drain_tiers()
    engine.cache.check()
    assert engine.cache.manager.num_live_tables == 0


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_windows_and_states_are_leased_with_their_prefix(
    family: str, restart: Restart, tier: MemoryTier
):
    """A day: in every group, since a prefix without its window is of no use."""
    llm = restart(family)
    ask(llm)
    llm.lease({"prompt_token_ids": PROMPT}, OPENAI_24H)
    llm.engine.tiers.stores.flush(10)
    leased = {tier.namespaces[name].is_sparse for name, end in tier.keep_until.items() if end}
    assert leased == {False, True}


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "lfm2"])
def test_a_real_disk_restores_what_it_sealed(family: str, restart: Restart, tmp_path: Path):
    """Records on a disk, encrypted by tenant, with all groups below one limit."""
    disk: dict[str, Any] = {"kv_disk": tmp_path / "kv", "kv_disk_bytes": 2**24}
    before = ask(restart(family, **disk), salt="mine")
    llm = restart(family, **disk)
    after = ask(llm, salt="mine")
    assert after.cached_tokens_from == {"disk": hit_of(family)}
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    [stats] = llm.engine.tiers.read_stats()
    assert 0 < stats.num_bytes <= stats.limit_bytes


def test_kv_events_tell_which_windows_a_tier_has(restart: Restart):
    """Under the digests and the group of the pool, once a restart loads them; and their erasure."""
    ask(restart("gemma3_text"), salt="acme")
    llm = restart("gemma3_text", keep_event_batches=100)
    assert llm.engine.cache.events is not None
    events: list[Any] = []
    llm.engine.cache.events.subscribe(lambda batch: events.extend(batch.events))
    ask(llm, PROMPT[:149], salt="acme")
    blocks: dict[tuple[str, int], list[bytes]] = {}
    for event in events:
        assert isinstance(event, BlockStored)
        blocks.setdefault((event.medium, event.group), []).extend(event.digests)
    assert [len(blocks["disk", group]) for group in (0, 1)] == [37, 2], "of windows two blocks"
    assert blocks["disk", 0] == blocks["", 0][:37] and set(blocks["disk", 1]) <= {*blocks["", 1]}
    del events[:]
    llm.erase("acme")
    gone = [e for e in events if isinstance(e, BlockRemoved) and (e.medium, e.group) == ("disk", 1)]
    assert {digest for event in gone for digest in event.digests} == set(blocks["disk", 1])


def test_a_window_that_no_prompt_can_reach_is_full_attention(restart: Restart, tier: MemoryTier):
    ask(restart("mistral", max_model_len=256, config={"sliding_window": 256}))
    restart("mistral", max_model_len=256, config={"sliding_window": 256})
    assert {namespace.layer_groups for namespace in tier.namespaces.values()} == {("full",)}


def test_the_longest_prefix_that_a_disk_keeps_counts_each_window_but_twice(restart: Restart):
    """A prompt of 1,000 tokens needs its full attention, and the windows of two ends alone."""
    both, windows = (restart(family).engine.tiers.groups for family in ("gemma3_text", "mistral"))
    [full, window] = both.groups
    per_token = full.copies.block_bytes // full.unit
    num_bytes = 1000 * per_token + 16 * window.copies.block_bytes // window.unit
    assert both.longest_prefix(num_bytes) == 1000
    assert windows.longest_prefix(num_bytes) == float("inf")
    assert both.longest_prefix(num_bytes, num_stored=40) == 1040, "another prefix has the first"
    few = 5 * windows.bytes_per_block - 1
    assert windows.longest_prefix(few // 2) == 8, "less than its windows: all of their tokens count"


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_what_is_written_at_the_end_fills_no_more_than_the_disk(
    family: str, restart: Restart, tier: MemoryTier
):
    """Ten chats, and a disk for few of them: what was used last is written, and is whole."""
    chats = [[number + 3, *PROMPT[:60]] for number in range(10)]
    tier.limit_bytes = 40 * restart(family).engine.tiers.groups.bytes_per_block
    llm = restart(family, num_blocks=400)
    for tokens in chats:
        ask(llm, tokens)
    llm.close()
    num_bytes = sum(map(len, tier.blocks.values()))
    assert tier.limit_bytes // 4 < num_bytes <= tier.limit_bytes
    llm = restart(family)
    assert ask(llm, chats[-1]).cached_tokens_from == {"disk": 60}
    assert ask(llm, chats[0]).num_cached_tokens == 0

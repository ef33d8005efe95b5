"""An engine with real tiers: host memory, a disk and a server, and the settings that open them."""

import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import valkey

from ostinato import LLM
from ostinato.core.errors import ConfigError
from ostinato.engine.loop import engine as engine_module
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.tiers.open_tiers import OpenTiers, open_tiers
from ostinato.observe.events import BlockStored
from ostinato.runner.kv.block_copies import DeviceCopies
from ostinato.tiers.port import TierListener
from tests.engine.tiers.tiered import TEXT, ask, slow_computing
from tests.support.servers.store_servers import redis_server


def test_settings_of_tiers_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match="kv_disk_bytes_per_day=5 without kv_disk"):
        LLM(kv_disk_bytes_per_day=5)
    with pytest.raises(ConfigError, match="must be like 'redis://"):
        LLM(kv_remote="localhost")
    with pytest.raises(ConfigError, match=r"the pool is host memory already.*raise num_blocks"):
        LLM(kv_host_bytes=2**30)


def host_memory(config: EngineConfig, runner: Any, listener: TierListener) -> OpenTiers:
    """Open host memory as behind a GPU: torch copies the blocks, here of a pool on a CPU."""
    settings = EngineConfig(model="model", device="cuda", kv_host_bytes=2**26)
    opened = open_tiers(settings, runner, listener)
    [group] = opened.groups.groups
    by_torch = replace(group, copies=DeviceCopies(runner.kv_stores[0]))
    return replace(opened, groups=replace(opened.groups, groups=(by_torch,)))


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
    llm.engine.tiers.loads.prices = slow_computing()  # no load is too slow
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


def test_closing_keeps_the_most_valuable_part_that_a_small_disk_takes(tmp_path: Path):
    """Twelve conversations of nine blocks, of which the disk takes a part: those used last."""
    texts = [[first, *TEXT] for first in range(12)]
    with LLM(num_blocks=128, kv_disk=tmp_path / "probe") as llm:
        limit = 64 * llm.engine.runner.kv_stores[0].block_bytes
    settings = {"num_blocks": 128, "kv_disk": tmp_path / "kv", "kv_disk_bytes": limit}
    with LLM(**settings) as llm:
        for text in texts:
            ask(llm, text)
    with LLM(**settings) as llm:
        llm.engine.tiers.loads.prices = slow_computing()  # no load is too slow
        found = [ask(llm, text).cached_tokens_from.get("disk", 0) for text in texts]
    assert found[-5:] == [128] * 5 and sum(found) > 0.7 * 64 * 16
    assert found == sorted(found), "the most valuable ones are whole"


def test_a_sequence_longer_than_a_small_disk_is_found_from_its_beginning(tmp_path: Path):
    """What would not fit is not written, so that nothing evicts the root."""
    text = [1 + i * 37 % 61 for i in range(1500)]
    with LLM(num_blocks=128, kv_disk=tmp_path / "probe") as llm:
        limit = 64 * llm.engine.runner.kv_stores[0].block_bytes
    settings = {"num_blocks": 128, "kv_disk": tmp_path / "kv", "kv_disk_bytes": limit}
    with LLM(max_model_len=2048, **settings) as llm:
        for _ in range(2):
            ask(llm, text)
            llm.engine.tiers.stores.flush(10)
    with LLM(max_model_len=2048, **settings) as llm:
        llm.engine.tiers.loads.prices = slow_computing()
        assert ask(llm, text).cached_tokens_from["disk"] >= 0.7 * 64 * 16

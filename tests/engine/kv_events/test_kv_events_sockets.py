"""Sockets of KV events: bound, full, closed; and their settings."""

import gc
import threading
from typing import Any

import pytest
import zmq

from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.engine.loop.kv_events_wire import BatchEncoder
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import KEPT_EVENT_BATCHES
from ostinato.indexes.block_hash import BlockHasher
from ostinato.observe.events import EventBatch
from tests.engine.kv_events.kv_events_consumer import PATIENCE_MS, agree, truth
from tests.engine.kv_events.kv_events_publishing import ANY_PORT, Gate, Listen, Publish, flush, meet
from tests.support.cache.tiny_cache import tiny_cache
from tests.support.engines import MakeLLM
from tests.support.waiting import wait_until

# --- sockets ---


def test_an_endpoint_that_is_taken_is_named(make_llm: MakeLLM):
    """Two engines, one port: the second says which setting to change."""
    llm = make_llm("llama", num_blocks=70, kv_events_endpoint=ANY_PORT)
    assert llm.engine.kv_events is not None
    taken = llm.engine.kv_events.endpoint
    with pytest.raises(ConfigError, match=f"kv_events_endpoint='{taken}' cannot be bound: Addr"):
        make_llm("llama", num_blocks=70, kv_events_endpoint=taken)
    with pytest.raises(ConfigError, match=f"kv_events_replay_endpoint='{taken}' cannot be bound"):
        make_llm(
            "llama",
            num_blocks=70,
            kv_events_endpoint=ANY_PORT,
            kv_events_replay_endpoint=taken,
        )


def _free_again(endpoint: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind(endpoint)
    return True


@pytest.mark.parametrize("how", ["close", "with", "forgotten"])
def test_the_port_is_free_again_when_the_engine_is_gone(how: str, checkpoints: Any, listen: Listen):
    """Also if it is never closed, and while a consumer is connected that never reads."""
    llm: LLM | None = LLM(
        str(checkpoints.path("llama")), num_blocks=70, kv_events_endpoint=ANY_PORT
    )
    assert llm is not None
    publisher = llm.engine.kv_events
    assert publisher is not None
    listen(publisher)
    llm.generate({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=1), use_tqdm=False)
    if how == "close":
        llm.close()
        llm.close()
    elif how == "with":
        with llm:
            pass
    llm = None
    gc.collect()
    wait_until(lambda: not publisher.is_running)
    assert _free_again(publisher.endpoint)


async def test_shutting_an_async_engine_down_closes_its_sockets(checkpoints: Any):
    """What was sent before it still arrives."""
    llm = AsyncLLM(
        str(checkpoints.path("llama")),
        num_blocks=70,
        kv_events_endpoint=ANY_PORT,
        kv_events_replay_endpoint=ANY_PORT,
    )
    publisher = llm.engine.kv_events
    assert publisher is not None

    async with llm:
        prompt = {"prompt_token_ids": [5] * 40}
        async for _ in llm.generate(prompt, SamplingParams(max_tokens=2)):
            pass
    assert not publisher.is_running
    assert _free_again(publisher.endpoint)
    assert _free_again(publisher.replay_endpoint or "")


def test_whatever_was_told_before_closing_arrives(publish: Publish, listen: Listen):
    """The queue is sent before the sockets go."""
    cache, gate = tiny_cache(32, keep_event_batches=100), Gate()
    publisher = publish(cache.prefix_cache, gate)
    consumer = listen(publisher)
    meet(consumer, cache.prefix_cache)
    gate.open.clear()
    for letter in "ABCDE":
        cache.serve(letter * 8)
    closer = threading.Thread(target=publisher.close)
    closer.start()
    gate.open.set()
    closer.join(PATIENCE_MS / 1000)
    assert not closer.is_alive()
    consumer.listen_until(flush(cache.prefix_cache))
    agree(consumer, cache.prefix_cache)
    cache.serve("after that, the cache goes on without events")


def test_a_fault_of_the_publisher_ends_events_and_nothing_else(
    publish: Publish, caplog: pytest.LogCaptureFixture
):
    """The engine must not hang or fall over them, and erasing must not wait for ever."""

    class Broken(BatchEncoder):
        def encode(self, batch: EventBatch) -> bytes:
            raise RuntimeError("cannot write")

    cache = tiny_cache(32, keep_event_batches=100)
    publisher = publish(cache.prefix_cache, Broken("CPU"))
    cache.serve("ABCDEFGH", tenant=b"x")
    wait_until(lambda: not publisher.is_running)
    cache.serve("IJKLMNOP", tenant=b"x")
    assert cache.prefix_cache.admin.erase(b"x").num_blocks == 4
    publisher.close()
    assert "KV events ended; the engine continues without them" in caplog.text


# --- settings ---


def test_batches_are_kept_if_they_are_published_and_nothing_else_is_said():
    assert EngineConfig().num_kept_event_batches == 0
    assert EngineConfig(kv_events_endpoint=ANY_PORT).num_kept_event_batches == KEPT_EVENT_BATCHES
    config = EngineConfig(kv_events_endpoint=ANY_PORT, keep_event_batches=7)
    assert config.cache(num_blocks=8).keep_event_batches == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events_endpoint": 5557}, "kv_events_endpoint=5557: must be text"),
        ({"kv_events_endpoint": "localhost:5557"}, "kv_events_endpoint='localhost:5557': must be"),
        ({"kv_events_replay_endpoint": ANY_PORT}, "without kv_events_endpoint"),
        ({"kv_events_topic": "kv"}, "kv_events_topic='kv' without kv_events_endpoint"),
        ({"kv_events_endpoint": ANY_PORT, "kv_events_topic": b"kv"}, "must be text"),
        ({"kv_events_endpoint": ANY_PORT, "keep_event_batches": 0}, "keep_event_batches=0, which"),
        ({"kv_events_endpoint": ANY_PORT, "keep_event_batches": -1}, "keep_event_batches=-1: must"),
        ({"kv_events_endpoint": ANY_PORT, "enable_prefix_caching": False}, "nothing is cached"),
        (
            {"kv_events_endpoint": "ipc://x", "kv_events_replay_endpoint": "ipc://x"},
            "each socket needs its own address",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_without_events_nothing_is_sent_or_counted(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
):
    """The plain path: no log, no thread, no socket, and no digest is computed."""
    monkeypatch.setattr(BlockHasher, "digests", lambda *_: pytest.fail("a digest"))
    llm = make_llm("llama", num_blocks=70)
    llm.generate({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=9), use_tqdm=False)
    assert llm.engine.kv_events is None and llm.engine.cache.events is None
    assert "ostinato-kv-events" not in {thread.name for thread in threading.enumerate()}
    assert truth(llm.engine.cache), "there were blocks to tell of"

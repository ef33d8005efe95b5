"""Real consumers over real sockets: what they know from the stream alone is what is cached."""

import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zmq

from ostinato import SamplingParams
from ostinato.core.identity import ImageSpan
from ostinato.engine.loop.kv_events_publisher import KVEventsPublisher
from ostinato.engine.loop.kv_events_wire import BatchEncoder
from ostinato.engine.requests.prompts import Prompt
from ostinato.settings import IndexName, WindowConfig
from ostinato.tenants.terms import PINNED
from tests.engine.kv_events.kv_events_consumer import PATIENCE_MS, agree
from tests.engine.kv_events.kv_events_publishing import ANY_PORT, Gate, Listen, Publish, flush, meet
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.fake_runner import toss_a_coin
from tests.support.cache.tiny_cache import tiny_cache
from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler
from tests.support.engines import MakeLLM
from tests.support.waiting import wait_until

WINDOWS = (WindowConfig(5, 12), WindowConfig(3, 9))


def random_prompt(chance: random.Random, length: int) -> tuple[str, tuple[ImageSpan, ...]]:
    """Letters A and B, and sometimes one of two images among them, written as dots."""
    text = "".join(chance.choices("AB", k=length))
    if length < 4 or chance.random() < 0.7:
        return text, ()
    start = chance.randrange(length - 2)
    image = ImageSpan(chance.choice([b"cat", b"dog"]), start, 2)
    return f"{text[:start]}..{text[start + 2 :]}", (image,)


def disturb(tiny: TinyScheduler, chance: random.Random, number: int) -> None:
    """Let one thing happen: a request, a failure, a cancellation, a reset, an update, a lease."""
    event, admin = chance.random(), tiny.cache.admin
    if event < 0.5:
        prompt, images = random_prompt(chance, chance.randint(1, 16))
        tiny.add(
            str(number),
            prompt,
            tenant=chance.choice(["", "", "x"]),
            images=images,
            cache_write=chance.random() < 0.9,
            max_tokens=chance.randint(1, 8),
            n=chance.choice([1, 1, 2]),
        )
    elif event < 0.6:
        tiny.failing_step()
    elif event < 0.63:
        tiny.preempt_all()
    elif event < 0.65:
        tiny.reset()
    elif event < 0.7:
        key = prefix_key("".join(chance.choices("AB", k=8)))
        lease = admin.lease(key, PINNED)
        if lease.lease_id is not None and chance.random() < 0.8:
            admin.end_lease(lease.lease_id)
    elif event < 0.75 and str(number - 1) not in tiny.reasons:
        tiny.cancel(str(number - 1))
    tiny.step()


def random_traffic(index: IndexName, seed: int, **settings: Any) -> TinyScheduler:
    """A scheduler whose cache is too small for its traffic, in blocks of two."""
    settings = {"keep_event_batches": 10_000, "sample": toss_a_coin, **settings}
    return tiny_scheduler(18, 2, budget=12, index=index, max_model_len=30, **settings)


# --- exactly what is cached ---


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["full", "windows"])
def test_who_listens_from_the_start_knows_exactly_what_is_cached(
    index: IndexName, windows: tuple[WindowConfig, ...], publish: Publish, listen: Listen
):
    """Hits, forks, evictions, preemptions, failures, resets and leases; nothing was replayed."""
    met: Counter[str] = Counter()
    for seed in range(6):
        tiny, chance = random_traffic(index, seed, windows=windows), random.Random(seed)
        consumer = listen(publish(tiny.cache))
        meet(consumer, tiny.cache)
        for number in range(60):
            disturb(tiny, chance, number)
            consumer.listen_until(flush(tiny.cache))
            agree(consumer, tiny.cache)
        tiny.run()
        consumer.listen_until(flush(tiny.cache))
        agree(consumer, tiny.cache)
        assert (consumer.num_replayed, consumer.num_starts) == (0, 0)
        if not windows:  # a snapshot tells of full attention alone
            snapshot = tiny.cache.snapshot()
            consumer.restore(snapshot.sequence, BatchEncoder("CPU").encode(snapshot))
            assert consumer.next == tiny.cache.events.next_sequence
            agree(consumer, tiny.cache)
        met["evictions"] += tiny.cache.stats.evicted_blocks
        met["preemptions"] += tiny.scheduler.stats.num_preemptions
        met["hits"] += tiny.cache.stats.first.shared_tokens
        met["blocks"] += len(consumer.blocks)
        met["forks"] += sum("/" in name for name in tiny.outputs)
        met["failures"] += list(tiny.reasons.values()).count("error")
    for what in ("evictions", "preemptions", "hits", "blocks", "forks", "failures"):
        assert met[what] > 0, f"the traffic was too tame: no {what}"


def test_who_joins_late_catches_up_by_replay(index: IndexName, publish: Publish, listen: Listen):
    """From batch 0 on, as long as all of them are kept."""
    tiny, chance = random_traffic(index, 1, windows=WINDOWS), random.Random(1)
    publisher = publish(tiny.cache)
    for number in range(60):
        disturb(tiny, chance, number)
    late = listen(publisher)
    assert late.catch_up()
    assert late.next == late.num_replayed
    flush(tiny.cache)
    late.catch_up()
    agree(late, tiny.cache)


@pytest.mark.parametrize("digest", ["sha256", "xxh3_128"])
def test_blocks_have_one_name_whatever_the_index_looks_them_up_by(
    index: IndexName, digest: Any, publish: Publish, listen: Listen
):
    """A digest that is random in each process would mean nothing to anybody else."""
    tiny = random_traffic(index, 2, digest=digest)
    consumer, chance = listen(publish(tiny.cache)), random.Random(2)
    for number in range(60):
        disturb(tiny, chance, number)
    tiny.serve("last", "ABBABAAB")
    flush(tiny.cache)
    consumer.catch_up()
    agree(consumer, tiny.cache)
    assert tiny.cache.stats.evicted_blocks and consumer.blocks


def test_a_whole_engine_is_known_from_outside(index: IndexName, make_llm: MakeLLM, listen: Listen):
    """A model with windows, through `LLM` and its settings; a step of it raises."""
    llm = make_llm(
        "gemma3_text",
        index=index,
        num_blocks=40,
        max_model_len=60,
        kv_events_endpoint=ANY_PORT,
        kv_events_replay_endpoint=ANY_PORT,
        kv_events_topic="worker-1",
    )
    engine = llm.engine
    assert engine.kv_events is not None
    consumer, chance = listen(engine.kv_events), random.Random(0)
    meet(consumer, engine.cache)
    execute = engine.runner.execute

    def fail_at_times(plan: Any) -> Any:
        if chance.random() < 0.1:
            raise RuntimeError("out of luck")
        return execute(plan)

    engine.runner.execute = fail_at_times
    common = [chance.randrange(3, 300) for _ in range(24)]
    prompts = [[*common[: 4 * i], *(chance.randrange(3, 300) for _ in range(9))] for i in range(6)]
    for prompt in prompts * 2:
        made = engine.make_request(
            Prompt(token_ids=prompt), SamplingParams(max_tokens=12, n=chance.choice([1, 2]), seed=1)
        )
        engine.add(made)
        engine.step()
    while engine.has_work:
        engine.step()
    consumer.listen_until(flush(engine.cache))
    agree(consumer, engine.cache)
    assert {group for _, group in consumer.blocks} == {0, 1}
    assert consumer.num_replayed == 0
    assert engine.cache.stats.evicted_blocks, "nothing was ever taken back"
    engine.close()


# --- gaps ---


def test_an_overflowing_queue_drops_batches_and_the_engine_goes_on(
    publish: Publish, listen: Listen
):
    """Two of ten are queued, eight dropped; the next one shows the gap, and it is replayed."""
    cache, gate = tiny_cache(32, keep_event_batches=100), Gate()
    publisher = publish(cache.prefix_cache, gate, max_queued=2)
    consumer = listen(publisher)
    meet(consumer, cache.prefix_cache)
    publisher.wait_until_sent()
    before = consumer.next
    gate.open.clear()
    for letter in "ABCDEFGHIJ":
        cache.serve(letter * 8)
    assert publisher.num_dropped == 8
    gate.open.set()
    consumer.listen_until(before + 2)
    assert consumer.num_replayed == 0
    publisher.wait_until_sent()
    cache.serve("KKKKKKKK")
    consumer.listen_until(before + 11)
    assert consumer.num_replayed == 9, "eight that were dropped, and the one that told"
    agree(consumer, cache.prefix_cache)


def test_a_gap_that_is_kept_no_more_makes_the_consumer_start_over(publish: Publish, listen: Listen):
    """The replay's end comes first, and nothing else: it must not go on with a hole."""
    cache = tiny_cache(32, keep_event_batches=3)
    consumer = listen(publish(cache.prefix_cache))
    meet(consumer, cache.prefix_cache)
    for letter in "ABCDE":
        cache.serve(letter * 8)
    oldest = flush(cache.prefix_cache) - 3
    assert consumer.ask(oldest - 1) == []
    assert [number for number, _ in consumer.ask(oldest)] == [oldest, oldest + 1, oldest + 2]
    assert consumer.ask(oldest + 3) == [], "nothing has happened since"


def test_who_started_over_is_exact_again_when_the_cache_is_cleared(
    publish: Publish, listen: Listen
):
    """A clearing needs no memory of what was there."""
    cache = tiny_cache(32, keep_event_batches=2)
    publisher = publish(cache.prefix_cache)
    for letter in "ABCDE":
        cache.serve(letter * 8)
    publisher.wait_until_sent()
    late = listen(publisher)
    while not late.poll(wait_ms=20):
        cache.serve(letter * 4)  # a hit: tells nothing
        cache.prefix_cache.admin.reset()
    assert late.num_starts == 1
    cache.serve("ABCDEFGH")
    late.listen_until(flush(cache.prefix_cache))
    agree(late, cache.prefix_cache)
    assert len(late.blocks) == 2


def test_a_request_that_is_no_request_is_ignored(
    publish: Publish, listen: Listen, caplog: pytest.LogCaptureFixture
):
    """Whatever comes in on a socket, the thread goes on."""
    cache = tiny_cache(8, keep_event_batches=10)
    publisher = publish(cache.prefix_cache)
    cache.serve("ABCDEFGH")
    with zmq.Context() as context, context.socket(zmq.DEALER) as rude:
        rude.connect(publisher.replay_endpoint or "")
        for frames in (
            [b"hello"],
            [b"", b"1"],
            [b"", struct.pack(">Q", 0), b"?"],
            [b"x", b"y" * 8],
        ):
            rude.send_multipart(frames)
        rude.send_multipart([b"", struct.pack(">Q", 2**64 - 1)])
        assert rude.poll(PATIENCE_MS)
        assert rude.recv_multipart() == [b"", b"\xff" * 8, b""], "the end, at once"
    assert len(listen(publisher).ask(0)) == 1
    assert [record.message[:35] for record in caplog.records].count(
        "a request for a replay of KV events"
    ) == 4


def num_connections(endpoint: str) -> int:
    """Count the consumers that an endpoint is connected to, by the kernel's own table."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established, close_wait = "01", "08"
    return sum(r[1].endswith(port) and r[3] in (established, close_wait) for r in rows)


def leave_in_the_middle(publisher: KVEventsPublisher, gate: Gate) -> None:
    """Ask for everything and go; ZeroMQ notices before the replay goes on."""
    gate.open.clear()
    gate.reached.clear()
    endpoint = publisher.replay_endpoint or ""
    before = num_connections(endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as leaver:
        leaver.connect(endpoint)
        leaver.send_multipart([b"", bytes(8)])
        assert gate.reached.wait(PATIENCE_MS / 1000)
    wait_until(lambda: num_connections(endpoint) <= before)
    gate.open.set()


def test_a_consumer_that_leaves_in_the_middle_of_its_replay_hurts_no_other(
    publish: Publish, listen: Listen, caplog: pytest.LogCaptureFixture
):
    """The rest of its replay is given up, and said so; the next one is answered."""
    cache, gate = tiny_cache(32, keep_event_batches=100), Gate()
    publisher = publish(cache.prefix_cache, gate)
    for letter in "ABCDE":
        cache.serve(letter * 8)
    publisher.wait_until_sent()
    for _ in range(8):  # it looks for leavers once in a millisecond
        leave_in_the_middle(publisher, gate)
        assert len(listen(publisher).ask(0)) == 5
        if caplog.text:
            break
    assert "a replay of KV events from 0 was given up" in caplog.text


# --- routing ---


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["full", "windows"])
def test_a_router_finds_the_worker_with_the_longest_prefix(
    index: IndexName, windows: tuple[WindowConfig, ...], publish: Publish, listen: Listen
):
    """With nothing but the stream of each worker and a `BlockHasher`; also per tenant."""
    workers = [random_traffic(index, seed, windows=windows) for seed in range(3)]
    chance = random.Random(9)
    for worker in workers:
        for number in range(40):
            (prompt, images), tenant = random_prompt(chance, 12), chance.choice(["", "x"])
            worker.add(str(number), prompt, images=images, tenant=tenant, max_tokens=2)
            worker.step()
        worker.run()
        flush(worker.cache)
    views = [listen(publish(worker.cache)) for worker in workers]
    for view in views:
        view.catch_up()
    sizes, found = tuple(window.window for window in windows), set()
    for _ in range(200):
        prompt, images = random_prompt(chance, chance.randint(1, 24))
        key = prefix_key(prompt, images, tenant=chance.choice([b"", b"x"]))
        told = [view.longest_prefix(key, 2, sizes) for view in views]
        real = [len(worker.cache.manager.match(key.copy()).blocks) for worker in workers]
        assert told == real
        found.add(tuple(real))
    assert len(found) > 5, "the workers hardly differ"

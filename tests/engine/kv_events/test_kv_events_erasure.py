"""Erasing a tenant, as consumers of KV events see it."""

import threading

import pytest

from ostinato.errors import CacheInUse
from ostinato.indexes.block_hash import BlockHasher, sha256
from ostinato.settings import IndexName
from tests.engine.kv_events.kv_events_consumer import PATIENCE_MS, agree
from tests.engine.kv_events.kv_events_publishing import Gate, Listen, Publish, flush, meet
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache


def test_erasing_a_tenant_leaves_none_of_its_events_anywhere(
    index: IndexName, publish: Publish, listen: Listen
):
    """Nor its salt on any wire, ever; who listened before is told to forget."""
    cache = tiny_cache(32, index=index, keep_event_batches=100)
    publisher = publish(cache.prefix_cache)
    witness = listen(publisher)
    meet(witness, cache.prefix_cache)
    cache.serve("ABCDEFGH")
    cache.serve("SECRETSECRET", tenant=b"salt-of-x")
    witness.listen_until(flush(cache.prefix_cache))
    of_tenant = [d for (d, _), block in witness.blocks.items() if block.tokens[0] != ord("A")]
    of_tenant = [d for d in of_tenant if bytes(d) not in _digests(cache, "ABCDEFGH")]
    assert len(of_tenant) == 3
    cache.prefix_cache.admin.erase(b"salt-of-x")
    assert not publisher.num_queued

    witness.listen_until(flush(cache.prefix_cache))
    agree(witness, cache.prefix_cache)
    late = listen(publisher)
    late.catch_up()
    agree(late, cache.prefix_cache)
    assert late.next == witness.next, "numbers have no gaps"
    told = b"".join(late.payloads)
    assert not any(digest in told for digest in of_tenant)
    assert bytes(map(ord, "SECR")) not in told
    assert b"salt-of-x" not in told + b"".join(witness.payloads)


def _digests(cache: TinyCache, prompt: str) -> list[bytes]:
    return list(BlockHasher(4, sha256).digests(prefix_key(prompt), len(prompt) // 4))


def test_who_missed_an_erasure_starts_over(publish: Publish, listen: Listen):
    """The removals are gone with the rest: a replay of the gap would leave the tenant's blocks."""
    cache = tiny_cache(32, keep_event_batches=100)
    publisher = publish(cache.prefix_cache)
    consumer = listen(publisher)
    cache.serve("ABCDEFGH")
    cache.serve("SECRETSECRET", tenant=b"x")
    flush(cache.prefix_cache)
    consumer.catch_up()
    assert len(consumer.blocks) == 5
    cache.prefix_cache.admin.erase(b"x")
    end = flush(cache.prefix_cache)
    assert consumer.ask(consumer.next) == []
    consumer.start_over(end)
    agree(consumer, cache.prefix_cache)
    assert len(consumer.blocks) == 2


def test_erasing_waits_until_the_queue_is_empty(publish: Publish, listen: Listen):
    """What the thread still holds is the tenant's as well."""
    cache, gate = tiny_cache(32, keep_event_batches=100), Gate()
    publisher = publish(cache.prefix_cache, gate)
    gate.open.clear()
    cache.serve("SECRETSECRET", tenant=b"x")
    eraser = threading.Thread(target=cache.prefix_cache.admin.erase, args=(b"x",))
    eraser.start()
    eraser.join(0.1)
    assert eraser.is_alive(), "it did not wait"
    gate.open.set()
    eraser.join(PATIENCE_MS / 1000)
    assert not eraser.is_alive() and not publisher.num_queued


def test_a_tenant_that_runs_is_not_erased_and_no_event_says_so(publish: Publish, listen: Listen):
    cache = tiny_cache(32, keep_event_batches=100)
    consumer = listen(publish(cache.prefix_cache))
    cache.admit("runs", "ABCDEFGH", tenant=b"x")
    with pytest.raises(CacheInUse):
        cache.prefix_cache.admin.erase(b"x")
    consumer.catch_up()
    agree(consumer, cache.prefix_cache)
    assert len(consumer.blocks) == 2

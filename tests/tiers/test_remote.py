"""The remote tier: a real server, one that is slow, one that lies, and two engines that share."""

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import valkey

from ostinato.core.errors import ConfigError
from ostinato.testing import conformance
from ostinato.testing.conformance_medium import (
    NAMESPACE,
    assert_nowhere,
    conversation,
    get,
    payload,
    put,
)
from ostinato.tiers.byte_store import StoreError
from ostinato.tiers.port import LoadFault, StoreResult, TierListener
from ostinato.tiers.remote import RemoteOptions, RemoteTier
from ostinato.tiers.remote.address import open_remote, open_store
from ostinato.tiers.remote.breaker import CallThreads, CircuitBreaker
from ostinato.tiers.remote.search import RemoteExtent
from ostinato.tiers.remote.valkey_store import ValkeyStore
from tests.support.servers.store_servers import redis_server
from tests.tiers.media import SECRET, RealServer, Server, ServerInMemory


@pytest.fixture(scope="module")
def running_server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def server(running_server):
    """Empty the server, so that no test sees another's values."""
    client: Any = valkey.Valkey.from_url(running_server)
    client.flushall()
    return running_server


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_real_server_passes(check, server):
    check(RealServer(server))


def test_a_storm_on_a_real_server_brings_no_wrong_byte(server):
    assert conformance.storm(RealServer(server), num_faults=30).num_blocks > 100


def test_two_engines_share_a_prefix_and_only_until_its_tenant_is_erased(server):
    """Both derive the tenant's key from one secret. The server's dump shows nothing."""
    options = RemoteOptions(sealed=True, secret=SECRET, timeout_s=20)
    one, two = (RemoteTier(ValkeyStore(server, 20), options) for _ in range(2))
    other = RemoteTier(ValkeyStore(server, 20), RemoteOptions(sealed=True, secret=bytes(32)))
    prefix = conversation(1, tenant=b"acme")
    put(one, prefix)
    assert (get(two, prefix), get(other, prefix)) == (8, 0)
    assert_nowhere(prefix, Server(ValkeyStore(server, 20)).values().values())

    assert two.erase(b"acme")[0].num_keys == 1
    assert get(one, prefix) == 0
    client: Any = valkey.Valkey.from_url(server)
    client.save()
    assert_nowhere(prefix, [Path(client.config_get("dir")["dir"], "dump.rdb").read_bytes()])
    put(one, prefix)
    assert get(two, prefix) == 8
    for tier in (one, two, other):
        tier.close()


@pytest.mark.parametrize("url", ["ftp://host", "host:6379"])
def test_an_address_of_another_kind_is_refused_with_those_that_are_taken(url):
    with pytest.raises(ConfigError, match=r"kv_remote begins with .*redis.*s3"):
        open_store(url)


def test_a_tier_of_another_package_is_made_by_its_function():
    """It gets the settings, and whom to tell; what cannot be imported is refused by name."""
    options, listener = RemoteOptions(), TierListener()
    tier = open_remote(f"python://{__name__}/make_tier", options, listener)
    assert put(tier, conversation(1)) == [StoreResult.STORED] * 2
    for url in ("python://no_such_module/make", f"python://{__name__}/no_such_name", "python://"):
        with pytest.raises(ConfigError, match=r"python://MODULE/FACTORY"):
            open_remote(url, options, listener)


def make_tier(options: RemoteOptions, listener: TierListener) -> RemoteTier:
    return RemoteTier(ServerInMemory(), options, listener)


DAY_S = 86_400.0
YEAR_2100_S = 4_102_444_800.0


def test_values_end_by_themselves_and_leases_keep_them(server):
    medium = RealServer(server)
    tier = RemoteTier(medium.store, RemoteOptions(ttl_s=DAY_S, timeout_s=20))
    put(tier, conversation(1))
    put(tier, conversation(2))
    assert tier.lease(conversation(2), YEAR_2100_S) == 32
    left = sorted(medium.client.ttl(key) for key in medium.store.keys("ostinato/"))
    assert len(left) == 4 and 0 < left[0] <= DAY_S < left[-1], (
        "a day, and until 2100 for the leased"
    )


def test_a_server_that_hangs_costs_a_deadline_and_is_then_left_alone(caplog):
    """Nothing waits for an answer: the test would hang if a call did."""
    store, answered = ServerInMemory(), threading.Event()
    store.abort = answered.set
    tier = RemoteTier(store, RemoteOptions(timeout_s=0.01))
    put(tier, conversation(1))
    ref = tier.look_up(conversation(1), 0)[0]

    def hang(*args):
        answered.wait()
        raise StoreError("connection closed")

    store.get = store.starts = hang
    into = memoryview(bytearray(4 * NAMESPACE.block_bytes))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            answered.clear()
            fault = tier.load(ref, into, 4, time.monotonic() + 0.01).fault
            assert fault in (LoadFault.DEADLINE, LoadFault.IO)
    assert len(caplog.records) == 1 and "is off for now" in caplog.text
    assert tier.load(ref, into, 4, time.monotonic() + 60).fault is LoadFault.OFF
    assert tier.look_up(conversation(1), 0) == []
    assert put(tier, conversation(2)) == [StoreResult.OFF] * 2
    assert tier.stats()[0].state == "off"


def test_a_server_that_takes_no_writes_is_read_only_with_one_warning(server, caplog):
    """What it has is loaded, and it is not asked to write again for a while."""
    medium = RealServer(server)
    tier = medium.open()
    put(tier, conversation(1))
    medium.fail_writes(0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert put(tier, conversation(2)) == [StoreResult.READ_ONLY] * 2
    assert len(caplog.records) == 1 and "takes no writes for now: " in caplog.text
    [stats] = tier.stats()
    assert stats.state == "read-only" and "maxmemory" in stats.reason
    assert get(tier, conversation(1)) == 8
    medium.fail_writes(None)


def test_a_value_of_another_type_is_a_miss_and_nothing_more(server):
    """A server that answers one key with an error has the others all the same."""
    medium = RealServer(server)
    tier = medium.open()
    put(tier, conversation(1))
    [found] = [ref.locator for ref in tier.look_up(conversation(1), 16)]
    assert isinstance(found, RemoteExtent)
    medium.client.delete(found.place)
    medium.client.lpush(found.place, b"x")
    assert [get(tier, conversation(1)) for _ in range(4)] == [4] * 4


def test_a_breaker_tries_again_after_a_time_that_doubles():
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert not breaker.allows()
    now[0] = 1.5
    assert breaker.allows() and not breaker.allows(), "one call tries"
    breaker.failed()
    now[0] = 3.0
    assert not breaker.allows()
    now[0] = 4.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()


def test_a_call_that_waits_while_the_tier_closes_fails_as_any_other():
    """It is in the queue behind one that hangs, and raises nothing that callers do not know."""
    answered, failed = threading.Event(), list[Exception]()
    threads = CallThreads(1, answered.set)

    def call() -> None:
        try:
            threads.call(answered.wait, 60)
        except Exception as error:
            failed.append(error)

    waiting = [threading.Thread(target=call) for _ in range(3)]
    for thread in waiting:
        thread.start()
    threads.close()
    for thread in waiting:
        thread.join()
    assert all(type(error) is StoreError for error in failed)


def test_a_server_that_answers_with_another_record_is_not_believed():
    """Every key of one tenant has the value of another conversation, headers intact."""
    store = ServerInMemory()
    tier = RemoteTier(store)
    for number in range(4):
        put(tier, conversation(number))
    places = sorted(store.values)
    store.values = dict(
        zip(places, [store.values[x] for x in places[1:] + places[:1]], strict=True)
    )
    assert sum(get(tier, conversation(number)) for number in range(4)) == 0


def test_bytes_on_their_way_are_bounded():
    tier = RemoteTier(ServerInMemory(), RemoteOptions(max_in_flight_bytes=600))
    prefix = conversation(1)
    small, large = prefix.extent(0, 1), prefix.extent(0, 8)
    assert tier.store([(large, payload(prefix, 0, 8))]) == [StoreResult.BUSY]
    assert tier.store([(small, payload(prefix, 0, 1))]) == [StoreResult.STORED]


def test_an_address_that_is_none_is_refused_by_name():
    with pytest.raises(ConfigError, match="kv_remote='ftp://host'"):
        ValkeyStore("ftp://host", 1)
    with pytest.raises(ConfigError, match="sealing needs 16 random bytes"):
        RemoteTier(ServerInMemory(), RemoteOptions(sealed=True))


def test_a_server_that_is_not_there_is_a_miss():
    tier = RemoteTier(ValkeyStore("redis://127.0.0.1:1", 1), RemoteOptions(timeout_s=5))
    assert put(tier, conversation(1)) == [StoreResult.IO] * 2
    assert tier.look_up(conversation(1), 0) == []
    assert not tier.erase(b"")[0].complete
    tier.close()


def test_a_call_that_is_aborted_fails_as_any_other(tmp_path):
    """The server takes a command and never answers; its connection is closed under the client."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(str(path))
        listener.listen()
        store = ValkeyStore(f"unix://{path}", 60)
        answer = threads.submit(store.get, "key", 0, 1)
        with listener.accept()[0] as connection:
            connection.recv(1)
            store.abort()
            with pytest.raises(StoreError):
                answer.result()


def test_whatever_a_client_raises_on_a_closed_connection_opens_the_breaker(monkeypatch, caplog):
    """Of a server that hangs, each call ends with an error of the client's parser."""
    store = ValkeyStore("redis://127.0.0.1:1", 1)
    tier = RemoteTier(store, RemoteOptions(timeout_s=20))

    def fail(*args, **options):
        raise ValueError("I/O operation on closed file.")

    monkeypatch.setattr(valkey.client.Pipeline, "execute", fail)
    for _ in range(4):
        assert tier.look_up(conversation(1), 0) == []
    assert tier.stats()[0].state == "off"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is off for now: I/O operation on closed file." in caplog.text
    tier.close()


def test_a_damaged_key_on_a_server_is_told_when_it_is_replaced(caplog):
    store, options = ServerInMemory(), RemoteOptions(sealed=True, secret=SECRET)
    put(RemoteTier(store, options), conversation(1))
    [place] = store.keys("ostinato/1/keys/")
    store.values[place] = b"damaged"
    tier = RemoteTier(store, options)
    assert get(tier, conversation(1)) == 0 and put(tier, conversation(1))
    assert get(tier, conversation(1)) == 8
    assert caplog.text.count("its sealed records are lost") == 1


def test_an_erasure_on_a_server_reads_no_record_of_others(monkeypatch):
    """Also of what only continues a public prefix, or was stored with a client's own salt."""
    store = ServerInMemory()
    tier = RemoteTier(store)
    for number in range(20):
        put(tier, conversation(number, tenant=b"other %d" % number))
    others = {*store.values}
    mine = [conversation(90, tenant=b"a"), conversation(91, tenant=b"a\x1fclient")]
    mine.append(replace(conversation(92, tenant=b"other 1"), public_prefix=b"a"))
    for prefix in mine:
        put(tier, prefix)
    listed, read, starts = list[str](), list[str](), store.starts

    def note(keys, size):
        read.extend(keys)
        return starts(keys, size)

    def keys(prefix):
        listed.append(prefix)
        return iter([key for key in store.values if key.startswith(prefix)])

    store.starts, store.keys = note, keys
    [receipt] = tier.erase(b"a")
    assert receipt.num_extents == 6 and {*store.values} == others
    assert not others.intersection(read) and len(read) == 6
    assert all(len(prefix) > len("ostinato/1/kv/") for prefix in listed)

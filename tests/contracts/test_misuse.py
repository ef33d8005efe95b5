"""Calls in a wrong order are refused with a typed error, and change nothing."""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ostinato.cache.observer import CacheObserver
from ostinato.core.errors import (
    CacheMisuse,
    ConfigError,
    EmptyPrompt,
    InvalidIdentity,
    PromptTooLong,
    ReleasedTable,
    StaleMatch,
    StepInProgress,
    TableOverrun,
    WrongThread,
)
from ostinato.core.identity import Identity
from ostinato.errors import CacheInUse
from ostinato.settings import StateConfig, TenantShare, WindowConfig
from ostinato.tenants.terms import PINNED
from tests.support.cache.cache_views import prefix_key, windows_of
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.cache.whole_state import whole_state

LAYERS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "windows": {"windows": (WindowConfig(5, 8),)},
    "states": {"states": StateConfig(8, unit=4)},
}

FINDABLE_AT_ONCE = pytest.mark.parametrize("layers", ["full attention", "windows"], indirect=True)
"""A state is findable after its step, and not within a block."""


@pytest.fixture(params=LAYERS)
def layers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return settings of a cache of each kind of layers."""
    return LAYERS[request.param]


@pytest.fixture
def cache(index, layers) -> TinyCache:
    """Return an empty cache of eight blocks of four tokens, with each index and kind of layers."""
    return tiny_cache(8, index=index, **layers)


def refused(cache: TinyCache, error: type[Exception], call, match: str | None = None) -> None:
    """A call raises, and neither the cache nor its counters have changed."""
    before, published = whole_state(cache.manager), cache.prefix_cache.stats.published_blocks
    with pytest.raises(error, match=match):
        call()
    assert whole_state(cache.manager) == before
    assert cache.prefix_cache.stats.published_blocks == published
    cache.prefix_cache.check()


# --- tables ---------------------------------------------------------------------------------


def test_a_table_is_released_once(cache):
    table = cache.admit("one", "ABCDEFGH").table
    cache.finish("one")
    for call in (
        lambda: cache.manager.release(table, 8),
        lambda: cache.manager.grow(table, 12),
        lambda: cache.manager.growable(table, 12),
        lambda: cache.manager.publish(table, 8),
        lambda: cache.manager.fork(table),
        lambda: cache.manager.unpin(table),
    ):
        refused(cache, ReleasedTable, call)
    assert cache.admit("two", "QRSTUVWXYZabcdefghijklmnopqrstuv") is not None, "all 8 blocks"


def test_no_more_is_released_than_was_planned(cache):
    """A partial block would be found that nothing has computed (law 5)."""
    key = prefix_key("ABC")
    admitted = cache.manager.admit(key, cache.manager.match(key))
    assert admitted is not None
    refused(cache, TableOverrun, lambda: cache.manager.release(admitted[0], 3), "release 3 tokens")
    cache.manager.commit()  # a state is loaded in the step
    cache.manager.release(admitted[0], 0)
    assert cache.match("ABCD").num_tokens == 0


def test_a_fork_continues_all_that_is_planned_and_no_more(cache):
    """What is released of it is what its parent has computed; nothing of ABC is."""
    key = prefix_key("ABC")
    parent, _ = cache.manager.admit(key, cache.manager.match(key))
    child, _ = cache.manager.fork(parent)
    cache.manager.commit()
    refused(cache, TableOverrun, lambda: cache.manager.release(child, 3), "release 3 tokens")
    cache.manager.release(child, 0)
    cache.manager.release(parent, 0)
    assert cache.match("ABCD").num_tokens == 0


def test_no_fewer_tokens_are_published_than_before(cache):
    """The second block would be findable, and 4 tokens computed of a window that is past them."""
    table = cache.admit("one", "ABCDEFGHIJ", upto=8).table
    refused(cache, TableOverrun, lambda: cache.manager.publish(table, 4), "publish 8 to 10")
    cache.manager.publish(table, 9)
    refused(cache, TableOverrun, lambda: cache.manager.publish(table, 8), "publish 9 to 10")


@pytest.mark.parametrize("num_tokens", [-1, -4, -100])
def test_a_number_of_tokens_is_not_negative(cache, num_tokens):
    table = cache.admit("one", "ABCDE").table
    for call in (cache.manager.publish, cache.manager.release):
        refused(cache, TableOverrun, lambda call=call: call(table, num_tokens))
    assert cache.manager.match(table.key, num_tokens).num_tokens == 0


def test_a_number_of_tokens_is_an_integer(cache):
    """A fraction would raise in the middle of the change."""
    table = cache.admit("one", "ABCDEF").table
    for call in (cache.manager.publish, cache.manager.release):
        refused(cache, TypeError, lambda call=call: call(table, 4.5))
    refused(cache, TypeError, lambda: cache.manager.grow(table, 10.5))


def test_until_the_copies_of_a_fork_have_run_both_stay_as_they_are(cache, layers):
    """They run after the step: its parent's blocks and state must be those at the fork."""
    parent = cache.admit("one", "ABCDEFGHIJ", upto=8).table
    child = cache.fork("one", "two").table
    assert cache.calls.grow(child, 10)
    for table in (parent, child):
        refused(cache, StepInProgress, lambda t=table: cache.manager.release(t, 8), "commit")
        if layers:
            refused(cache, StepInProgress, lambda t=table: cache.manager.publish(t, 9), "commit")
    cache.commit()
    cache.advance("one", 10)
    cache.commit()
    for name in ("one", "two"):
        cache.finish(name)


def test_what_another_cache_has_pinned_is_not_unpinned_here(index, layers):
    """Both are the first table of their cache; the refusal leaves ours pinned."""
    ours, theirs = (tiny_cache(8, index=index, **layers) for _ in range(2))
    for cache in (ours, theirs):
        cache.serve("ABCDEFGH")
        cache.prefix_cache.admin.lease(prefix_key("ABCDEFGH"), PINNED)
    [table] = theirs.manager.tables.pinned.values()
    refused(ours, ReleasedTable, lambda: ours.manager.unpin(table))


def test_a_failed_step_has_released_its_tables(cache):
    """As the example of the README invites: ``fail`` in ``except``, ``release`` in ``finally``."""
    table = cache.plan("one", "ABCDEFGH").table
    cache.fail()
    refused(cache, ReleasedTable, lambda: cache.manager.release(table, 8))


def test_a_table_of_another_cache_is_refused(index, layers):
    cache, other = (tiny_cache(8, index=index, **layers) for _ in range(2))
    cache.admit("one", "ABCDEFGH")
    table = other.admit("one", "ABCDEFGHIJKL", upto=8).table
    for call in (
        lambda: cache.manager.publish(table, 9),
        lambda: cache.manager.release(table, 8),
        lambda: cache.manager.grow(table, 20),
        lambda: cache.manager.publish(table, 12),
        lambda: cache.manager.fork(table),
    ):
        refused(cache, ReleasedTable, call)
        other.prefix_cache.check()


@pytest.mark.parametrize("layers", ["states"], indirect=True)
def test_a_table_whose_state_is_loaded_in_the_step_ends_with_it(cache):
    """Released, its slot could be loaded for another; after a failure nothing would load it."""
    manager, keys = cache.manager, [prefix_key("ABCDE"), prefix_key("QRSTU")]
    first, second = (manager.admit(key, manager.match(key))[0] for key in keys)
    refused(cache, StepInProgress, lambda: manager.release(first, 0), "commit")
    manager.publish(second, 5)
    manager.fail()
    refused(cache, ReleasedTable, lambda: manager.publish(first, 5))
    assert manager.state_copies == ((), ())


def test_what_is_published_and_not_computed_is_not_released(cache):
    """Law 5: a ``finally:`` would leave blocks findable that no forward pass has filled."""
    table = cache.plan("one", "ABCDEFGH").table
    refused(cache, StepInProgress, lambda: cache.manager.release(table, 8), "commit")
    cache.fail()
    assert cache.match("ABCDEFGHI").num_tokens == 0


@FINDABLE_AT_ONCE
def test_a_failed_step_releases_those_that_only_read_what_it_published(cache):
    """The follower hits both blocks and was not planned: nobody will compute what it holds."""
    cache.plan("leader", "ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    admitted = cache.manager.admit(key, cache.manager.match(key))
    assert admitted is not None
    assert admitted[0].num_cached_tokens == 8
    cache.manager.fail()
    refused(cache, ReleasedTable, lambda: cache.manager.release(admitted[0], 8))
    assert cache.match("ABCDEFGHI").num_tokens == 0
    cache.prefix_cache.check()


@pytest.mark.parametrize("first", ["admitted first", "published first"])
def test_a_failed_step_releases_what_was_admitted_in_it_and_not_published(cache, first):
    """Nothing will compute it: an embedder's ``except`` calls ``fail``, and has no other table."""
    if first == "published first":
        cache.plan("other", "abcdefgh")
    key = prefix_key("ABCDEFGH")
    table, _ = cache.manager.admit(key, cache.manager.match(key))
    if first == "admitted first":
        cache.plan("other", "abcdefgh")
    cache.manager.fail()
    refused(cache, ReleasedTable, lambda: cache.manager.release(table, 0))
    assert cache.manager.pool.num_free == 8, "law 9"


@FINDABLE_AT_ONCE
def test_what_a_running_step_generates_is_not_released_before_it_is_computed(cache):
    """A decode fills no block; released, its tokens would be found in a partial one (law 5)."""
    table = cache.admit("one", "ABCDE").table
    table.key.append(ord("F"))
    cache.manager.publish(table, 6)
    refused(cache, StepInProgress, lambda: cache.manager.release(table, 6), "commit")
    cache.manager.commit()
    cache.manager.release(table, 6)
    assert cache.match("ABCDEFG").num_tokens == 6


def test_a_table_publishes_no_more_in_a_step_that_others_have_joined(cache):
    """Each could hold what the other published, and ``fail`` could take back neither."""
    table = cache.plan("one", "ABCDEFGH", upto=4).table
    cache.plan("two", "ABCDEFGHI")
    refused(cache, StepInProgress, lambda: cache.manager.publish(table, 8), "commit")
    cache.commit()
    cache.manager.publish(table, 8)
    cache.manager.commit()


def test_events_of_a_step_wait_until_it_is_computed(cache):
    """Another request may end meanwhile; what the step publishes is no news yet."""
    other = cache.admit("other", "QRST").table
    settled = []
    observer = CacheObserver()
    observer.on_settle = lambda: settled.append(True)
    cache.manager.observers.attach(observer)
    cache.plan("one", "ABCDEFGH")
    cache.manager.release(other, 4)
    assert not settled
    cache.manager.commit()
    assert settled


def test_no_more_is_published_than_the_table_and_its_sequence_have(cache):
    """One token past the key would name a block by fewer tokens than its KV has."""
    table = cache.admit("one", "ABCDEF").table
    for num_tokens in (8, 9, 100):
        refused(cache, TableOverrun, lambda n=num_tokens: cache.manager.publish(table, n))
        refused(cache, TableOverrun, lambda n=num_tokens: cache.manager.release(table, n))
    cache.finish("one")
    assert cache.match("ABCDEFGHI").num_tokens == (6 if cache.manager.config.seal_tails else 0)


# --- matches --------------------------------------------------------------------------------


def test_a_match_is_of_the_key_that_is_admitted(cache):
    cache.serve("ABCDEFGH")
    match = cache.manager.match(prefix_key("ABCDEFGHI"))
    refused(cache, StaleMatch, lambda: cache.manager.admit(prefix_key("XYZABCDEFG"), match))


@FINDABLE_AT_ONCE
def test_no_more_tokens_are_matched_than_the_sequence_has(cache):
    """EF would match the partial block as a whole one, and CD be read from where only EF is."""
    cache.serve("ABCDEF")
    key = prefix_key("ABCDEF")
    match = cache.manager.match(key, 8)
    assert match.num_tokens == 6
    for letter in "GHI":
        key.append(ord(letter))
    table, copies = cache.manager.admit(key, match)
    assert (table.num_shared_tokens, table.num_copied_tokens, len(copies)) == (
        4,
        2,
        1 + bool(windows_of(cache.manager)),
    )


def test_a_key_of_old_weights_is_not_admitted(cache):
    """A running sequence still holds what the old weights have computed."""
    cache.admit("one", "ABCDEFGHI")
    cache.manager.new_epoch()
    key = prefix_key("ABCDEFGHI")
    match = cache.manager.match(key)
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match), "rekey it")
    key = cache.manager.rekey(key)
    table, _ = cache.manager.admit(key, cache.manager.match(key))
    assert table.num_cached_tokens == 0


def test_a_key_of_later_weights_is_not_admitted(cache):
    """What it computes under these weights would be hit under those."""
    key = prefix_key("ABCDEFGHI", epoch=1)
    match = cache.manager.match(key)
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match), "epoch 1, the weights of 0")


def test_what_is_pinned_under_old_weights_is_removed_once_it_is_unpinned(cache):
    cache.serve("ABCDEFGH")
    table = cache.manager.pin(prefix_key("ABCDEFGH"), 8)
    cache.manager.new_epoch()
    cache.manager.unpin(table)
    assert not [*cache.manager.index.runs()]


def test_weights_that_are_not_bytes_change_nothing(cache):
    """The epoch would be the next one, and every waiting key beyond renewal."""
    cache.serve("ABCDEFGH")
    admin = cache.prefix_cache.admin
    admin.lease(prefix_key("ABCDEFGH"), PINNED)
    for call in (cache.manager.new_epoch, admin.new_epoch):
        refused(cache, InvalidIdentity, lambda call=call: call("version 2"), "weights='version 2'")


def test_a_match_of_another_cache_is_refused(index, layers):
    cache, other = (tiny_cache(8, index=index, **layers) for _ in range(2))
    other.serve("ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    match = other.manager.match(key)
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match))


def test_a_match_is_stale_once_the_cache_has_changed(index):
    """What it names may be evicted, split or held by a failed step."""
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    match = cache.manager.match(key)
    cache.serve("QRSTUVWXYZabcdef")
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match), "match the key again")
    assert cache.manager.admit(key, cache.manager.match(key)) is not None


def test_a_match_is_stale_once_another_prompt_was_published(cache):
    """It may have split the node that the match names."""
    cache.serve("ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    match = cache.manager.match(key)
    cache.plan("other", "ABCDXYZW")
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match))


@pytest.mark.parametrize(
    "layers",
    [{"windows": (WindowConfig(5, 3),)}, {"states": StateConfig(2, unit=4)}],
    ids=["windows", "states"],
)
def test_a_match_is_stale_once_a_window_or_a_state_was_evicted_and_no_block(index, layers):
    """Full attention still has all of it; the others would begin from nothing after 8 tokens."""
    cache = tiny_cache(16, index=index, **layers)
    cache.serve("ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    match = cache.manager.match(key)
    assert match.num_tokens == 8
    for name in ("stranger", "other"):
        cache.admit(name, "QRSTUVWX", writes=False)
    assert "ABCD:evictable EFGH:evictable" in cache.picture()
    for name in ("stranger", "other"):
        cache.finish(name)
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match), "match the key again")
    assert cache.manager.admit(key, cache.manager.match(key)) is not None


# --- requests -------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_not_the_same_as_not_now(index):
    cache = tiny_cache(2, index=index)
    cache.admit("one", "ABCDE")
    key, long = prefix_key("QRST"), prefix_key("QRSTUVWXY")
    assert cache.manager.admit(key, cache.manager.match(key)) is None
    refused(
        cache,
        PromptTooLong,
        lambda: cache.manager.admit(long, cache.manager.match(long)),
        "9 tokens and needs 3 blocks of 4, but the pool has 2",
    )


@pytest.mark.parametrize("layers", ["full attention", "windows"], indirect=True)
def test_a_prompt_that_waits_for_pinned_blocks_alone_is_refused(cache):
    """All blocks but its last are cached and pinned: nothing runs that would ever free another."""
    prompt = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"
    cache.serve(prompt)
    table = cache.manager.pin(prefix_key(prompt), 32)
    key = prefix_key(prompt)
    match = cache.manager.match(key)
    refused(cache, PromptTooLong, lambda: cache.manager.admit(key, match), "1 prefixes are pinned")
    cache.manager.unpin(table)
    assert cache.manager.admit(key, cache.manager.match(key)) is not None


def test_a_prompt_that_lacks_what_is_guaranteed_to_others_is_refused(index):
    cache = tiny_cache(4, index=index, tenant_shares={b"a": TenantShare(guaranteed=2)})
    cache.serve("ABCDEFGH", tenant=b"a")
    key = prefix_key("QRSTUVWXY")
    refused(cache, PromptTooLong, lambda: cache.manager.admit(key, cache.manager.match(key)))
    assert cache.admit("own", "QRSTUVWXY", tenant=b"a") is not None
    assert cache.manager.admit(key, cache.manager.match(key)) is None, "a running sequence may end"


def test_a_prompt_without_tokens_is_not_the_same_as_not_now(cache):
    key = prefix_key("")
    refused(cache, EmptyPrompt, lambda: cache.manager.admit(key, cache.manager.match(key)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "ann"},
        {"weights": "w"},
        {"adapter": 3},
        {"kv_dtype": b"bfloat16"},
        {"epoch": "1"},
        {"epoch": True},
        {"epoch": -1},
        {"epoch": 2**63},
        {"base": "public"},
        {"start": "4", "base": Identity()},
        {"start": 4.0, "base": Identity()},
        {"start": True, "base": Identity()},
        {"start": 2**31, "base": Identity()},
    ],
    ids=str,
)
def test_an_identity_has_fields_of_the_right_type(fields):
    """A text in the place of bytes would be half admitted: no root is found under it."""
    with pytest.raises(InvalidIdentity, match=next(iter(fields))):
        Identity(**fields)


@pytest.mark.parametrize("start", [-4, 0, 7])
def test_an_identity_begins_after_the_start_of_its_base(start):
    """An adapter that began within a public prefix would have computed the end of it."""
    own = Identity(tenant=b"ann", base=Identity(tenant=b"public"), start=8)
    with pytest.raises(InvalidIdentity, match=f"start={start}: must be an integer from 8"):
        Identity(adapter=b"judge", tenant=b"ann", base=own, start=start)


@pytest.mark.parametrize("start", [-1, 4])
def test_an_identity_without_a_base_begins_with_the_sequence(start):
    with pytest.raises(InvalidIdentity, match=f"start={start}: must be 0 without a base"):
        Identity(start=start)


@pytest.mark.parametrize("fields", [{"weights": b"old"}, {"epoch": 1}, {"kv_dtype": "int8"}])
def test_an_identity_has_the_weights_and_the_format_of_its_base(fields):
    """Else what old weights computed would be hit under new ones."""
    with pytest.raises(InvalidIdentity, match="must be that of its base"):
        Identity(base=Identity(**fields), start=4)


def test_a_digest_that_raises_leaves_nothing_half_published(index):
    """Radix compares tokens and never asks it."""
    broken = []

    def digest(data: bytes) -> bytes:
        if broken:
            raise ValueError("no digest today")
        return data[-24:]

    cache = tiny_cache(8, index=index, digest=digest)
    cache.serve("ABCDEFGH")
    sequence = cache.admit("one", "QRSTUVWXYZab", upto=4)
    broken.append(True)
    if index == "hash":
        sequence.table.key.digests.clear()
        refused(cache, ValueError, lambda: cache.manager.publish(sequence.table, 12))
    broken.clear()
    cache.advance("one", 12)
    cache.commit()
    assert cache.match("QRSTUVWXYZabc").num_shared_tokens == 12


# --- company --------------------------------------------------------------------------------


def test_what_is_pinned_is_neither_erased_nor_reset(cache):
    """It would be found again once it is unpinned, though nothing was to be left."""
    cache.serve("ABCDEFGH")
    admin, table = cache.prefix_cache.admin, cache.manager.pin(prefix_key("ABCDEFGH"), 8)
    admin.lease(prefix_key("ABCDEFGH"), PINNED)
    refused(cache, CacheInUse, admin.reset, "1 tables are pinned")
    refused(cache, CacheInUse, lambda: admin.erase(b""), "1 tables are pinned")
    assert admin.erase(b"another").num_blocks == 0
    cache.manager.unpin(table)
    assert admin.erase(b"").num_leases == 1


def test_a_tenant_is_erased_by_its_bytes(cache):
    """Nothing is of a tenant that is a text, so nothing would be erased."""
    cache.serve("ABCDEFGH", tenant=b"ann")
    admin = cache.prefix_cache.admin
    refused(cache, InvalidIdentity, lambda: admin.erase("ann"), "tenant='ann': must be bytes")


def test_terms_of_a_lease_are_more_than_seconds(cache):
    """The prefix would be pinned, and no lease know of it."""
    cache.serve("ABCDEFGH")
    admin, key = cache.prefix_cache.admin, prefix_key("ABCDEFGH")
    refused(cache, ConfigError, lambda: admin.lease(key, 300.0), "terms=300.0")


def test_nothing_is_leased_while_a_step_is_under_way(cache):
    """What ``fail`` takes back, a lease would hold."""
    cache.plan("one", "ABCDEFGH")
    admin = cache.prefix_cache.admin
    refused(cache, StepInProgress, lambda: admin.lease(prefix_key("ABCDEFGH"), PINNED))
    cache.fail()


@pytest.mark.parametrize("layers", ["windows"], indirect=True)
def test_nothing_is_leased_while_a_window_is_computed_again(layers):
    """Full attention knows the content; that of the window is published and not computed."""
    cache = tiny_cache(16, windows=(WindowConfig(5, 3),))
    cache.serve("ABCDEFGH")
    cache.serve("QRSTUVWXYZab")  # evicts the window of the first
    assert cache.match("ABCDEFGHI").num_tokens == 0
    cache.plan("one", "ABCDEFGHI", upto=8)
    refused(cache, StepInProgress, lambda: cache.manager.pin(prefix_key("ABCDEFGH"), 8))
    cache.fail()


def test_another_thread_is_refused_while_tables_are_live(cache):
    """At every call that would change the cache; with no table live it may go on."""
    cache.serve("QRSTUVWX")
    pinned = cache.manager.pin(prefix_key("QRSTUVWX"), 8)
    table = cache.admit("one", "ABCDEFGHIJKL", upto=5).table
    manager, key = cache.manager, prefix_key("QRST")
    calls = {
        "admit": lambda: manager.admit(key, manager.match(key)),
        "grow": lambda: manager.grow(table, 13),
        "publish": lambda: manager.publish(table, 12),
        "publish a token": lambda: manager.publish(table, 6),
        "commit": manager.commit,
        "fail": manager.fail,
        "release": lambda: manager.release(table, 5),
        "fork": lambda: manager.fork(table),
        "begin_step": manager.begin_step,
        "pin": lambda: manager.pin(key, 4),
        "unpin": lambda: manager.unpin(pinned),
        "remove": lambda: manager.remove(lambda entry: True),
        "new_epoch": manager.new_epoch,
    }
    for name, call in calls.items():
        before = whole_state(manager)
        assert type(error_in_another_thread(call)) is WrongThread, name
        assert whole_state(manager) == before, name
    cache.finish("one")
    assert error_in_another_thread(calls["admit"]) is None


def test_tables_of_a_thread_that_has_ended_may_be_released_by_another(cache):
    """Else what an embedder's thread held when it died would be held for ever."""
    tables = []
    key = prefix_key("ABCDE")

    def admit() -> None:
        tables.extend(cache.manager.admit(key, cache.manager.match(key))[:1])

    assert error_in_another_thread(admit) is None
    cache.manager.commit()
    cache.manager.release(tables[0], 0)
    cache.prefix_cache.check()


def test_threads_that_call_without_a_lock_leave_the_cache_whole(cache):
    """Each serves prompts as an embedder would; the interpreter switches as often as it can."""
    served, barrier = Counter[int](), threading.Barrier(4)

    def embed(number: int) -> None:
        barrier.wait()
        for turn in range(60):
            key = prefix_key("ABCD" + chr(97 + turn % 3) * 6 + str(number))
            with contextlib.suppress(CacheMisuse):
                admitted = cache.manager.admit(key, cache.manager.match(key))
                if admitted is not None:
                    cache.manager.publish(admitted[0], len(key))
                    cache.manager.commit()
                    cache.manager.release(admitted[0], len(key))
                    served[number] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        errors = errors_in_threads([partial(embed, number) for number in range(4)])
    finally:
        sys.setswitchinterval(interval)
    assert errors == [] and sum(served.values())
    assert not cache.manager.num_live_tables
    cache.prefix_cache.check()


def errors_in_threads(calls: list[Callable[[], object]]) -> list[Exception]:
    """Make each call in a thread of its own, all at once; return what they raise."""
    raised: list[Exception] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def error_in_another_thread(call: Callable[[], object]) -> Exception | None:
    """Make a call in another thread; return what it raises."""
    return next(iter(errors_in_threads([call])), None)


# --- observers ------------------------------------------------------------------------------

OBSERVED = [name for name in vars(CacheObserver) if name.startswith("on_")]


@pytest.mark.parametrize("hook", OBSERVED)
def test_an_observer_that_raises_is_detached_and_the_change_is_finished(
    index, layers, hook, caplog
):
    """Two of one cache see the same traffic; the one with a broken observer does the same."""
    pictures = []
    for is_broken in (False, True):
        cache = tiny_cache(8, index=index, **layers)
        observer, later, calls = CacheObserver(), CacheObserver(), []
        setattr(later, hook, lambda *_, calls=calls: calls.append(hook))
        if is_broken:
            setattr(observer, hook, fail_to_observe)
        cache.manager.observers.attach(observer, later)
        serve_with_every_event(cache)
        cache.prefix_cache.check()
        assert calls, "those after it are called all the same"
        assert (observer in cache.manager.observers.active) == (not is_broken)
        pictures.append((cache.picture(), len(calls)))
    assert pictures[0] == pictures[1]
    assert [record.levelname for record in caplog.records] == ["ERROR"], "reported once"


def fail_to_observe(*_: object, **__: object) -> None:
    """Raise, as a broken observer does."""
    raise RuntimeError("the observer is broken")


def serve_with_every_event(cache: TinyCache) -> None:
    """Admit, fork, publish, reuse, evict, fail and clear."""
    cache.manager.begin_step()
    cache.serve("ABCDEFGH")
    cache.serve("ABCDEFGHI")
    cache.admit("parent", "ABCDEFGHIJ")
    cache.fork("parent", "child")
    cache.commit()
    for name in ("parent", "child"):
        cache.finish(name)
    cache.serve("abcdefghijklmnopqrstuvwxyz")
    cache.plan("failing", "ABCDEFGH")
    cache.fail()
    cache.serve("ABCDEFGH")
    cache.manager.new_epoch()

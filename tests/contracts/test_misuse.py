"""Calls in a wrong order are refused with a typed error, and change nothing."""

import threading

import pytest

from ostinato.core.errors import (
    CacheMisuse,
    InvalidIdentity,
    PromptTooLong,
    ReleasedTable,
    StaleMatch,
    StepInProgress,
    TableOverrun,
    WrongThread,
)
from ostinato.core.identity import Identity
from ostinato.tenants.terms import PINNED
from tests.support.cache_views import prefix_key
from tests.support.tiny_cache import TinyCache, tiny_cache
from tests.support.whole_state import whole_state


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
        lambda: cache.manager.fail([table]),
        lambda: cache.manager.grow(table, 12),
        lambda: cache.manager.growable(table, 12),
        lambda: cache.manager.publish(table, 8),
        lambda: cache.manager.fork(table, 8),
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
    cache.manager.release(admitted[0], 0)
    assert cache.match("ABCD").num_tokens == 0


def test_what_another_cache_has_pinned_is_not_unpinned_here(index):
    """Both are the first table of their cache; the refusal leaves ours pinned."""
    ours, theirs = tiny_cache(8, index=index), tiny_cache(8, index=index)
    for cache in (ours, theirs):
        cache.serve("ABCDEFGH")
        cache.prefix_cache.admin.lease(prefix_key("ABCDEFGH"), PINNED)
    [table] = theirs.manager.tables.pinned.values()
    refused(ours, ReleasedTable, lambda: ours.manager.unpin(table))


def test_what_is_pinned_in_part_is_released_in_full(cache):
    """ABCD is held; EF, which could be copied, is not, for a pin copies nothing."""
    cache.serve("ABCDEFGH")
    table = cache.manager.pin(prefix_key("ABCDEFXY"), 8)
    assert len(table.blocks) == 1
    cache.manager.unpin(table)
    cache.prefix_cache.check()


def test_a_failed_step_has_released_its_tables(cache):
    """As the example of the README invites: ``fail`` in ``except``, ``release`` in ``finally``."""
    table = cache.plan("one", "ABCDEFGH").table
    cache.fail()
    refused(cache, ReleasedTable, lambda: cache.manager.release(table, 8))
    refused(cache, ReleasedTable, lambda: cache.manager.fail([table]))


def test_a_table_of_another_cache_is_refused(index):
    cache, other = tiny_cache(8, index=index), tiny_cache(8, index=index)
    cache.admit("one", "ABCDEFGH")
    table = other.admit("one", "ABCDEFGHIJKL", upto=8).table
    for call in (
        lambda: cache.manager.release(table, 8),
        lambda: cache.manager.fail([table]),
        lambda: cache.manager.grow(table, 20),
        lambda: cache.manager.publish(table, 12),
        lambda: cache.manager.fork(table, 8),
    ):
        refused(cache, ReleasedTable, call)
        other.prefix_cache.check()


def test_what_is_published_and_not_computed_is_not_released(cache):
    """Law 5: a ``finally:`` would leave blocks findable that no forward pass has filled."""
    table = cache.plan("one", "ABCDEFGH").table
    refused(cache, StepInProgress, lambda: cache.manager.release(table, 8), "commit")
    cache.fail()
    assert cache.match("ABCDEFGHI").num_tokens == 0


def test_a_failed_step_names_all_its_publishers_and_each_once(cache):
    one, two = cache.plan("one", "ABCDEFGH").table, cache.plan("two", "QRST").table
    refused(cache, StepInProgress, lambda: cache.manager.fail([one]), "missing")
    refused(cache, ReleasedTable, lambda: cache.manager.fail([one, two, two]), "twice")
    cache.fail()


def test_no_more_is_published_than_the_table_and_its_sequence_have(cache):
    """One token past the key would name a block by fewer tokens than its KV has."""
    table = cache.admit("one", "ABCDEF").table
    for num_tokens in (8, 9, 100):
        refused(cache, TableOverrun, lambda n=num_tokens: cache.manager.publish(table, n))
        refused(cache, TableOverrun, lambda n=num_tokens: cache.manager.fork(table, n))
        refused(cache, TableOverrun, lambda n=num_tokens: cache.manager.release(table, n))
    cache.finish("one")
    assert cache.match("ABCDEFGHI").num_tokens == 6


# --- matches --------------------------------------------------------------------------------


def test_a_match_is_of_the_key_that_is_admitted(cache):
    cache.serve("ABCDEFGH")
    match = cache.manager.match(prefix_key("ABCDEFGHI"))
    refused(cache, StaleMatch, lambda: cache.manager.admit(prefix_key("XYZABCDEFG"), match))


def test_a_match_of_another_cache_is_refused(index):
    cache, other = tiny_cache(8, index=index), tiny_cache(8, index=index)
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


def test_a_match_is_stale_once_the_sequence_that_it_hits_has_published_more(index):
    """A radix node has grown in place: to hold all of it would hold too much."""
    cache = tiny_cache(8, index=index)
    cache.admit("leader", "ABCDEFGH", upto=4)
    key = prefix_key("ABCDXYZW")
    match = cache.manager.match(key)
    cache.advance("leader", 8)
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match))


def test_a_match_is_stale_once_blocks_were_evicted_and_nothing_published(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    match = cache.manager.match(key)
    cache.admit("stranger", "QRSTUVWXYZab", writes=False)
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match))


def test_a_match_is_stale_once_the_step_that_it_follows_has_failed(cache):
    cache.plan("leader", "ABCDEFGH")
    key = prefix_key("ABCDEFGHI")
    match = cache.manager.match(key)
    assert match.num_tokens == 8
    cache.fail()
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match))


def test_a_match_is_stale_once_a_partial_block_was_published(cache):
    cache.admit("other", "ABCDEFGHIJ")
    key = prefix_key("ABCDEFGHIJK")
    match = cache.manager.match(key)
    cache.finish("other")
    refused(cache, StaleMatch, lambda: cache.manager.admit(key, match))


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


def test_nothing_is_leased_while_a_step_is_under_way(cache):
    """What ``fail`` takes back, a lease would hold."""
    cache.plan("one", "ABCDEFGH")
    admin = cache.prefix_cache.admin
    refused(cache, StepInProgress, lambda: admin.lease(prefix_key("ABCDEFGH"), PINNED))
    cache.fail()


def test_another_thread_is_refused_while_tables_are_live(cache):
    cache.admit("one", "ABCDEFGH")
    raised: list[Exception] = []

    def intrude() -> None:
        key = prefix_key("QRST")
        try:
            cache.manager.admit(key, cache.manager.match(key))
        except CacheMisuse as error:
            raised.append(error)

    def call_from_another_thread() -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    call_from_another_thread()
    assert [type(error) for error in raised] == [WrongThread]
    cache.finish("one")
    call_from_another_thread()
    assert len(raised) == 1, "with no table live another thread may go on"

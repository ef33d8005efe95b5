"""The suite that every tier passes, also for a tier of your own.

It takes a ``Medium``, which opens the tier and can damage what it has stored::

    from ostinato.testing import conformance

    conformance.run(MyMedium)                 # raises AssertionError at the first check that fails
    conformance.storm(MyMedium(), num_faults=10_000)

or, with one test per check::

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_my_tier(check):
        check(MyMedium())
"""

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

from ostinato.core.errors import ConfigError
from ostinato.testing.conformance_faults import (
    StormReport,
    cut_off,
    damage,
    flip_bit,
    lose,
    storm,
    swap,
)
from ostinato.testing.conformance_medium import (
    FOREVER_S,
    NAMESPACE,
    STATE,
    WINDOW,
    Medium,
    assert_nowhere,
    conversation,
    get,
    get_places,
    payload,
    put,
    put_runs,
)
from ostinato.tiers.port import LoadFault, Prefix, StoreResult

__all__ = ["CHECKS", "Check", "Medium", "StormReport", "check", "run", "storm"]

Check = Callable[[Medium], None]
CHECKS: list[Check] = []
"""Each takes a fresh medium, and raises AssertionError."""


def run(make_medium: Callable[[], Medium]) -> list[str]:
    """Run every check on a medium of its own; returns their names."""
    for check in CHECKS:
        check(make_medium())
    return [check.__name__ for check in CHECKS]


def check(function: Check) -> Check:
    """Add a check to the suite."""
    CHECKS.append(function)
    return function


@check
def stored_kv_hits_after_a_restart(medium: Medium) -> None:
    """Durable when ``store`` returns: also for a process that was killed right after."""
    tier = medium.open()
    assert put(tier, conversation(1)) == [StoreResult.STORED] * 2
    assert get(tier, conversation(1)) == 8
    medium.kill()
    assert get(medium.open(), conversation(1)) == 8


@check
def tokens_decide_not_digests_alone(medium: Medium) -> None:
    """Another conversation gets the blocks that it shares, and none after."""
    tier = medium.open()
    put(tier, conversation(1))
    assert get(tier, conversation(2)) == 2
    assert get(tier, conversation(2), start_block=2) == 0
    longer = Prefix(NAMESPACE, b"", conversation(1).tokens + array("I", [1, 2, 3, 4, 5]))
    assert get(tier, longer) == 8


@check
def a_look_up_may_begin_inside_an_extent(medium: Medium) -> None:
    """The pool has the first blocks; the tier continues from any of them."""
    tier = medium.open()
    put(tier, conversation(1), blocks_each=8)
    assert [get(tier, conversation(1), start_block=first) for first in range(8)] == [
        8 - first for first in range(8)
    ]


@check
def leading_blocks_load_alone(medium: Medium) -> None:
    """A caller with room for some blocks reads only those."""
    tier, prefix = medium.open(), conversation(1)
    put(tier, prefix, blocks_each=8)
    ref = tier.look_up(prefix, 0)[0]
    count = min(3, ref.num_blocks)
    into = memoryview(bytearray(count * NAMESPACE.block_bytes))
    result = tier.load(ref, into, count, time.monotonic() + FOREVER_S)
    assert (result.num_blocks, result.fault) == (count, None)
    assert bytes(into) == payload(prefix, 0, count)


@check
def nothing_crosses_tenants(medium: Medium) -> None:
    """Equal tokens of two tenants are separate, also with a client's own salt."""
    tier = medium.open()
    put(tier, conversation(1, tenant=b"a"))
    for other in (b"", b"b", b"a\x1fclient"):
        assert get(tier, conversation(1, tenant=other)) == 0
    assert get(tier, conversation(1, tenant=b"a")) == 8


@check
def nothing_crosses_namespaces(medium: Medium) -> None:
    """Weights under the same name, another RoPE, dtype, layout, adapter or arithmetic: a miss."""
    tier = medium.open()
    put(tier, conversation(1))
    changed = dict(
        weights=b"updated", model_config=b"rope", kv_dtype="float16", layout="layout-2",
        layer_groups=("full", "window"), adapter=b"adapter", numerics=1,
    )  # fmt: skip
    for name, value in changed.items():
        stale = replace(NAMESPACE, **{name: value})  # type: ignore[arg-type]
        assert get(tier, conversation(1, namespace=stale)) == 0, name
    medium.kill()
    assert get(medium.open(), conversation(1)) == 8


@check
def a_second_store_writes_nothing(medium: Medium) -> None:
    """Stored blocks are not written again."""
    tier = medium.open()
    put(tier, conversation(1))
    before = sum(map(len, medium.values().values()))
    assert put(tier, conversation(1)) == [StoreResult.PRESENT] * 2
    assert sum(map(len, medium.values().values())) == before


@check
def a_flipped_bit_is_a_miss(medium: Medium) -> None:
    """Any bit of anything stored; nine conversations, one flip at a time."""
    damage(medium, flip_bit, num_faults=40)


@check
def a_short_value_is_a_miss(medium: Medium) -> None:
    """Anything stored is truncated."""
    damage(medium, cut_off, num_faults=20)


@check
def swapped_records_are_a_miss(medium: Medium) -> None:
    """Two stored values, or two pieces of one, are exchanged."""
    damage(medium, swap, num_faults=20)


@check
def a_lost_value_is_a_miss(medium: Medium) -> None:
    """The server evicted it, or a file was removed."""
    damage(medium, lose, num_faults=5)


@check
def old_content_that_returns_is_never_wrong(medium: Medium) -> None:
    """A backup is restored under a newer conversation."""
    put(medium.open(), conversation(1))
    medium.kill()
    backup = medium.values()
    tier = medium.open()
    tier.erase(b"")
    put(tier, conversation(2))
    medium.kill()
    for name, value in backup.items():
        medium.put(name, value)
    tier = medium.open()
    assert get(tier, conversation(1)) + get(tier, conversation(2)) >= 0


@check
def a_failed_store_is_not_visible(medium: Medium) -> None:
    """The medium is full after some bytes: the result says so, and look-ups find none of them."""
    for number, after in enumerate((0, 1, 100, 300, 700, 1000)):
        tier, prefix = medium.open(), conversation(number, 16, tenant=b"%d" % number)
        medium.fail_writes(after)
        results = put(tier, prefix)
        stored = 4 * sum(result is StoreResult.STORED for result in results)
        assert stored < 16, f"16 blocks were stored, although writes fail after {after} bytes"
        assert get(tier, prefix) <= stored
        medium.fail_writes(None)
        medium.kill()
        tier = medium.open()
        put(tier, prefix)
        assert get(tier, prefix) == 16, "a recovered medium is not used"
        medium.kill()


@check
def a_slow_medium_costs_a_deadline(medium: Medium) -> None:
    """What was verified before the deadline is returned; the caller computes the rest."""
    tier, prefix = medium.open(), conversation(1)
    put(tier, prefix, blocks_each=8)
    ref, into = tier.look_up(prefix, 0)[0], memoryview(bytearray(8 * NAMESPACE.block_bytes))
    assert tier.load(ref, into, 8, time.monotonic() - 1).fault is LoadFault.DEADLINE
    medium.slow_reads(0.05)
    result = tier.load(ref, into, 8, time.monotonic() + 0.01)
    assert result.fault is LoadFault.DEADLINE, result
    assert result.num_blocks < 8, result
    medium.slow_reads(0)
    medium.kill()
    assert get(medium.open(), prefix) == 8


@check
def two_writers_are_refused_or_right(medium: Medium) -> None:
    """A second process on the same medium."""
    first = medium.open()
    put(first, conversation(1))
    try:
        second = medium.open()
    except ConfigError:
        return
    put(second, conversation(2))
    put(first, conversation(3))
    for tier in (first, second):
        assert sum(get(tier, conversation(number)) for number in (1, 2, 3)) > 0
    second.close()


@check
def threads_do_not_mix_anything_up(medium: Medium) -> None:
    """Four threads store and load at the same time."""
    tier, errors = medium.open(), list[BaseException]()

    def work(worker: int) -> None:
        try:
            for number in range(worker * 10, worker * 10 + 5):
                put(tier, conversation(number))
                get(tier, conversation(number - 1))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@check
def what_is_leased_says_how_many_tokens(medium: Medium) -> None:
    """A lease covers the stored blocks, and rewrites no payload."""
    tier = medium.open()
    put(tier, conversation(1))
    assert tier.lease(conversation(1), time.time() + 86_400) == 32
    assert tier.lease(conversation(2), time.time() + 86_400) == 8
    assert tier.lease(conversation(3, tenant=b"other"), time.time() + 86_400) == 0
    assert get(tier, conversation(1)) == 8


@check
def what_was_erased_is_nowhere(medium: Medium) -> None:
    """A search of all bytes finds neither tokens nor KV nor states; other tenants keep theirs."""
    tier = medium.open()
    erased = [conversation(1, tenant=b"a"), conversation(2, tenant=b"a\x1fclient")]
    continuing = replace(conversation(4, tenant=b"c"), public_prefix=b"a")
    for prefix in (*erased, continuing, conversation(3, tenant=b"b")):
        put(tier, prefix)
    sparse = [conversation(1, tenant=b"a", namespace=n) for n in (WINDOW, STATE)]
    for prefix in sparse:
        put_runs(tier, prefix, [range(2, 4), range(6, 8)])
    erased += [continuing, *sparse]
    receipts = tier.erase(b"a")
    assert all(receipt.complete for receipt in receipts), "the erasure is incomplete"
    num_extents = sum(receipt.num_extents for receipt in receipts)
    assert num_extents >= 10, f"{num_extents} extents erased: at least the 10 that were stored"
    num_bytes, min_bytes = sum(x.num_bytes for x in receipts), 3 * 8 * NAMESPACE.block_bytes
    assert num_bytes >= min_bytes, f"{num_bytes} bytes erased: at least the {min_bytes} of the KV"
    for prefix in erased:
        assert get(tier, prefix) == 0
        assert_nowhere(prefix, medium.values().values())
    assert get(tier, conversation(3, tenant=b"b")) == 8
    medium.kill()
    tier = medium.open()
    assert not any(get(tier, prefix) for prefix in erased)
    put(tier, erased[0])
    assert get(tier, erased[0]) == 8, "an erased tenant may store again"


@check
def windows_and_states_match_after_gaps(medium: Medium) -> None:
    """Those before each stored end, and after a restart; another conversation gets its own part."""
    tier = medium.open()
    windows, states = conversation(1, 16, namespace=WINDOW), conversation(1, 8, namespace=STATE)
    assert put_runs(tier, windows, [range(5, 8), range(13, 16)]) == [StoreResult.STORED] * 2
    assert (
        put_runs(tier, states, [range(1, 2), range(3, 4), range(7, 8)]) == [StoreResult.STORED] * 3
    )
    for _ in range(2):
        assert get_places(tier, windows) == [5, 6, 7, 13, 14, 15]
        assert get_places(tier, windows, start_block=7) == [7, 13, 14, 15]
        assert get_places(tier, states) == [1, 3, 7]
        assert get_places(tier, conversation(2, 8, namespace=STATE)) == [1]
        assert get_places(tier, conversation(1, 16)) == [], "full attention has nothing"
        medium.kill()
        tier = medium.open()
    assert put_runs(tier, windows, [range(5, 8)]) == [StoreResult.PRESENT]


@check
def the_last_window_is_leased_with_its_prefix(medium: Medium) -> None:
    """What no gap parts from the end of what is stored; a state alone."""
    tier, keep_until = medium.open(), time.time() + 86_400
    windows, states = conversation(1, 16, namespace=WINDOW), conversation(1, 8, namespace=STATE)
    put_runs(tier, windows, [range(5, 8), range(13, 16)])
    put_runs(tier, states, [range(1, 2), range(7, 8)])
    assert tier.lease(windows, keep_until) == 3 * WINDOW.block_size
    assert tier.lease(states, keep_until) == STATE.block_size
    assert get_places(tier, states) == [1, 7]


@check
def a_closed_tier_misses(medium: Medium) -> None:
    """Calls after ``close`` are results, not exceptions."""
    tier, prefix = medium.open(), conversation(1)
    put(tier, prefix)
    tier.close()
    tier.close()
    assert tier.look_up(prefix, 0) == []
    assert put(tier, prefix) == [StoreResult.OFF] * 2
    assert tier.stats()[0].state == "off"

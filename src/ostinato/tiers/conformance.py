"""The suite that every tier passes, and that a tier of yours can be tested with.

Give it a ``Medium``: something that opens your tier, and can damage what the tier has stored::

    from ostinato.tiers import conformance

    conformance.run(MyMedium)                 # raises AssertionError at the first check that fails
    conformance.storm(MyMedium(), num_faults=10_000)

or, one test for each check::

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_my_tier(check):
        check(MyMedium())

The bytes of every block follow from its namespace, tenant and tokens, so that each byte that a load
returns is compared with what it must be.
"""

import hashlib
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from ostinato.core.errors import ConfigError
from ostinato.tiers.port import KVTier, LoadFault, Namespace, Prefix, StoreResult

NAMESPACE = Namespace(b"weights", b"config", "bfloat16", "layout-1", 4, 64, ("full",))
_FOREVER_S = 60.0


class Medium(Protocol):
    """Where a tier stores, and what can go wrong with it."""

    def open(self) -> KVTier:
        """Open a tier on what is stored; one that was opened before is closed, or killed."""
        ...

    def kill(self) -> None:
        """End the process of the open tier, without warning."""
        ...

    def values(self) -> dict[str, bytes]:
        """Return everything that is stored, by name of file or key."""
        ...

    def put(self, name: str, value: bytes | None) -> None:
        """Replace what is stored; None removes it."""
        ...

    def fail_writes(self, after_bytes: int | None) -> None:
        """Let writes fail after so many more bytes, as on a full disk; None lets them succeed."""
        ...

    def slow_reads(self, seconds: float) -> None:
        """Let each read take so long."""
        ...


Check = Callable[[Medium], None]
CHECKS: list[Check] = []
"""Each takes a fresh medium, and raises AssertionError."""


def run(make_medium: Callable[[], Medium]) -> list[str]:
    """Run every check on a medium of its own; returns their names."""
    for check in CHECKS:
        check(make_medium())
    return [check.__name__ for check in CHECKS]


def payload(prefix: Prefix, first_block: int, num_blocks: int) -> bytes:
    """Return the only right bytes of blocks."""
    size, digests = prefix.namespace.block_bytes, prefix.digests
    wanted = digests[first_block : first_block + num_blocks]
    return b"".join(hashlib.shake_128(digest).digest(size) for digest in wanted)


def conversation(
    number: int, num_blocks: int = 8, tenant: bytes = b"", namespace: Namespace = NAMESPACE
) -> Prefix:
    """Return tokens that share their first two blocks with all conversations."""
    rng, size = random.Random(number), namespace.block_size
    tokens = [7] * (2 * size) + [rng.randrange(50_000) for _ in range((num_blocks - 2) * size)]
    return Prefix(namespace, tenant, array("I", tokens[: num_blocks * size]))


def put(tier: KVTier, prefix: Prefix, blocks_each: int = 4) -> list[StoreResult]:
    """Store a prefix as extents of some blocks each."""
    runs = [
        (first, min(blocks_each, prefix.num_blocks - first))
        for first in range(0, prefix.num_blocks, blocks_each)
    ]
    return tier.store([(prefix.extent(*run), payload(prefix, *run)) for run in runs])


def get(tier: KVTier, prefix: Prefix, start_block: int = 0) -> int:
    """Load what is stored of a prefix, as an engine does; returns how many blocks are right.

    Raises:
        AssertionError: A byte is wrong.
    """
    size, block = prefix.namespace.block_bytes, start_block
    for ref in tier.look_up(prefix, block * prefix.namespace.block_size):
        assert ref.start == block * prefix.namespace.block_size, "references are not consecutive"
        into = memoryview(bytearray(ref.num_blocks * size))
        result = tier.load(ref, into, ref.num_blocks, time.monotonic() + _FOREVER_S)
        right = payload(prefix, block, result.num_blocks)
        assert bytes(into[: result.num_blocks * size]) == right, "wrong bytes were loaded"
        assert (result.fault is None) == (result.num_blocks == ref.num_blocks)
        block += result.num_blocks
        if result.fault is not None:
            break
    return block - start_block


def check(function: Check) -> Check:
    """Add a check to the suite."""
    CHECKS.append(function)
    return function


@check
def what_is_stored_is_found_after_a_restart(medium: Medium) -> None:
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
    """A caller with room for some blocks reads no more."""
    tier, prefix = medium.open(), conversation(1)
    put(tier, prefix, blocks_each=8)
    ref = tier.look_up(prefix, 0)[0]
    count = min(3, ref.num_blocks)
    into = memoryview(bytearray(count * NAMESPACE.block_bytes))
    result = tier.load(ref, into, count, time.monotonic() + _FOREVER_S)
    assert (result.num_blocks, result.fault) == (count, None)
    assert bytes(into) == payload(prefix, 0, count)


@check
def nothing_crosses_tenants(medium: Medium) -> None:
    """Equal tokens of two tenants are two things, also for a client's own salt."""
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
    """What is there is not written again."""
    tier = medium.open()
    put(tier, conversation(1))
    before = sum(map(len, medium.values().values()))
    assert put(tier, conversation(1)) == [StoreResult.PRESENT] * 2
    assert sum(map(len, medium.values().values())) == before


@check
def a_flipped_bit_is_a_miss(medium: Medium) -> None:
    """Any bit of anything stored; nine conversations, one flip at a time."""
    _damage(medium, _flip_bit, num_faults=20)


@check
def a_short_value_is_a_miss(medium: Medium) -> None:
    """Anything stored ends early."""
    _damage(medium, _cut_off, num_faults=20)


@check
def swapped_records_are_a_miss(medium: Medium) -> None:
    """Two stored things, or two pieces of them, in each other's place."""
    _damage(medium, _swap, num_faults=20)


@check
def a_lost_value_is_a_miss(medium: Medium) -> None:
    """The server evicted it, or a file was removed."""
    _damage(medium, _lose, num_faults=5)


@check
def old_content_that_returns_is_never_wrong(medium: Medium) -> None:
    """A backup is restored under a living conversation."""
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
    """The medium is full after any number of bytes: a result says so, look-ups find none of it."""
    for number, after in enumerate((0, 1, 100, 300, 700, 1000)):
        tier, prefix = medium.open(), conversation(number, 16, tenant=b"%d" % number)
        medium.fail_writes(after)
        results = put(tier, prefix)
        stored = 4 * sum(result is StoreResult.STORED for result in results)
        assert stored < 16, f"16 blocks were stored after {after} bytes; writes fail behind them"
        assert get(tier, prefix) <= stored
        medium.fail_writes(None)
        medium.kill()
        tier = medium.open()
        put(tier, prefix)
        assert get(tier, prefix) == 16, "a medium that recovered is not used"
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
    assert result.fault is LoadFault.DEADLINE and result.num_blocks < 8
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
    """A lease covers what is stored, and rewrites no payload."""
    tier = medium.open()
    put(tier, conversation(1))
    assert tier.lease(conversation(1), time.time() + 86_400) == 32
    assert tier.lease(conversation(2), time.time() + 86_400) == 8
    assert tier.lease(conversation(3, tenant=b"other"), time.time() + 86_400) == 0
    assert get(tier, conversation(1)) == 8


@check
def what_was_erased_is_nowhere(medium: Medium) -> None:
    """A search of all bytes finds neither tokens nor KV; other tenants keep theirs."""
    tier = medium.open()
    mine = [conversation(1, tenant=b"a"), conversation(2, tenant=b"a\x1fclient")]
    continuing = replace(conversation(4, tenant=b"c"), public_prefix=b"a")
    for prefix in (*mine, continuing, conversation(3, tenant=b"b")):
        put(tier, prefix)
    receipts = tier.erase(b"a")
    assert all(receipt.complete for receipt in receipts), "erased, and not all of it"
    num_extents = sum(receipt.num_extents for receipt in receipts)
    assert num_extents >= 6, f"{num_extents} extents erased: at least the 6 that were stored"
    num_bytes, least = sum(x.num_bytes for x in receipts), 3 * 8 * NAMESPACE.block_bytes
    assert num_bytes >= least, f"{num_bytes} bytes erased: at least the {least} of the KV"
    for prefix in (*mine, continuing):
        assert get(tier, prefix) == 0
        assert_nowhere(prefix, medium.values().values())
    assert get(tier, conversation(3, tenant=b"b")) == 8
    medium.kill()
    tier = medium.open()
    assert [get(tier, prefix) for prefix in (*mine, continuing)] == [0, 0, 0]
    put(tier, mine[0])
    assert get(tier, mine[0]) == 8, "an erased tenant may return"


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


def assert_nowhere(prefix: Prefix, values: Iterable[bytes]) -> None:
    """Raise AssertionError if any value has a block's KV, or four of its own tokens in a row."""
    needles = [payload(prefix, i, 1)[:16] for i in range(prefix.num_blocks)]
    needles.append(prefix.packed[-16:])
    for value in values:
        assert not any(needle in value for needle in needles), "erased bytes were found"


@dataclass(frozen=True, slots=True)
class StormReport:
    """What a storm of faults did.

    Attributes:
        num_faults: Faults injected.
        num_blocks: Blocks loaded, each compared with what it must be.
        by_fault: Faults by kind.
    """

    num_faults: int
    num_blocks: int
    by_fault: dict[str, int]


def storm(medium: Medium, num_faults: int, seed: int = 0) -> StormReport:
    """Store and load while things go wrong.

    Raises:
        AssertionError: A wrong byte was loaded.
    """
    rng, kinds, num_blocks = random.Random(seed), Counter[str](), 0
    tier = medium.open()
    for number in range(num_faults):
        recent = [_stormy(max(0, number - age)) for age in range(4)]
        kind = rng.choice((_flip_bit, _cut_off, _swap, _lose, _half_store, _kill))
        kinds[kind.__name__.strip("_")] += 1
        put(tier, recent[0])
        if kind is _half_store:
            medium.fail_writes(rng.randrange(1500))
            put(tier, _stormy(number + num_faults))
            medium.fail_writes(None)
        elif kind is not _kill:
            kind(medium, rng)
        if kind in (_kill, _half_store) or rng.random() < 0.3:
            medium.kill()
            tier = medium.open()
        num_blocks += sum(get(tier, prefix, rng.choice((0, 0, 3))) for prefix in recent)
        if number % 50 == 49:
            tier.erase(b"%d" % rng.randrange(3))
        get(tier, _stormy(number + num_faults))
    medium.kill()
    return StormReport(num_faults, num_blocks, dict(kinds))


def _stormy(number: int) -> Prefix:
    return conversation(number, tenant=b"%d" % (number % 3))


def _damage(
    medium: Medium, fault: Callable[[Medium, random.Random], None], num_faults: int
) -> None:
    rng, tier = random.Random(1), medium.open()
    for number in range(num_faults):
        put(tier, conversation(number))
        fault(medium, rng)
        for recent in range(max(0, number - 8), number + 1):
            get(tier, conversation(recent))
        if number % 2:
            medium.kill()
            tier = medium.open()
            get(tier, conversation(number))


def _some_value(medium: Medium, rng: random.Random) -> tuple[str, bytes]:
    values = {name: value for name, value in medium.values().items() if value}
    return rng.choice(sorted(values.items())) if values else ("", b"")


def _flip_bit(medium: Medium, rng: random.Random) -> None:
    name, value = _some_value(medium, rng)
    if value:
        flipped = bytearray(value)
        flipped[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        medium.put(name, bytes(flipped))


def _cut_off(medium: Medium, rng: random.Random) -> None:
    name, value = _some_value(medium, rng)
    if value:
        medium.put(name, value[: rng.randrange(len(value))])


def _swap(medium: Medium, rng: random.Random) -> None:
    (one, first), (other, second) = _some_value(medium, rng), _some_value(medium, rng)
    if one != other:
        medium.put(one, second)
        medium.put(other, first)
    elif len(first) >= 2048:  # two runs of sectors of one file
        at, to = (512 * rng.randrange(len(first) // 512) for _ in range(2))
        size = 512 * rng.randrange(1, 4)
        value, size = bytearray(first), min(size, len(first) - max(at, to))
        value[at : at + size], value[to : to + size] = (
            first[to : to + size],
            first[at : at + size],
        )
        medium.put(one, bytes(value))


def _lose(medium: Medium, rng: random.Random) -> None:
    name, value = _some_value(medium, rng)
    if value:
        medium.put(name, None)


def _half_store(medium: Medium, rng: random.Random) -> None:
    """Marks the fault that ``storm`` injects by itself."""


def _kill(medium: Medium, rng: random.Random) -> None:
    """Marks the fault that ``storm`` injects by itself."""

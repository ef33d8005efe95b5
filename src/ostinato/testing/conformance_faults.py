"""Faults of a medium, one kind at a time or mixed: damage, half stores and kills."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.testing.conformance_medium import (
    NAMESPACE,
    STATE,
    WINDOW,
    Medium,
    conversation,
    get,
    put,
    put_runs,
)
from ostinato.tiers.port import KVTier, Prefix

Fault = Callable[[Medium, random.Random], None]


@dataclass(frozen=True, slots=True)
class StormReport:
    """Result of a storm.

    Attributes:
        num_faults: Faults injected.
        num_blocks: Blocks loaded, each compared with what it must be.
        by_fault: Faults by kind.
    """

    num_faults: int
    num_blocks: int
    by_fault: dict[str, int]


def storm(medium: Medium, num_faults: int, seed: int = 0) -> StormReport:
    """Store, lease and load full attention, windows and states while random faults occur.

    Raises:
        AssertionError: A wrong byte was loaded.
    """
    rng, kinds, num_blocks = random.Random(seed), Counter[str](), 0
    tier = medium.open()
    for number in range(num_faults):
        recent = [_stormy(max(0, number - age)) for age in range(4)]
        kind = rng.choice((*_DAMAGE, "half_store", "kill"))
        kinds[kind] += 1
        _store(tier, recent[0])
        if rng.random() < 0.1:
            tier.lease(recent[1], time.time() + 1)
        if kind == "half_store":
            medium.fail_writes(rng.randrange(1500))
            _store(tier, _stormy(number + num_faults))
            medium.fail_writes(None)
        elif kind != "kill":
            _DAMAGE[kind](medium, rng)
        if kind in ("kill", "half_store") or rng.random() < 0.3:
            medium.kill()
            tier = medium.open()
        num_blocks += sum(get(tier, prefix, rng.choice((0, 0, 3))) for prefix in recent)
        if number % 50 == 49:
            tier.erase(b"%d" % rng.randrange(3))
        get(tier, _stormy(number + num_faults))
    medium.kill()
    return StormReport(num_faults, num_blocks, dict(kinds))


def _stormy(number: int) -> Prefix:
    namespace = (NAMESPACE, WINDOW, STATE)[number // 3 % 3]
    return conversation(number, tenant=b"%d" % (number % 3), namespace=namespace)


def _store(tier: KVTier, prefix: Prefix) -> None:
    if prefix.namespace.is_sparse:
        put_runs(tier, prefix, (range(1, 4), range(6, 8)))
    else:
        put(tier, prefix)


def damage(medium: Medium, fault: Fault, num_faults: int) -> None:
    """Damage what was stored repeatedly, windows and states too; no wrong byte may be loaded."""
    rng, tier = random.Random(1), medium.open()
    for number in range(num_faults):
        _store(tier, _stormy(number))
        fault(medium, rng)
        for recent in range(max(0, number - 8), number + 1):
            get(tier, _stormy(recent))
        if number % 2:
            medium.kill()
            tier = medium.open()
            get(tier, _stormy(number))


def _some_value(medium: Medium, rng: random.Random) -> tuple[str, bytes]:
    values = {name: value for name, value in medium.values().items() if value}
    return rng.choice(sorted(values.items())) if values else ("", b"")


def flip_bit(medium: Medium, rng: random.Random) -> None:
    """Flip a bit of anything stored."""
    name, value = _some_value(medium, rng)
    if value:
        flipped = bytearray(value)
        flipped[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        medium.put(name, bytes(flipped))


def cut_off(medium: Medium, rng: random.Random) -> None:
    """Truncate anything stored."""
    name, value = _some_value(medium, rng)
    if value:
        medium.put(name, value[: rng.randrange(len(value))])


def swap(medium: Medium, rng: random.Random) -> None:
    """Exchange two stored values, or two pieces of one."""
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


def lose(medium: Medium, rng: random.Random) -> None:
    """Remove anything stored."""
    name, value = _some_value(medium, rng)
    if value:
        medium.put(name, None)


_DAMAGE: dict[str, Fault] = {each.__name__: each for each in (flip_bit, cut_off, swap, lose)}

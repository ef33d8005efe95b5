"""What the conformance suite stores, and the ``Medium`` that it stores to.

A block's bytes are derived from its namespace, tenant and tokens, so that every loaded byte can be
checked.
"""

import hashlib
import random
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from ostinato.tiers.port import KVTier, Namespace, Prefix, StoreResult

NAMESPACE = Namespace(b"weights", b"config", "bfloat16", "layout-1", 4, 64, ("full",))
WINDOW = replace(NAMESPACE, layer_groups=("window-9",))
STATE = replace(NAMESPACE, block_size=8, block_bytes=640, layer_groups=("state",))
"""What models with windows and states store besides: blocks after gaps, and one block at a time."""

FOREVER_S = 60.0
"""Deadline of loads that should not time out."""


class Medium(Protocol):
    """Where a tier stores, and the faults that it can have."""

    def open(self) -> KVTier:
        """Open a tier on what is stored; an earlier one is closed, or killed."""

    def kill(self) -> None:
        """Kill the process of the open tier."""

    def values(self) -> dict[str, bytes]:
        """Return everything stored, by the name of its file or key."""

    def put(self, name: str, value: bytes | None) -> None:
        """Replace a stored value; None removes it."""

    def fail_writes(self, after_bytes: int | None) -> None:
        """Make writes fail after this many more bytes, as on a full disk; None ends that."""

    def slow_reads(self, seconds: float) -> None:
        """Make each read take this long."""


def payload(prefix: Prefix, first_block: int, num_blocks: int) -> bytes:
    """Return the correct bytes of blocks."""
    size, digests = prefix.namespace.block_bytes, prefix.digests
    block_digests = digests[first_block : first_block + num_blocks]
    return b"".join(hashlib.shake_128(digest).digest(size) for digest in block_digests)


def conversation(
    number: int, num_blocks: int = 8, tenant: bytes = b"", namespace: Namespace = NAMESPACE
) -> Prefix:
    """Return tokens of which the first two blocks are the same in all conversations."""
    rng, size = random.Random(number), namespace.block_size
    tokens = [7] * (2 * size) + [rng.randrange(50_000) for _ in range((num_blocks - 2) * size)]
    return Prefix(namespace, tenant, array("I", tokens[: num_blocks * size]))


def put(tier: KVTier, prefix: Prefix, blocks_each: int = 4) -> list[StoreResult]:
    """Store a prefix as extents of some blocks each."""
    ends = (*range(0, prefix.num_blocks, blocks_each), prefix.num_blocks)
    return put_runs(tier, prefix, (range(*run) for run in pairwise(ends)))


def put_runs(tier: KVTier, prefix: Prefix, runs: Iterable[range]) -> list[StoreResult]:
    """Store runs of blocks of a prefix, an extent each."""
    return tier.store(
        [(prefix.extent(run.start, len(run)), payload(prefix, run.start, len(run))) for run in runs]
    )


def get(tier: KVTier, prefix: Prefix, start_block: int = 0) -> int:
    """Load what is stored of a prefix; returns the number of blocks, as ``get_places`` does."""
    return len(get_places(tier, prefix, start_block))


def get_places(tier: KVTier, prefix: Prefix, start_block: int = 0) -> list[int]:
    """Load what is stored of a prefix, as an engine does; returns the places of its blocks.

    Raises:
        AssertionError: A byte is wrong, or there is a gap in a prefix that is not sparse.
    """
    namespace, places, block = prefix.namespace, list[int](), start_block
    for ref in tier.look_up(prefix, start_block * namespace.block_size):
        first = ref.start // namespace.block_size
        assert first == block or namespace.is_sparse, "references are not consecutive"
        into = memoryview(bytearray(ref.num_blocks * namespace.block_bytes))
        result = tier.load(ref, into, ref.num_blocks, time.monotonic() + FOREVER_S)
        right = payload(prefix, first, result.num_blocks)
        assert bytes(into[: len(right)]) == right, "wrong bytes were loaded"
        assert (result.fault is None) == (result.num_blocks == ref.num_blocks)
        places += range(first, first + result.num_blocks)
        block = first + ref.num_blocks
        if result.fault is not None and not namespace.is_sparse:
            break
    return places


def assert_nowhere(prefix: Prefix, values: Iterable[bytes]) -> None:
    """Raise AssertionError if a value has KV of a block, or four consecutive tokens of it."""
    needles = [payload(prefix, i, 1)[:16] for i in range(prefix.num_blocks)]
    needles.append(prefix.packed[-16:])
    for value in values:
        assert not any(needle in value for needle in needles), "erased bytes were found"

"""What the conformance suite stores, and where: right bytes for every block, and a ``Medium``.

The bytes of every block follow from its namespace, tenant and tokens, so that each byte that a load
returns is compared with what it must be.
"""

import hashlib
import random
import time
from array import array
from collections.abc import Iterable
from typing import Protocol

from ostinato.tiers.port import KVTier, Namespace, Prefix, StoreResult

NAMESPACE = Namespace(b"weights", b"config", "bfloat16", "layout-1", 4, 64, ("full",))
FOREVER_S = 60.0
"""For loads that are not to end early."""


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
        result = tier.load(ref, into, ref.num_blocks, time.monotonic() + FOREVER_S)
        right = payload(prefix, block, result.num_blocks)
        assert bytes(into[: result.num_blocks * size]) == right, "wrong bytes were loaded"
        assert (result.fault is None) == (result.num_blocks == ref.num_blocks)
        block += result.num_blocks
        if result.fault is not None:
            break
    return block - start_block


def assert_nowhere(prefix: Prefix, values: Iterable[bytes]) -> None:
    """Raise AssertionError if any value has a block's KV, or four of its own tokens in a row."""
    needles = [payload(prefix, i, 1)[:16] for i in range(prefix.num_blocks)]
    needles.append(prefix.packed[-16:])
    for value in values:
        assert not any(needle in value for needle in needles), "erased bytes were found"

"""Blocks, their states, and the entries that indexes keep of them.

A block is a number: the KV of ``block_size`` tokens is in slots ``id * block_size ..``.
It is in exactly one of four states::

    free ────allocate──► private ──publish──► held ◄──acquire/release──► evictable
       ▲                    │                                               │
       └───────free─────────┘◄──────────────────evict───────────────────────┘

* free: without content;
* private: written by one request, not findable;
* held: published in an index, and read by at least one live request;
* evictable: published, and read by none; it can be given away, and is found until it is.

The unit that indexes hold, release and evict is a ``CacheEntry``: one block in the hash index, a
radix node with a run of blocks in the radix index.
"""

from collections.abc import Sequence
from typing import Any

from ostinato.core.identity import Identity


class CacheEntry:
    """Published content that is held, released and evicted as one.

    Attributes:
        ref_count: Live requests that hold it.
        identity: What sequences must agree on to find it.
        born_s: When it was published, by the clock.
        idle_tick: When it last became evictable, in pool ticks; orders the queue.
        idle_since_s: The same moment by the clock.
        idle_allocated: The same moment in blocks given away so far.
        uses: How often it was published or acquired, as far as the eviction policy remembers.
        policy_state: The eviction policy's own.
    """

    __slots__ = (
        "born_s", "identity", "idle_allocated", "idle_since_s", "idle_tick", "policy_state",
        "ref_count", "uses",
    )  # fmt: skip

    def __init__(self, identity: Identity) -> None:
        """Make an entry that is neither held nor queued."""
        self.identity = identity
        self.ref_count = 0
        self.born_s = 0.0
        self.idle_tick = 0
        self.idle_since_s = 0.0
        self.idle_allocated = 0
        self.uses = 1
        self.policy_state: Any = None

    # An entry of no index has no content; those of an index override all of these.

    @property
    def blocks(self) -> Sequence[int]:
        """Block ids in token order."""
        return ()

    @property
    def num_blocks(self) -> int:
        """Blocks that become free when it is evicted."""
        return 0

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content builds on it (law 8: tails go before roots)."""
        return True

    def name_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens and extras of its ``index``-th block."""
        return b""

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the position and the packed tokens of its blocks from its ``first``-th on."""
        return 0, b""

"""Blocks, their states, and the entries that indexes keep of them.

A block is a number: the KV of ``block_size`` tokens is in slots ``id * block_size ..``.
It is in exactly one of four states::

    unused ───allocate──► private ──publish──► held ◄──acquire/release──► evictable
       ▲                    │                                               │
       └───────free─────────┘◄──────────────────evict───────────────────────┘

* unused: without content;
* private: written by one request, not findable;
* held: published in an index, and read by at least one live request;
* evictable: published, and read by none; it can be evicted, and is found until it is.

Unused and evictable blocks are free: they can be allocated.

The unit that indexes hold, release and evict is a ``CacheEntry``: one block in the hash index, a
radix node with a run of blocks in the radix index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.identity import BlockKey, Identity


@dataclass(slots=True, eq=False, repr=False)
class CacheEntry:
    """Published content that is held, released and evicted as one."""

    identity: Identity  # what sequences must agree on to find it
    blocks: Sequence[int] = ()  # ids in token order
    num_blocks: int = 0  # blocks that become free when it is evicted; 0 once it is
    ref_count: int = 0  # live requests that hold it
    born_s: float = 0.0  # when it was published, by the clock
    idle_tick: int = 0  # when it last became evictable, in pool ticks; orders the queue
    idle_since_s: float = 0.0  # the same moment by the clock
    idle_allocated: int = 0  # the same moment in blocks allocated so far
    uses: int = 1  # how often it was published or acquired, as far as the policy remembers
    policy_state: Any = None  # the eviction policy's own

    # Indexes override these; an entry without blocks stands for one that was evicted.

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content builds on it (law 8: tails go before roots)."""
        return True

    def block_key(self, index: int, block_size: int) -> BlockKey:
        """Return what identifies its ``index``-th block among continuations of its prefix."""
        return BlockKey(b"", (), 0)

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the position and the packed tokens of its blocks from its ``first``-th on."""
        return 0, b""

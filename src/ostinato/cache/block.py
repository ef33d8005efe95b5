"""Blocks, the states they are in, and the entries that indexes keep of them.

A block is a number: the KV of ``block_size`` tokens is in slots ``id * block_size ..``.
It is in exactly one of four states::

    free ────allocate──► private ──publish──► held ◄──acquire/release──► evictable
       ▲                    │                                               │
       └───────free─────────┘◄──────────────────evict───────────────────────┘

* free: without content;
* private: written by one request, not findable;
* held: published in an index, and read by at least one live request;
* evictable: published, and read by none; it can be given away, and is found until it is.

The unit that indexes hold, release and evict is a ``CacheEntry``: one block in the hash
index, a radix node with a run of blocks in the radix index. Entries carry the links of the
eviction queue themselves, so that any of them leaves the queue in O(1) (vLLM's design).
"""

from typing import Any

from ostinato.core.identity import Identity
from ostinato.core.ids import BlockId


class CacheEntry:
    """Published content that is held, released and evicted as one.

    Attributes:
        prev: Entry before this one in the eviction queue; None outside of it.
        next: Entry after this one; None outside of it.
        ref_count: Live requests that hold it.
        identity: What sequences must agree on to find it.
        born_s: When it was published, by the clock.
        idle_tick: When it last became evictable, in pool ticks; orders the queue.
        idle_since_s: The same moment by the clock.
        idle_allocated: The same moment in blocks given away so far.
        uses: How often it was used: at publication and each time that it was acquired again,
            including what the eviction policy remembers from before an eviction.
        policy_state: The eviction policy's own state.
    """

    __slots__ = (
        "born_s",
        "identity",
        "idle_allocated",
        "idle_since_s",
        "idle_tick",
        "next",
        "policy_state",
        "prev",
        "ref_count",
        "uses",
    )

    def __init__(self, identity: Identity) -> None:
        """Make an entry that is neither held nor queued."""
        self.identity = identity
        self.prev: CacheEntry | None = None
        self.next: CacheEntry | None = None
        self.ref_count = 0
        self.born_s = 0.0
        self.idle_tick = 0
        self.idle_since_s = 0.0
        self.idle_allocated = 0
        self.uses = 1
        self.policy_state: Any = None

    # An entry of no index has no content; those of an index override all of these.

    @property
    def num_blocks(self) -> int:
        """Blocks that become free when it is evicted."""
        return 0

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content builds on it (law 8: tails go before roots)."""
        return True

    @property
    def blocks_tail_first(self) -> list[BlockId]:
        """Its block ids in the order in which they would be evicted."""
        return []

    @property
    def depth(self) -> int:
        """Blocks between the root and its end."""
        return 0

    def name_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens and extras of its ``index``-th block."""
        return b""

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the position and the packed tokens of its blocks from its ``first``-th on."""
        return 0, b""

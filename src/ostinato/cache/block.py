"""What is a block, and which states can it be in?

A block is a number: the KV of ``block_size`` tokens lives in slots ``id * block_size ..``.
It is in exactly one of four states::

    scratch ──allocate──► private ──publish──► held ◄──acquire/release──► evictable
       ▲                     │                                               │
       └───────free──────────┘◄──────────────────evict───────────────────────┘

* scratch: free and without content;
* private: written by one request, found by nobody else;
* held: published in an index, and at least one live request reads it;
* evictable: published, and nobody reads it; it is free and cached at once.

The unit that indexes hold, release and evict is a ``CacheEntry``: one block in the hash
index, a radix node with a run of blocks in the radix index. Entries carry the links of the
free queue themselves, so that any of them leaves the queue in O(1) (vLLM's design).
"""

from typing import Any

from ostinato.core.identity import Identity
from ostinato.core.ids import BlockId


class CacheEntry:
    """Published content that is held, released and evicted as one.

    Attributes:
        prev: Entry before this one in the free queue; None outside of it.
        next: Entry after this one; None outside of it.
        ref_count: Live requests that hold it.
        identity: What sequences must agree on to find it; says whose blocks they are.
        born_s: When it was published, by the clock.
        idle_tick: When it last became evictable, in pool ticks; orders the queue.
        idle_since_s: The same moment by the clock.
        idle_allocated: The same moment in blocks given away so far.
        uses: How often it was in use: at its birth, and each time that it was held again; with
            what is remembered of the time before it was evicted.
        note: What the eviction policy wants to know of it.
    """

    __slots__ = (
        "born_s",
        "identity",
        "idle_allocated",
        "idle_since_s",
        "idle_tick",
        "next",
        "note",
        "prev",
        "ref_count",
        "uses",
    )

    def __init__(self, identity: Identity) -> None:
        """Make an entry that nobody holds and no queue has."""
        self.identity = identity
        self.prev: CacheEntry | None = None
        self.next: CacheEntry | None = None
        self.ref_count = 0
        self.born_s = 0.0
        self.idle_tick = 0
        self.idle_since_s = 0.0
        self.idle_allocated = 0
        self.uses = 1
        self.note: Any = None

    @property
    def num_blocks(self) -> int:
        """Blocks that become free when nobody holds it."""
        raise AssertionError("an entry knows its blocks")

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content builds on it (law 8: tails go before roots)."""
        raise AssertionError("an entry knows its descendants")

    @property
    def blocks_tail_first(self) -> list[BlockId]:
        """Its block ids in the order in which they would be evicted."""
        raise AssertionError("an entry knows its blocks")

    @property
    def depth(self) -> int:
        """Blocks between the root and its end; 0 where nobody counts them."""
        return 0

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the place and the packed tokens of its blocks from its ``first``-th on.

        Returns:
            Blocks between the root and the first of them, and tokens, as many for each block.
        """
        raise AssertionError("an entry knows its tokens")

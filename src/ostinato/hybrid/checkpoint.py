"""Checkpoints: saved states, and what a sequence holds of the pool of states.

::

    slots    s0        s1        s2          s3        s4
             running   running   1,472 of A  spare     2,176 of B
             └─ one per sequence ─┘└ published ┘└ of a sequence: its last multiple of 64
"""

from array import array
from dataclasses import dataclass, field
from itertools import islice

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import LeastRecentlyUsed, Victim
from ostinato.indexes.block_copy import BlockContent, BlockCopy

_MAX_COMPARED = 256


class Checkpoint(BlockCopy):
    """The state of a prefix, in a slot of its own.

    Attributes:
        num_tokens: Tokens of the prefix.
        last_block: The block of full attention at its end.
        before: The checkpoint that it was computed from; None for the beginning of a prompt.
    """

    __slots__ = ("before", "last_block", "num_tokens")

    def __init__(self, slot: int, content: BlockContent, now_s: float, num_tokens: int) -> None:
        """Make a checkpoint that one request holds."""
        super().__init__(slot, content, now_s)
        self.num_tokens = num_tokens
        self.last_block = -1
        self.before: Checkpoint | None = None

    @property
    def saved_tokens(self) -> int:
        """Tokens that would be computed again without it: those since the one before it."""
        before = self.before
        while before is not None and not before.num_blocks:  # evicted
            before = self.before = before.before
        return self.num_tokens - (0 if before is None else before.num_tokens)


@dataclass(slots=True, eq=False)
class HeldStates:
    """What one sequence holds of the states.

    Attributes:
        tenant: Whose sequence it is.
        blocks: Its own slots: the running state, then the spare one, if it has them.
        source: The checkpoint that hit; held until the step that loads it has run.
        last: The deepest checkpoint on its way so far, for ``Checkpoint.before``.
        cuts: Positions at which its prefill is cut and its state kept, in order.
        saving: Position and slot of what this step saves, to be published after it.
        spare_at: Tokens of the state in the spare slot; 0 if that is empty or being written.
        parent_slot: Of a fork: the running state that it starts from; None otherwise.
        is_load: Whether a tier fills its slot, which becomes the checkpoint of its only cut.
    """

    tenant: bytes
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    source: Checkpoint | None = None
    last: Checkpoint | None = None
    cuts: list[int] = field(default_factory=list)
    saving: tuple[int, int] | None = None
    spare_at: int = 0
    parent_slot: int | None = None
    is_load: bool = False


class LeastSavedWork(LeastRecentlyUsed):
    """Evict the checkpoint that saves the least work per time since its last use.

    All checkpoints have the same size. The work that one saves is counted in tokens since the next
    shallower checkpoint that is still cached, so it grows when that one is evicted; it is weighed
    by the number of uses per time since the last one.

    Cost: the checkpoints used longest ago are compared, at most 256 of them, per victim.

    Source: Marconi, arXiv 2411.19379; hyperbolic caching, USENIX ATC 2017.
    """

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Return the checkpoint that is worth least; among equals, the least recently used."""
        now = next((entry.idle_tick + 1 for entry in reversed(self._queue)), 0)

        def worth(entry: CacheEntry) -> float:
            assert isinstance(entry, Checkpoint)
            return entry.saved_tokens * entry.uses / (now - entry.idle_tick)

        entry = min(islice(self, _MAX_COMPARED), key=worth, default=None)
        return None if entry is None else (entry, 1)

"""What one worker has cached by its events, and whether they are complete.

::

             first batch is 0                     gap, silence, unknown parent
    GUESSED ──────────────────► EXACT ◄─────────────────────────────────────► DEGRADED
       ▲                                    replay, snapshot, all cleared        │
       └── events contradict themselves or the requests' hits, until a restart, ──┘
           a snapshot or all is cleared

Batches after a gap wait until it is filled, up to a limit. A batch number seen before is a
duplicate if the batch is the same, and a restart if not; a replay begins one batch early, so that a
restart between two batches is noticed as well.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from ostinato.router.policy.decision import Resync, WorkerState
from ostinato.router.policy.events import (
    BlockName,
    Cleared,
    EventBatch,
    Removed,
    Stored,
    UnusableEvents,
)
from ostinato.router.policy.prefix_tree import NUM_TIERS, Node, PrefixTree, SharingKey, block_names

WAITING_BATCHES = 4096
"""Batches kept after a gap; with more, a replay is unlikely to fill it."""

REMEMBERED_BATCHES = 256
"""Batches whose times are kept, to tell duplicates from restarts."""

NO_EVENTS = "no events yet"

OnComputed = Callable[[int, int], None]
"""Called with the number of a decision, and the tokens of its prompt that were just computed."""


class EventFeed:
    """Events of one worker, applied to the tree."""

    def __init__(self, tree: PrefixTree, worker: int, name: str, on_computed: OnComputed) -> None:
        """Start without events.

        Args:
            tree: The tree of all workers.
            worker: The worker's bit in the tree.
            name: The worker's name.
            on_computed: Called when expected blocks are stored.
        """
        self.sends_events = False  # neither seen nor announced
        self._tree, self._worker, self._name = tree, worker, name
        self._on_computed = on_computed
        self._blocks: dict[tuple[int, BlockName], Node] = {}
        self._media: list[str] = []  # in the order of their first events: fastest first
        self._group: int | None = None  # of full attention, the one that is tracked
        self._waiting: dict[int, EventBatch] = {}
        self._times: OrderedDict[int, float] = OrderedDict()  # of the newest batches taken
        self._distrust = NO_EVENTS  # why events are not used; empty if they are
        self._missing = ""  # why blocks may be unknown until all is cleared
        self._doubt = ""  # why a replay was asked for
        self._is_restarting = False  # an unknown parent is what the replay is for
        self.next = 0
        self.block_size = 0
        self.cached_tokens = 0
        self.lost_batches = 0
        self.num_live = 0
        self.num_removals = 0

    @property
    def state(self) -> WorkerState:
        """How the worker's cache is known."""
        if self._distrust:
            return WorkerState.GUESSED
        return WorkerState.DEGRADED if self.reason else WorkerState.EXACT

    @property
    def reason(self) -> str:
        """Why it is not known exactly; empty if exact."""
        return self._distrust or self._doubt or self._missing

    @property
    def has_no_events(self) -> bool:
        """Whether nothing is known of its events yet."""
        return self._distrust.startswith(NO_EVENTS)

    def apply(self, batch: EventBatch) -> Resync | None:
        """Apply a batch as it arrives; returns what to fetch."""
        self.sends_events = True
        self.num_live += 1
        if self._distrust and not self.has_no_events:
            return self._trust_again(batch)
        self._distrust = ""
        if batch.sequence < self.next:
            if self._is_duplicate(batch):
                return None
            self.start_over("restarted: its batch numbers began again")
        if batch.sequence == self.next and not self._waiting:
            self._doubt = ""
            return self._apply_all([batch])
        if len(self._waiting) < WAITING_BATCHES:
            self._waiting[batch.sequence] = batch
        return self._ask(f"batches from {self.next} on are missing")

    def begin(self, batches: Iterable[EventBatch]) -> Resync | None:
        """Start over with all batches that can be replayed, at least one."""
        self.start_over("")
        self._distrust, self.sends_events = "", True
        return self.replayed(batches)

    def replayed(self, batches: Iterable[EventBatch]) -> Resync | None:
        """Apply replayed batches; returns a request for a snapshot if a gap remains."""
        if self._distrust:
            return None
        for batch in batches:
            seen = self._times.get(batch.sequence)
            if batch.sequence < self.next and seen is not None and seen != batch.time_s:
                self.start_over("restarted: its batch numbers began again")
                return self._ask(self._doubt)
            if batch.sequence >= self.next:
                self._waiting[batch.sequence] = batch
        if self._waiting and self.next not in self._waiting:
            return Resync(self._name, self.next, snapshot=True)
        self._doubt = ""
        resync = self._apply_waiting()
        self._is_restarting = self._is_restarting and resync is not None
        return resync

    def restore(self, sequence: int, snapshot: EventBatch) -> Resync | None:
        """Replace all blocks by a snapshot of those cached before batch ``sequence``."""
        self._clear()
        self._times.clear()
        self._distrust = self._missing = self._doubt = ""
        waiting, self._waiting = self._waiting, {}
        self.next = sequence - 1
        resync = self._apply_all([EventBatch(sequence - 1, snapshot.time_s, snapshot.events)])
        self._times.clear()  # a snapshot's time is not that of its last batch
        self._waiting = {at: each for at, each in waiting.items() if at >= self.next}
        return resync or self._apply_waiting()

    def skip_missing(self) -> None:
        """Clear all blocks, and continue with the next batch: earlier ones are lost."""
        first = min(self._waiting, default=self.next)
        self.lost_batches += max(0, first - self.next)
        self._clear()
        self.next, self._doubt = first, ""
        self._missing = "events were lost: only what was stored since is known"
        self._apply_waiting()

    def start_over(self, reason: str) -> None:
        """Clear everything: the worker has restarted."""
        self._clear()
        self._waiting.clear()
        self._times.clear()
        self.next, self._missing, self._doubt = 0, "", reason
        self._group, self.block_size, self._is_restarting = None, 0, False

    def distrust(self, reason: str) -> None:
        """Clear all blocks, and use no more events: they cannot be right."""
        if not self._distrust or self.has_no_events:
            self.start_over("")
            self._distrust = reason

    def doubt(self, reason: str) -> Resync | None:
        """Doubt that the events are complete; returns what to fetch."""
        if self._distrust == NO_EVENTS:
            self._distrust = f"{NO_EVENTS}: {reason}"
        return self._ask(reason) if self.state is WorkerState.EXACT else None

    def evicted(self) -> None:
        """Record that the tree has evicted one of its blocks."""
        self._missing = "the router's memory does not hold all prefixes: raise max_tracked_tokens"
        self.cached_tokens -= self.block_size
        if 2 * self.cached_tokens < len(self._blocks) * self.block_size:
            self._blocks = {name: node for name, node in self._blocks.items() if node.is_live}

    def _trust_again(self, batch: EventBatch) -> Resync | None:
        """Use events again once all earlier ones are irrelevant."""
        cleared = [at for at, event in enumerate(batch.events) if isinstance(event, Cleared)]
        if not cleared and batch.sequence:
            return None
        self._distrust, self.next = "", batch.sequence
        events = batch.events[cleared[-1] :] if cleared else batch.events
        return self._apply_all([EventBatch(batch.sequence, batch.time_s, events)])

    def _ask(self, reason: str) -> Resync:
        self._doubt = reason
        too_many = len(self._waiting) >= WAITING_BATCHES
        return Resync(self._name, max(0, self.next - 1), snapshot=too_many)

    def _is_duplicate(self, batch: EventBatch) -> bool:
        seen = self._times.get(batch.sequence)
        if seen is not None:
            return seen == batch.time_s
        newest = next(reversed(self._times.values()), float("inf"))
        return batch.time_s <= newest

    def _apply_waiting(self) -> Resync | None:
        ready: list[EventBatch] = []
        while self.next + len(ready) in self._waiting:
            ready.append(self._waiting.pop(self.next + len(ready)))
        resync = self._apply_all(ready)
        if resync is None and self._waiting and not self._distrust:
            return self._ask(f"batches from {self.next} on are missing")
        return resync

    def _apply_all(self, batches: list[EventBatch]) -> Resync | None:
        """Apply consecutive batches; returns what to fetch."""
        for place, batch in enumerate(batches):
            try:
                for event in batch.events:
                    self._apply(event)
            except UnusableEvents as error:
                self.distrust(str(error))
                return None
            except _UnknownParent as error:
                reason = f"a block was stored after {error}, which is not known"
                self.start_over(reason)
                self._is_restarting = True
                self._waiting = {each.sequence: each for each in batches[place:]}
                return self._ask(reason)
            self.next = batch.sequence + 1
            self._times[batch.sequence] = batch.time_s
            if len(self._times) > REMEMBERED_BATCHES:
                self._times.popitem(last=False)
        return None

    def _apply(self, event: Stored | Removed | Cleared) -> None:
        if isinstance(event, Cleared):
            self._clear()
            self._missing = ""
        elif isinstance(event, Removed):
            self._remove(event)
        elif not event.is_window:
            self._store(event)

    def _store(self, event: Stored) -> None:
        if self._group is None:
            self._group = event.group
        if event.group != self._group:
            return
        tier = self._tier(event.medium)
        if not event.tokens:
            for name in event.hashes:
                if (node := self._blocks.get((event.group, name))) is not None and node.is_live:
                    self._hold(name, node, tier)
            return
        self._check(event)
        node = self._parent(event)
        if node is None:
            return
        names = block_names(event.tokens, event.block_size)
        for place, (name, block) in enumerate(zip(event.hashes, names, strict=True)):
            extra = event.extras[place] if event.extras else b""
            node = self._tree.child(node, block + extra)
            known = self._blocks.get((event.group, name))
            if known is not None and known.is_live and known is not node:
                raise UnusableEvents(f"block {_text(name)} was stored with two contents")
            self._hold(name, node, tier)

    def _check(self, event: Stored) -> None:
        """Refuse an event whose parts contradict each other."""
        size, num_blocks = event.block_size, len(event.hashes)
        if size < 1 or len(event.tokens) != num_blocks * size:
            raise UnusableEvents(
                f"{num_blocks} blocks of {size} tokens were stored with {len(event.tokens)} tokens"
            )
        if event.extras and len(event.extras) != num_blocks:
            raise UnusableEvents(f"{num_blocks} blocks came with {len(event.extras)} extra keys")
        if self.block_size and size != self.block_size:
            raise UnusableEvents(f"blocks of {self.block_size} tokens became blocks of {size}")
        self.block_size = size

    def _parent(self, event: Stored) -> Node | None:
        """Return the parent node; None if it is known to be missing."""
        if event.parent is None:
            return self._tree.root(SharingKey(event.adapter, event.salt, False, event.block_size))
        node = self._blocks.get((event.group, event.parent))
        if node is not None and node.is_live:
            return node
        if not self._missing and not self._is_restarting:
            raise _UnknownParent(_text(event.parent))
        self._missing = self._missing or f"block {_text(event.parent)} is not known"
        return None

    def _hold(self, name: BlockName, node: Node, tier: int) -> None:
        assert self._group is not None
        self._blocks[self._group, name] = node
        if (mark := (node.sent or {}).get(self._worker)) is not None:
            self._on_computed(mark[1], self.block_size)
        if self._tree.hold(node, self._worker, tier):
            self.cached_tokens += self.block_size

    def _remove(self, event: Removed) -> None:
        self.num_removals += 1
        tier = self._tier(event.medium)
        for name in event.hashes:
            node = self._blocks.get((event.group, name))
            if node is None:
                continue
            if self._tree.release(node, self._worker, tier):
                self.cached_tokens -= self.block_size
            if not node.holders >> self._worker & 1:
                del self._blocks[event.group, name]

    def _clear(self) -> None:
        self.num_removals += 1
        self._tree.clear(self._worker)
        self._blocks.clear()
        self.cached_tokens = 0

    def _tier(self, medium: str) -> int:
        """Return the tier of a medium: the first one named is the device."""
        if medium not in self._media and (medium or not self._media):
            self._media.append(medium)
        place = self._media.index(medium) if medium else 0
        if place and not medium.startswith("CPU"):
            return NUM_TIERS - 1
        return min(place, NUM_TIERS - 1)

    def check(self) -> None:
        """Assert that names and tree agree."""
        bit = 1 << self._worker
        live = {id(node) for node in self._blocks.values() if node.is_live}
        held = {id(node) for node in self._tree.items() if node.holders & bit}
        assert held == live, "the worker's names are those of the blocks that it holds"
        assert self.cached_tokens == len(held) * self.block_size
        assert self.state is not WorkerState.EXACT or not self._waiting


class _UnknownParent(Exception):
    """A block was stored after one that was never stored."""


def _text(name: BlockName) -> str:
    return name.hex()[:12] if isinstance(name, bytes) else str(name)

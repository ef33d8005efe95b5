"""A simulated disk behind the pool: its contents and load times.

It is written as an engine writes (``engine.tier_stores``): what is used a second time, and what a
request leaves cached while the pool is full. It evicts by the code of ``DiskTier``
(``tiers.retention``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.observer import CacheObserver
from ostinato.core.identity import PrefixKey
from ostinato.core.request import RequestContext
from ostinato.hybrid.layer_group import to_load
from ostinato.sched.scheduler import Scheduler
from ostinato.sched.sequence import Sequence as SchedSequence
from ostinato.scheduling.held_requests import HeldRequests
from ostinato.settings import WindowConfig
from ostinato.tiers.retention import (
    Retained,
    ReuseClass,
    choose_eviction,
    remember_for_tier,
    reuse_class,
)

LOW_UNUSED = 0.125
"""Share of unused blocks below which all that requests leave cached is written."""

NUM_SEGMENTS = 32
"""Of a disk, as ``DiskTier`` divides one of up to 32 GiB."""


@dataclass(frozen=True, slots=True)
class DiskModel:
    """Settings of a simulated disk.

    Attributes:
        num_blocks: Capacity in blocks of all layers.
        tokens_per_s: How fast it delivers keys and values.
        token_bytes: Of a token in full attention, and in the layers of each window.
    """

    num_blocks: int
    tokens_per_s: float
    token_bytes: tuple[int, ...] = (1,)


Name = tuple[int, int]
"""Of a stored block: its group of layers, and its first token."""


class StoredBlock(Retained):
    """A block of one group of layers on the simulated disk.

    Attributes:
        name: Its group and its first token.
    """

    __slots__ = ("_size", "name")

    def __init__(self, name: Name, size: int) -> None:
        """Note a block without a use."""
        super().__init__()
        self.name, self._size = name, size

    @property
    def size(self) -> int:
        """Bytes of one of its tokens."""
        return self._size


class SimulatedDisk(CacheObserver):
    """Blocks by their first tokens: in a trace, a block's tokens name all before it, too.

    Windows are kept before the ends of what was written, and a hit ends where each has what it
    needs, as in ``engine.tiers.groups``.

    Attributes:
        num_written: Blocks written so far, of any group.
        last_hit_blocks: Stored blocks after the pool's hit, of the prompt admitted last.
    """

    def __init__(
        self,
        model: DiskModel,
        block_size: int,
        windows: Sequence[WindowConfig],
        clock: Callable[[], float],
    ) -> None:
        """Make an empty disk; call ``open`` before the first request.

        Args:
            model: Its settings.
            block_size: Tokens of a block.
            windows: Of the pool, in the order of the disk's bytes.
            clock: Returns the time.
        """
        self._model, self._size, self._clock = model, block_size, clock
        self._windows = [window.window for window in windows]
        self.num_written = self.last_hit_blocks = 0
        self._blocks: dict[Name, StoredBlock] = {}
        self._limit = model.num_blocks * sum(model.token_bytes)
        self._segment_size = max(*model.token_bytes, self._limit // NUM_SEGMENTS)
        self._active: list[StoredBlock] = []
        self._active_size = 0
        self._full: dict[int, list[StoredBlock]] = {}  # by number
        self._unwritten: list[tuple[PrefixKey, int, ReuseClass]] = []  # until the pool is full

    def open(self, manager: CacheManager) -> None:
        """Attach to a pool, and let its policies remember enough for the disk."""
        self._pool = manager.pool
        remember_for_tier(manager.pool.shares.policies, self._model.num_blocks)

    def num_hit_blocks(self, key: PrefixKey, first: int) -> int:
        """Count the blocks on the disk that continue a prompt from its ``first`` block on."""
        end, before = (len(key) + self._size - 2) // self._size, -1
        while end != before:
            before = end
            for group in range(1 + len(self._windows)):
                end = self._longest_hit(key, group, first, end)
        return max(0, end - first)

    def _longest_hit(self, key: PrefixKey, group: int, first: int, end: int) -> int:
        """Return the longest hit, of up to ``end`` blocks, that a group can continue."""
        if not self._model.token_bytes[group]:
            return end
        while end > first:
            needed = range(max(first, self._first_needed(group, end)), end)
            places = needed if not group else reversed(needed)
            missing = (i for i in places if (group, key.tokens[i * self._size]) not in self._blocks)
            if (place := next(missing, end)) == end:
                return end
            end = place
        return first

    def _first_needed(self, group: int, end: int) -> int:
        """Return the first of a group's blocks that a hit of ``end`` blocks needs."""
        if not group:
            return 0
        return max(0, end * self._size - self._windows[group - 1] + 1) // self._size

    def _names(self, key: PrefixKey, num_blocks: int) -> Iterator[Name]:
        """Yield what is kept of a sequence's first blocks, for a hit of all of them."""
        for group, num_bytes in enumerate(self._model.token_bytes):
            first = self._first_needed(group, num_blocks) * self._size
            for name in (
                key.tokens[first : num_blocks * self._size : self._size] if num_bytes else ()
            ):
                yield group, name

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Write what is used a second time, and note what a prompt would have found besides."""
        if context.is_sibling:
            return
        num_shared = table.num_shared_tokens // self._size
        self.last_hit_blocks = self.num_hit_blocks(table.key, num_shared)
        self._write(table.key, num_shared)

    def on_release(
        self, table: BlockTable, num_tokens: int, num_findable: int, sealed: bool
    ) -> None:
        """Note what a request used; if the pool is full, write what it leaves cached."""
        reuse = reuse_class(self._pool.shares.policy_of(table.tenant), table.summary)
        self._unwritten.append((table.key, num_findable // self._size, reuse))
        if self._pool.num_unused < LOW_UNUSED * self._pool.num_blocks:
            for key, num_blocks, known in self._unwritten:
                self._write(key, num_blocks)
                self._use(key, num_blocks, known)
            self._unwritten.clear()

    def _write(self, key: PrefixKey, num_blocks: int) -> None:
        """Write a sequence's first blocks that are not stored yet."""
        for name in self._names(key, num_blocks):
            if name not in self._blocks:
                block = StoredBlock(name, self._model.token_bytes[name[0]])
                self._blocks[name] = block
                self.num_written += 1
                self._append(block)

    def _use(self, key: PrefixKey, num_blocks: int, reuse: ReuseClass) -> None:
        """Note that a request used a sequence's first blocks."""
        now_s = self._clock()
        for name in self._names(key, num_blocks):
            if (block := self._blocks.get(name)) is not None:
                block.use(now_s, reuse)

    def _append(self, block: StoredBlock) -> None:
        if self._active_size + block.size > self._segment_size:
            self._full[self.num_written] = self._active
            self._active, self._active_size = [], 0
            if (len(self._full) + 1) * self._segment_size > self._limit:
                self._evict()
        self._active.append(block)
        self._active_size += block.size

    def _evict(self) -> None:
        room = self._segment_size - max(self._model.token_bytes)
        content = {number: blocks.copy for number, blocks in self._full.items()}
        now_s = self._clock()
        choice = choose_eviction(content, room, room, now_s, lambda block: block.rank(now_s))
        assert choice is not None, "nothing is leased"
        number, kept = choice
        gone = {block.name for block in self._full.pop(number)} - {block.name for block in kept}
        for name in gone:
            del self._blocks[name]
        self._active += kept
        self._active_size += sum(block.size for block in kept)


@dataclass(slots=True, eq=False)
class _Load:
    sequence: SchedSequence
    end: int  # in blocks
    ready_s: float


class SimulatedLoads:
    """Loads of one simulated engine: one after another, at the disk's speed."""

    def __init__(self, model: DiskModel, disk: SimulatedDisk, held: HeldRequests) -> None:
        """Start without a load."""
        self._model, self._disk, self._held = model, disk, held
        self._loads: list[_Load] = []
        self._landed: list[tuple[BlockTable, int]] = []
        self._free_s = 0.0

    @property
    def next_ready_s(self) -> float:
        """When the next load ends; infinite without one."""
        return min((load.ready_s for load in self._loads), default=float("inf"))

    def begin(
        self, sequence: SchedSequence, block_size: int, now_s: float, compute_s: float
    ) -> None:
        """Load what continues an added request's hit, if that is faster than computing it.

        A token takes ``compute_s`` to compute.
        """
        first = sequence.num_known_tokens // block_size
        num_hit_blocks = self._disk.num_hit_blocks(sequence.key, first)
        begun_s = max(now_s, self._free_s)
        ready_s = begun_s + num_hit_blocks * block_size / self._model.tokens_per_s
        if num_hit_blocks and ready_s - now_s <= num_hit_blocks * block_size * compute_s:
            self._free_s = ready_s
            self._loads.append(_Load(sequence, first + num_hit_blocks, ready_s))
            self._held.add(sequence.request.request_id)

    def land(self, scheduler: Scheduler, now_s: float) -> None:
        """Put loaded blocks into the pool, right before a step is planned."""
        for load in [load for load in self._loads if load.ready_s <= now_s]:
            self._loads.remove(load)
            self._held.discard(load.sequence.request.request_id)
            self._put(scheduler.cache, load)

    def release(self, manager: CacheManager) -> None:
        """Release loaded blocks, once their request could be admitted."""
        landed, self._landed = self._landed, []
        for table, num_tokens in landed:
            manager.release(table, num_tokens)

    def _put(self, manager: CacheManager, load: _Load) -> None:
        tokens = load.sequence.key.tokens[: load.end * manager.block_size]
        key = PrefixKey(load.sequence.key.identity, tokens)
        match = to_load(manager.match(key, len(key)), len(key))
        if match.num_shared_tokens == len(key):
            return
        context = RequestContext(is_sibling=True, is_readmission=True)
        admitted = manager.admit(key, match, context=context)
        if admitted is not None:
            manager.publish(admitted[0], len(key))
            manager.commit()
            load.sequence.num_known_tokens = len(key)
            self._landed.append((admitted[0], len(key)))

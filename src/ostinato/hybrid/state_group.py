"""The states of all layers that fold the past into a state of fixed size.

A linear attention, Mamba or convolution layer keeps one state per sequence, which cannot be rolled
back to an earlier position. All such layers share the slots of one pool: a running sequence has a
slot of its own, and a *checkpoint* is the state of a prefix in another slot::

    step 1   load    zero ──► s0         a prompt of 2,200 begins
             compute tokens 0 .. 1,600 in s0
             save    s0 ──► s1           findable from step 2 on: the checkpoint of 1,600
    step 2   load    s1 ──► s2           another prompt hits it, and computes the rest in s2

A hit ends at the deepest checkpoint at or before what the blocks have. What follows is computed
again into private blocks, which ``commit`` exchanges for the cached ones: nothing is kept twice.

While it decodes, a sequence saves its state at every multiple of ``unit`` into one spare slot,
which becomes a checkpoint when it is released: the next turn of a chat, or its return after a
preemption, begins there.

Rules:

1. A slot is free, the running or spare slot of one sequence, being saved to, or a checkpoint.
2. A state is saved after its step, so it is findable from the next one on: never before it is
   computed (law 5). A step that fails leaves no checkpoint.
3. A prefix has one checkpoint at most, found by SHA-256 digest of its last block.
4. A checkpoint whose last block is evicted from full attention cannot hit, and is evicted as well.
5. Checkpoints are optional: where no slot is free to save one, none is saved.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from sys import maxsize

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver, Eviction
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import CachedRun, Removal
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.core.plan import StateCopy
from ostinato.hybrid.checkpoint import Checkpoint, HeldStates
from ostinato.hybrid.layer_group import HybridMatch, LayerGroup, StateCopies
from ostinato.hybrid.placement import Placement
from ostinato.hybrid.prefill_cuts import StateCuts
from ostinato.indexes.block_copy import BlockContent
from ostinato.indexes.block_hash import BlockHasher


@dataclass(slots=True)
class StateStats:
    """Counters of the pool of states since the start.

    Attributes:
        num_kept: Checkpoints that were published.
        num_evicted: Those that made room for others, or lost their blocks.
        num_hits: Requests that began from one.
        num_again_tokens: Tokens whose blocks hit and that were computed again for their states.
    """

    num_kept: int = 0
    num_evicted: int = 0
    num_hits: int = 0
    num_again_tokens: int = 0


class OrphanObserver(CacheObserver):
    """Tells a group of states which blocks of full attention are evicted (rule 4)."""

    def __init__(self) -> None:
        """Observe for no group yet."""
        self.by_block: dict[int, Checkpoint] = {}
        self.orphans: list[Checkpoint] = []

    def on_evict(self, eviction: Eviction) -> None:
        """Note the checkpoints that end with these blocks."""
        if eviction.group == 0 and self.by_block:
            for block in eviction.removal.blocks:
                orphan = self.by_block.pop(block, None)
                if orphan is not None:
                    self.orphans.append(orphan)


class StateGroup(LayerGroup):
    """The states of all layers that keep one.

    Attributes:
        cuts: Where prefills are cut.
        stats: Counters.
    """

    has_rows = False

    def __init__(
        self, pool: BlockPool, hasher: BlockHasher, copies: StateCopies, cuts: StateCuts,
        placement: Placement, observer: OrphanObserver,
    ) -> None:  # fmt: skip
        """Make an empty group over a pool of its own.

        Args:
            pool: Its slots.
            hasher: SHA-256 digests.
            copies: Takes the step's copies of states.
            cuts: Where prefills are cut.
            placement: Learns where prompts branch off.
            observer: Is told of the evictions of full attention.
        """
        self.version = 0
        self.pool = pool
        self.cuts = cuts
        self.stats = StateStats()
        self._hasher = hasher
        self._copies = copies
        self._placement = placement
        self._blocks_per_unit = cuts.unit // hasher.block_size
        self._contents: dict[BlockDigest, Checkpoint] = {}
        self._observer = observer

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that could hit."""
        return len(self._contents)

    # --- hits ---

    def longest_hit(self, key: PrefixKey, num_blocks: int) -> int:
        """Return the blocks before the deepest checkpoint; cost: a look-up per unit."""
        digests, unit = self._hasher.digests(key, num_blocks), self._blocks_per_unit
        for end in range(num_blocks - num_blocks % unit, 0, -unit):
            if digests[end - 1] in self._contents:
                return end
        return 0

    def kept(self, key: PrefixKey, num_blocks: int) -> list[tuple[int, int]]:
        """List the slots of all checkpoints of a prefix, each by the unit that ends with it."""
        digests, unit = self._hasher.digests(key, num_blocks), self._blocks_per_unit
        ends = range(unit, num_blocks + 1, unit)
        saved = ((end // unit - 1, self._contents.get(digests[end - 1])) for end in ends)
        return [(place, checkpoint.block) for place, checkpoint in saved if checkpoint is not None]

    def room(
        self, key: PrefixKey, num_blocks: int, tail: CacheEntry | None, load_end: int = 0
    ) -> int:
        """Return no limit if a slot is free besides the checkpoint that hits; else 0."""
        source = self._find(key, num_blocks)
        is_idle = source is not None and not source.ref_count
        return maxsize if self.pool.num_free_for(key.identity.owner) > is_idle else 0

    def hold(self, key: PrefixKey, match: HybridMatch, tail: CacheEntry | None) -> HeldStates:
        """Hold the checkpoint of a hit, and decide where the prefill is cut."""
        if match.load_end:
            return HeldStates(key.identity.owner, cuts=[match.load_end], is_load=True)
        num_hit, num_seen = match.num_shared_tokens, match.num_seen_tokens
        held = HeldStates(key.identity.owner, source=self._find(key, len(match.blocks)))
        if held.source is not None:
            self.pool.acquire((held.source,))
            held.last = held.source
        if 0 < num_seen < len(key) - self.cuts.unit:
            self._placement.learn(num_seen // self.cuts.unit)
        has_unused = self.pool.num_unused > self.pool.num_blocks // 4
        self.cuts.plan(held, len(key), num_seen, num_hit, has_unused)
        return held

    def release_tail(self, held: HeldStates) -> None:
        """Release the checkpoint that the step has loaded."""
        if held.source is not None and held.blocks:
            self._release_source(held)

    # --- slots of a sequence ---

    def take(self, table: BlockTable, held: HeldStates, num_tokens: int) -> None:
        """Give a table its running slot, and fill it from what hit, or from a fork's parent."""
        if held.blocks:
            return
        held.blocks.extend(self.pool.allocate(table, 1, self))
        slot = table.state_slot = held.blocks[0]
        self.blocks_removed()
        if held.is_load:
            return
        if held.parent_slot is not None:
            self._copies.saves.append(StateCopy(held.parent_slot, slot))
            return
        source = None if held.source is None else held.source.block
        self._copies.loads.append(StateCopy(source, slot))
        self.stats.num_hits += held.source is not None
        seen = min(table.num_seen_tokens, len(table.key) - 1)
        self.stats.num_again_tokens += max(0, seen - table.num_shared_tokens)

    def num_to_fork(self, held: HeldStates, num_blocks: int) -> int:
        """Return the running slot of a fork."""
        return 1

    def fork(self, held: HeldStates) -> HeldStates:
        """Let a fork begin with its parent's state after this step."""
        return HeldStates(held.tenant, last=held.last, parent_slot=held.blocks[0])

    # --- checkpoints ---

    def publish(self, table: BlockTable, held: HeldStates, num_tokens: int) -> tuple[()]:
        """Save the state at the end of the step, if that is a cut or the sequence decodes."""
        if held.saving is not None:  # published before in this step, which now ends later
            held.blocks.append(held.saving[1])
            held.saving = None
        is_cut = num_tokens in held.cuts
        if held.is_load:
            held.saving = (num_tokens, held.blocks.pop()) if is_cut else None
            return ()
        decodes = not held.cuts or num_tokens > held.cuts[-1]
        if num_tokens % self.cuts.unit or not (is_cut or (decodes and self.cuts.keeps_answers)):
            return ()
        if len(held.blocks) > 1:
            slot = held.blocks.pop()
        elif self.pool.num_free_for(table.tenant):
            slot = self.pool.allocate(table, 1, self)[0]
            self.blocks_removed()
        else:
            return ()
        held.spare_at = 0
        held.saving = num_tokens, slot
        self._copies.saves.append(StateCopy(held.blocks[0], slot))
        return ()

    def settle(self, table: BlockTable, held: HeldStates) -> None:
        """Publish what the step has saved at a cut; keep what it saved while decoding."""
        self.blocks_removed()
        if held.saving is None:
            return
        (num_tokens, slot), held.saving = held.saving, None
        ends_there = num_tokens == table.num_planned  # unless more was published in the step
        if ends_there and num_tokens in held.cuts and table.writes:
            self._publish(table, held, num_tokens, slot)
        else:
            held.blocks.append(slot)
            held.spare_at = num_tokens if ends_there else 0

    def retract(self, held: HeldStates) -> None:
        """Free the slot that the failed step was to save to."""
        if held.saving is not None:
            self.pool.free(array("i", [held.saving[1]]), held.tenant)
            held.saving = None

    def release(self, table: BlockTable, held: HeldStates) -> None:
        """Release all slots; the spare one becomes a checkpoint."""
        if held.source is not None:
            self._release_source(held)
        if held.spare_at:
            slot = held.blocks.pop()
            if table.writes:
                self._publish(table, held, held.spare_at, slot)
            else:
                self.pool.free(array("i", [slot]), held.tenant)
        self.pool.free(held.blocks, held.tenant)
        held.blocks, held.spare_at, table.state_slot = array("i"), 0, None
        self.blocks_removed()

    def evict(self, entry: CacheEntry, max_blocks: int) -> Removal:
        """Remove an evictable checkpoint."""
        assert isinstance(entry, Checkpoint) and not entry.ref_count and max_blocks
        self.version += 1
        entry.remove()
        del self._contents[entry.content.digest]
        if self._observer.by_block.get(entry.last_block) is entry:
            del self._observer.by_block[entry.last_block]
        self.stats.num_evicted += 1
        return Removal(array("i", [entry.block]))

    def runs(self) -> Iterator[CachedRun]:
        """Walk all checkpoints."""
        return (CachedRun(None, (checkpoint,)) for checkpoint in self._contents.values())

    def check(self, every: list[HeldStates]) -> None:
        """Assert rules 1 and 3; references are recounted from what is held."""
        checkpoints = [*self._contents.values()]
        self.pool.check_entries(checkpoints, filter(None, (held.source for held in every)))
        assert all(checkpoint.num_tokens % self.cuts.unit == 0 for checkpoint in checkpoints)
        own = [slot for held in every for slot in held.blocks]
        own += [held.saving[1] for held in every if held.saving is not None]
        self.pool.check([*own, *(checkpoint.block for checkpoint in checkpoints)])

    # --- helpers ---

    def _find(self, key: PrefixKey, num_blocks: int) -> Checkpoint | None:
        """Return the checkpoint of a prefix of ``num_blocks`` blocks; None for the beginning."""
        if not num_blocks:
            return None
        return self._contents.get(self._hasher.digests(key, num_blocks)[num_blocks - 1])

    def _publish(self, table: BlockTable, held: HeldStates, num_tokens: int, slot: int) -> None:
        """Make a saved state findable; it is evictable at once, as the newest."""
        key, last = table.key, num_tokens // self._hasher.block_size - 1
        digest = self._hasher.digests(key, last + 1)[last]
        known = self._contents.get(digest)
        if known is not None:
            self.pool.free(array("i", [slot]), held.tenant)
            held.last = known
            return
        name = self._hasher.name(key, last)
        content = BlockContent(key.identity, digest, name)
        kept = Checkpoint(slot, content, self.pool.now(), num_tokens)
        kept.before, kept.last_block = held.last, table.blocks[last]
        self._contents[digest] = held.last = kept
        self._observer.by_block[kept.last_block] = kept
        self.stats.num_kept += 1
        self.pool.release((kept,))

    def _release_source(self, held: HeldStates) -> None:
        assert held.source is not None
        source, held.source = held.source, None
        self.pool.release((source,))

    def blocks_removed(self) -> None:
        """Evict the checkpoints whose last block is gone (rule 4)."""
        orphans, self._observer.orphans = self._observer.orphans, []
        for orphan in orphans:
            if orphan.num_blocks and not orphan.ref_count:
                self.pool.evict(orphan, "space", self)

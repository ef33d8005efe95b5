"""Loads prefixes from tiers into the pool, while other requests compute.

::

    add ──► look-up ──► worth it? ──► blocks allocated ──► read, verified ──► published
            (thread)                  (between steps)      (threads)          (between steps)

While its prefix is looked up or read, a request is held: the scheduler passes over it, and it keeps
its place. The blocks are private to the load until they are complete, so that threads write into
them while steps run; then they are published like computed blocks, and the request hits them. A
load ends at the first bad block; the blocks before it are used.

Rules:

1. Every method is called between steps, by the engine's thread.
2. No request waits longer for a tier than computing its prefix would take.
3. Requests that begin alike share one load.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.errors import PromptTooLong
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.request import RequestContext
from ostinato.engine.tiers.load_note import LoadNote, Rate
from ostinato.engine.tiers.look_up import LookUp, TierHit
from ostinato.engine.tiers.open_tiers import OpenTiers
from ostinato.engine.tiers.prefixes import NamespaceOf, first_tokens, prefix_of
from ostinato.engine.tiers.reader import Read, TierLoad, TierReader, pieces_of
from ostinato.hybrid.layer_group import to_load
from ostinato.sched.sequence import Sequence
from ostinato.scheduling.held_requests import HeldRequests
from ostinato.scheduling.learned_prices import LearnedPrices
from ostinato.tiers.port import LoadFault, TierListener

LOOK_UP_PATIENCE_S = 0.002
"""How long steps wait for a look-up; those of a disk take place in memory."""

LOOK_UP_DEADLINE_S = 1.0
"""After it a request no longer waits for the answer of a server."""

FIRST_PATIENCE_S = 0.5
"""For a load before the speed of computing is measured, unless the estimate is longer."""

LATE_S = 0.1
"""How long after its deadline a read that hangs is left, and its request computed."""

TRY_AGAIN = 32
"""Of loads that seem slower than computing, one in this many is tried: speeds change."""


class TierLoads:
    """Loads in flight."""

    def __init__(
        self,
        opened: OpenTiers,
        manager: CacheManager,
        held: HeldRequests,
        namespace_of: NamespaceOf,
        listener: TierListener,
        estimated_tokens_per_s: float,
        prices: LearnedPrices,
    ) -> None:
        self._listener, self._estimated_tokens_per_s = listener, estimated_tokens_per_s
        self.held = held  # requests that wait for one
        self.reading = Rate()  # of tiers, in bytes
        self.prices = prices  # of computing
        self.num_cheaper = 0  # loads that were not begun because computing is faster
        self.loaded_tokens: dict[str, int] = {}  # by tier
        self.load_seconds = 0.0  # in total
        self.num_faults: dict[str, int] = {}  # loads that ended early, by reason
        self._manager, self._groups = manager, opened.groups
        self._namespace_of = namespace_of
        self._size = manager.block_size
        self._loads: dict[RequestId, TierLoad] = {}
        self._complete: list[tuple[BlockTable, int]] = []  # held until their requests are planned
        # Tokens that the pool had of preempted sequences when tiers were asked for what follows.
        self._returning: dict[tuple[SequenceId, int], int] = {}
        self._reader = TierReader(opened.tier, opened.groups)

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, sequence: Sequence) -> None:
        """Hold a request that has just arrived, while tiers look up its prefix."""
        self._begin(sequence, sequence.num_known_tokens)

    def begin_again(self, preempted: Iterable[Sequence]) -> None:
        """Look up what the pool has evicted of waiting, preempted requests, each time once."""
        returning: dict[tuple[SequenceId, int], int] = {}
        for sequence in preempted:
            name = sequence.sequence_id, sequence.num_preemptions
            known = self._manager.match(sequence.key).num_shared_tokens
            before = self._returning.get(name, len(sequence.key))
            returning[name] = min(known, before)
            if known < before and sequence.request.request_id not in self._loads:
                self._begin(sequence, known)
        self._returning = returning

    def _begin(self, sequence: Sequence, num_known: int) -> None:
        key, first = sequence.key, num_known // self._size
        num_blocks = (len(key) - 1) // self._size  # the last token is computed (law 4)
        if sequence.reading_is_off or num_blocks <= first:
            return
        num_tokens, known = num_blocks * self._size, first * self._size
        prefixes = (
            prefix_of(key, num_tokens, group, self._namespace_of) for group in self._groups.groups
        )
        look_up = LookUp(tuple(prefixes), num_tokens, known)
        load = TierLoad(sequence, look_up, time.monotonic(), self._leader(key, known))
        self._loads[load.name] = load
        self.held.add(load.name)
        if load.after is None:
            self._reader.look_up(load.look_up)

    def poll(self, num_seats: int) -> list[tuple[Sequence, LoadNote]]:
        """Advance every load, right before a step is planned.

        Args:
            num_seats: Sequences that could be admitted now.

        Returns:
            Notes on the loads that have ended, if a tier had anything.
        """
        self._await_look_ups()
        ended = []
        for load in list(self._loads.values()):
            if load.is_obsolete:
                load.stop()
            if self._advance(load, num_seats):
                del self._loads[load.name]
                self.held.discard(load.name)
                if load.note is not None:
                    ended.append((load.sequence, load.note))
            num_seats -= load.table is not None
        return ended

    def wait(self, seconds: float) -> None:
        """Wait until a load is ready, while there is nothing else to do."""
        loads = self._loads.values()
        if loads:
            self._reader.wait_for(lambda: any(load.is_ready for load in loads), seconds)

    def release_loaded(self) -> None:
        """Release what was loaded, once its request has had its chance to be admitted."""
        complete, self._complete = self._complete, []
        for table, num_tokens in complete:
            self._manager.release(table, num_tokens)

    def drain(self, seconds: float | None = None) -> None:
        """End all loads; those whose threads take longer end later, with the next ``poll``."""
        self._end(list(self._loads.values()), seconds)

    def end_loads_of(self, salt: bytes) -> None:
        """End a tenant's loads; waits for the threads that read for it."""
        self._end([x for x in self._loads.values() if x.belongs_to(salt)])

    def has_any_of(self, salt: bytes) -> bool:
        """Whether a thread may still read for a tenant."""
        return any(load.belongs_to(salt) for load in self._loads.values())

    @property
    def blocks_in_use(self) -> list[int]:
        """Blocks of the pool that threads may write into."""
        tables = [load.table for load in self._loads.values() if load.table is not None]
        return [block for table in tables for block in table.blocks]

    def _end(self, loads: list[TierLoad], seconds: float | None = None) -> None:
        for load in loads:
            load.stop()
        reads = [load.read for load in loads if load.read is not None]
        self._reader.wait_for(lambda: not any(read.num_running for read in reads), seconds)
        for load in loads:
            self.held.discard(load.name)
            if load.read is None or (not load.read.num_running and self._publish(load)):
                del self._loads[load.name]
        self.release_loaded()

    def wipe(self) -> None:
        """Overwrite what was read last, in any thread."""
        self._reader.wipe()

    def close(self, seconds: float) -> None:
        """End all loads and the threads."""
        self.drain(seconds)
        self._reader.close(seconds)

    def _leader(self, key: PrefixKey, known: int) -> TierLoad | None:
        """Find a load that will bring more of a sequence than the pool has."""
        for load in self._loads.values():
            common = load.sequence.key.num_common_tokens(key)
            shared = min(common - common % self._size, load.look_up.num_tokens)
            if shared > max(known, load.look_up.first_token):
                return load
        return None

    def _await_look_ups(self) -> None:
        """Wait a moment for new look-ups: a disk answers faster than a step could run."""
        since_s = time.monotonic() - LOOK_UP_PATIENCE_S
        loads = [one for one in self._loads.values() if one.after is None]
        fresh = [x for x in loads if x.look_up.hit is None and x.queued_s > since_s]
        if fresh:
            patience_s = max(load.queued_s for load in fresh) - since_s
            self._reader.wait_for(
                lambda: all(load.look_up.hit is not None for load in fresh), patience_s
            )

    def _advance(self, load: TierLoad, num_seats: int) -> bool:
        """Advance a load as far as possible now; returns whether it has ended."""
        if load.read is not None:
            if time.monotonic() > load.read.deadline + LATE_S:
                self.held.discard(load.name)  # what is read is published nevertheless
            return not load.read.num_running and self._publish(load)
        if load.is_obsolete:
            return True
        if load.after is not None:
            return load.after.name not in self._loads and self._follow(load)
        hit = load.look_up.hit
        if hit is None:
            return time.monotonic() > load.queued_s + LOOK_UP_DEADLINE_S
        if not hit.refs or not self._is_worth_it(load, hit):
            return True
        if num_seats > 0 and self._allocate(load, hit):
            return load.read is None
        self.held.discard(load.name)  # there is no room: it is scheduled, and may load then
        return False

    def _follow(self, load: TierLoad) -> bool:
        """Continue where the load that this one waited for has ended."""
        leader, load.after = load.after, None
        assert leader is not None
        before = load.look_up.first_token
        known = self._manager.match(load.sequence.key).num_shared_tokens
        load.set_known_tokens(known)
        if leader.note is not None:
            load.note = leader.note.between(before, known)
        if load.look_up.num_tokens <= known:
            return True
        load.look_up = replace(
            load.look_up, first_token=known - known % self._size, hit=None, is_cancelled=False
        )
        load.queued_s = time.monotonic()
        self._reader.look_up(load.look_up)
        return False

    def _is_worth_it(self, load: TierLoad, hit: TierHit) -> bool:
        """Whether loading is faster than computing, as far as known; notes it if not."""
        ahead = sum(piece.num_bytes for x in self._loads.values() for piece in x.pieces)
        load_s = self.reading.seconds_for(hit.num_bytes + ahead)
        start = load.look_up.first_token
        compute_s = self.prices.prompt_s(start, hit.end - start)
        if load_s is None or compute_s is None or load_s <= compute_s:
            return True
        self.num_cheaper += 1
        if self.num_cheaper % TRY_AGAIN == 0:
            return True
        load.note = LoadNote(hit.tier, start, hit.end, is_cheaper_to_compute=True)
        return False

    def _allocate(self, load: TierLoad, hit: TierHit) -> bool:
        """Allocate blocks and start to fill them; returns False if there is no room."""
        end, first = hit.end, load.look_up.first_token
        sequence = load.sequence
        if sequence.key.identity.epoch != self._manager.epoch:
            return True  # the weights have changed
        key = first_tokens(sequence.key, end)
        match = to_load(self._manager.match(key, end), end)
        known = match.num_tokens
        if known >= end or known < first:
            return True  # it was computed meanwhile, or its beginning was evicted
        name = f"a load from {hit.tier}"
        context = RequestContext(name, is_sibling=True, is_readmission=True)
        try:
            admitted = self._manager.admit(key, match, context=context)
        except PromptTooLong:
            return True  # pins leave no room for it: planning its request raises the error
        if admitted is None:
            return False
        self._manager.commit()  # it is in no step: one that fails would release its blocks
        load.table, load.began_s = admitted[0], time.monotonic()
        patience_s = self._compute_s(first, end - first)
        pieces = list(pieces_of(self._groups, hit, load.table, known))
        load.read = Read(pieces, load.began_s + patience_s)
        self.held.add(load.name)
        self._reader.read(load.read)
        return True

    def _compute_s(self, start: int, num_tokens: int) -> float:
        """Return how long computing takes; estimated before it was measured, or the patience."""
        if (measured := self.prices.prompt_s(start, num_tokens)) is not None:
            return measured
        return max(FIRST_PATIENCE_S, num_tokens / self._estimated_tokens_per_s)

    def _publish(self, load: TierLoad) -> bool:
        """Publish what was loaded; its blocks are held until its request is planned."""
        hit = load.look_up.hit
        assert load.table is not None and load.read is not None and hit is not None
        note = self._note(load, hit, load.table.num_shared_tokens)
        self._manager.publish(load.table, note.end)
        self._manager.commit()
        self._complete.append((load.table, note.end))
        load.set_known_tokens(note.end)
        load.note = note
        self._report(load, note)
        self._count(load, note, time.monotonic() - load.began_s)
        return True

    def _note(self, load: TierLoad, hit: TierHit, start: int) -> LoadNote:
        """Return what was loaded: of full attention what is good, of windows and states all."""
        note = LoadNote(hit.tier, start, hit.end)
        bad = next((piece for piece in load.pieces if piece.fault is not None), None)
        if self._groups.sparse:
            ref = load.pieces[-1].ref if bad is None else bad.ref
            loaded = hit.end - start if bad is None else 0
            return note.with_part(ref, loaded, None if bad is None else bad.fault)
        for piece in load.pieces:
            note = note.with_part(piece.ref, piece.num_loaded * self._size, piece.fault)
            if piece.fault is not None:
                break
        return note

    def _report(self, load: TierLoad, note: LoadNote) -> None:
        """Report to the listener what tiers have, and what turned out to be bad."""
        prefixes = zip(self._groups.groups, load.look_up.prefixes, strict=True)
        of_group = {group.name: prefix for group, prefix in prefixes}
        damage = LoadFault.CHECKSUM, LoadFault.SHORT, LoadFault.MISSING
        for piece in load.pieces:
            prefix, first = of_group[piece.group.name], piece.ref.start // piece.group.unit
            start = first + piece.num_skipped
            if piece.num_loaded and note.loaded:
                extent = prefix.extent(start, piece.num_loaded)
                self._listener.on_stored(piece.ref.tier, extent)
            if piece.fault in damage:
                bad = prefix.digests[start + piece.num_loaded : first + piece.ref.num_blocks]
                self._listener.on_removed(piece.ref.tier, bad)

    def _count(self, load: TierLoad, note: LoadNote, seconds: float) -> None:
        if note.fault is not None and not load.is_obsolete:
            self.num_faults[str(note.fault)] = self.num_faults.get(str(note.fault), 0) + 1
        self.load_seconds += seconds
        for tier, num_tokens in note.loaded_before(note.end).items():
            self.loaded_tokens[tier] = self.loaded_tokens.get(tier, 0) + num_tokens
        loaded = sum(piece.num_loaded * piece.ref.block_bytes for piece in load.pieces)
        if loaded or note.fault is LoadFault.DEADLINE:
            self.reading.add(max(load.pieces[0].ref.block_bytes, loaded), seconds)

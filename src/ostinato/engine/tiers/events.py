"""Announces what tiers store and remove as KV events, with the tier's name as their medium.

Tiers report from any thread; the engine's thread writes the log. A block of full attention is
announced only after its parent, so what a disk has after a restart is announced when a request
loads it. Windows follow gaps, and are announced without their parents; states are in no event, as
in the pool.
"""

from collections import deque
from collections.abc import Callable, Sequence

from ostinato.cache.manager import CacheManager
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.engine.tiers.groups import STATE, TierGroups
from ostinato.indexes.block_hash import BlockHasher, sha256
from ostinato.observe.event_recorder import stored_events
from ostinato.observe.events import BlockRemoved, EventLog
from ostinato.tiers.port import Extent, TierListener

_MEDIA = {"host": "CPU"}
"""Media that vLLM names; those of other tiers are their names."""


class TierEvents(TierListener):
    """Fills an event log with the blocks of tiers; without a log it does nothing."""

    def __init__(self) -> None:
        self._log: EventLog | None = None
        self._reports: deque[tuple[str, Extent | Sequence[bytes]]] = deque()
        self._announced: dict[tuple[str, bytes], tuple[BlockDigest, Identity, int]] = {}
        self._tiers: set[str] = set()

    def open(
        self,
        log: EventLog | None,
        manager: CacheManager,
        groups: TierGroups,
        is_erased: Callable[[Identity], bool],
    ) -> None:
        """Start to announce what is not being erased; the manager knows the pool's blocks."""
        self._log, self._manager, self._is_erased = log, manager, is_erased
        self._groups: dict[tuple[str, ...], int] = {
            (one.name,): one.number for one in groups.groups if one.name != STATE
        }
        self._hasher = BlockHasher(manager.block_size, sha256)

    def on_stored(self, tier: str, extent: Extent) -> None:
        """Look-ups of a tier find an extent."""
        if self._log is not None and extent.prefix.namespace.layer_groups in self._groups:
            self._reports.append((tier, extent))

    def on_removed(self, tier: str, digests: Sequence[bytes]) -> None:
        """Look-ups of a tier no longer find blocks."""
        if self._log is not None and digests:
            self._reports.append((tier, digests))

    def flush(self) -> None:
        """Log what was reported as a batch of its own, between steps."""
        if self._log is None or not self._reports:
            return
        while self._reports:
            tier, what = self._reports.popleft()
            if isinstance(what, Extent):
                self._store(self._log, tier, what)
            else:
                self._remove(self._log, tier, what)
        self._log.flush()

    def clear(self) -> None:
        """Announce everything again: consumers know that all blocks were cleared."""
        self._reports.clear()
        self._announced.clear()

    def erase(self, salt: bytes) -> None:
        """Announce that a tenant was erased from all tiers, and keep no event of it."""
        self.flush()
        if self._log is None:
            return
        for (tier, digest), (_, identity, _) in list(self._announced.items()):
            if identity.belongs_to(salt):
                self._remove(self._log, tier, [digest])
        self._log.flush()
        self._log.erase(salt)

    def _store(self, log: EventLog, tier: str, extent: Extent) -> None:
        key, names = extent.prefix.sequence, extent.prefix.digests
        assert isinstance(key, PrefixKey), "the engine's prefixes name their sequence"
        if self._is_erased(key.identity):
            return
        group = self._groups[extent.prefix.namespace.layer_groups]
        first, end, size = extent.first_block, extent.end_block, self._hasher.block_size
        while first < end and (tier, names[first]) in self._announced:
            first += 1
        if first == end or not (group or self._is_known(key, first, names[first - 1])):
            return
        digests = self._hasher.digests(key, end)
        medium = _MEDIA.get(tier, tier)
        for event in stored_events(key, digests, first, end, size, group, medium):
            log.add(event)
        for place in range(first, end):
            self._tiers.add(tier)
            identity = key.identity.of_block(place, size)[0]
            self._announced[tier, names[place]] = digests[place], identity, group

    def _is_known(self, key: PrefixKey, first: int, before: bytes) -> bool:
        """Whether consumers know the parent of the first block."""
        if not first or any((tier, before) in self._announced for tier in self._tiers):
            return True
        return len(self._manager.match(key, first * self._hasher.block_size).blocks) >= first

    def _remove(self, log: EventLog, tier: str, names: Sequence[bytes]) -> None:
        gone = [self._announced.pop((tier, name), None) for name in names]
        events: dict[tuple[Identity, int], list[BlockDigest]] = {}
        for digest, identity, group in filter(None, gone):
            events.setdefault((identity, group), []).append(digest)
        for (identity, group), digests in events.items():
            log.add(BlockRemoved(tuple(digests), identity, group, _MEDIA.get(tier, tier)))

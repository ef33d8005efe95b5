"""The port of observers: what the cache does, for rooms that follow it without changing it.

History, counters, events, leases and the ghost are observers, in rooms of their own. Each keeps
what it needs of a request itself, by ``BlockTable.table_id``.

An observer may fail, the cache may not: the cache finishes its change, logs the error once and
detaches the observer, which has missed what it was called for and would be wrong from then on.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PublishResult, Removal
from ostinato.core.request import RequestContext

_log = logging.getLogger(__name__)

EvictionCause = Literal["space", "quota", "removed"]
"""For other content, because the owner is above its quota, or by an administrator."""


@dataclass(slots=True)
class Eviction:
    """Cached blocks that are evicted or removed."""

    cause: EvictionCause
    entry: CacheEntry  # what the blocks belonged to
    removal: Removal
    table: BlockTable | None  # whom they are evicted for; None if for no request
    group: int = 0  # of layers: 0 for full attention


class CacheObserver:
    """The port of observers: the cache calls a method for each of its changes."""

    def on_step(self, unpin: Callable[[BlockTable], None]) -> None:
        """A step is about to be planned; what is pinned may be released by ``unpin``."""

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """A request holds what it found; its new blocks are allocated next."""

    def on_fork(self, parent: BlockTable, child: BlockTable) -> None:
        """A second continuation of a sequence was made."""

    def on_publish(
        self, table: BlockTable, first: int, last: int, result: PublishResult, group: int = 0
    ) -> None:
        """Blocks ``first .. last`` of a table became findable."""

    def on_retract(self, table: BlockTable, removal: Removal, group: int = 0) -> None:
        """A failed step took back what it had published."""

    def on_evict(self, eviction: Eviction) -> None:
        """Cached blocks are evicted or removed."""

    def on_reuse(self, entries: Sequence[CacheEntry], num_allocated: int) -> None:
        """Evictable entries are held again, with the blocks allocated since each was released."""

    def on_release(
        self, table: BlockTable, num_tokens: int, num_findable: int, sealed: bool
    ) -> None:
        """A request ends; it still has its published blocks.

        Args:
            table: Its blocks.
            num_tokens: Tokens that are computed.
            num_findable: Those of them that others can find.
            sealed: Whether its partial last block was published.
        """

    def on_settle(self) -> None:
        """A step has ended, whether it ran or failed; or an operation between steps has."""

    def on_clear(self, everything: bool) -> None:
        """The weights have changed, or everything was removed by an administrator."""


Hook = tuple[tuple[CacheObserver, Callable[..., None]], ...]
"""The observers that have a hook, and its method."""


class Observers:
    """The observers of one cache, its pools included, by hook: each has few of them.

    Attributes:
        active: All that are not detached, in order.
    """

    on_step: Hook
    on_admit: Hook
    on_fork: Hook
    on_publish: Hook
    on_retract: Hook
    on_evict: Hook
    on_reuse: Hook
    on_release: Hook
    on_settle: Hook
    on_clear: Hook

    def __init__(self, observers: Iterable[CacheObserver] = ()) -> None:
        """Observe with these."""
        self._set(tuple(observers))

    def attach(self, *observers: CacheObserver) -> None:
        """Call these after the others."""
        self._set((*self.active, *observers))

    def detach(self, observer: CacheObserver) -> None:
        """Log the error that an observer raises right now, and call it no more."""
        _log.exception(
            "cache observer %s raised and is detached; the cache goes on without it",
            type(observer).__name__,
        )
        self._set(tuple(other for other in self.active if other is not observer))

    def call(self, hook: Hook, *arguments: object) -> None:
        """Call a hook; an observer that raises is detached."""
        for observer, method in hook:
            try:
                method(*arguments)
            except Exception:
                self.detach(observer)

    def _set(self, observers: tuple[CacheObserver, ...]) -> None:
        """Sort observers by hook."""
        self.active = observers
        for hook in (name for name in vars(CacheObserver) if name.startswith("on_")):
            default = getattr(CacheObserver, hook)
            own = [o for o in observers if getattr(getattr(o, hook), "__func__", None) != default]
            setattr(self, hook, tuple((observer, getattr(observer, hook)) for observer in own))

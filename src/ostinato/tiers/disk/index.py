"""Finds the records that continue a prefix: by digests, confirmed by tokens."""

import threading
from collections.abc import Container
from math import inf, nextafter

from ostinato.tiers.disk.segments import Record
from ostinato.tiers.prefix import Prefix
from ostinato.tiers.record import NO_NAME
from ostinato.tiers.retention import Rank, ReuseClass

MAX_PATH = 32
"""Records before one that count for its rank; a gap further up comes nearer with each eviction."""

Match = tuple[Record, int, int]
"""A record, the first of its blocks that matches, and how many do."""


class ExtentIndex:
    """Digest of all tokens up to a block's end -> record, and index of the block in it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._places = dict[bytes, tuple[Record, int]]()
        self._locked = dict[bytes, list[Record]]()  # by the name of the tenant
        self._lock = threading.RLock()
        self._last_use_s = 0.0
        self._removed = set[bytes]()  # digests since the last ``pop_removed``

    def __len__(self) -> int:
        """Blocks that look-ups can find."""
        return len(self._places)

    def num_records(self) -> int:
        """Records that look-ups can find."""
        with self._lock:
            return len({id(record) for record, _ in self._places.values()})

    def add(self, record: Record) -> None:
        """Make a record findable; if two have the same block, the newer one is found."""
        with self._lock:
            for index, digest in enumerate(record.digests):
                if (older := self._places.get(digest)) is not None:
                    older[0].num_indexed -= 1
                self._places[digest] = record, index
            self._removed.difference_update(record.digests)
            record.num_indexed = len(record.digests)

    def remove(self, record: Record, first: int = 0) -> None:
        """Make a record, or its blocks from ``first`` on, unfindable."""
        with self._lock:
            for digest in record.digests[first:]:
                if (place := self._places.get(digest)) is not None and place[0] is record:
                    del self._places[digest]
                    self._removed.add(digest)
                    record.num_indexed -= 1
            locked = self._locked.get(record.header.names[0], [])
            if not record.digests and record in locked:
                locked.remove(record)

    def pop_removed(self) -> list[bytes]:
        """Return the digests of blocks that became unfindable since the last call."""
        with self._lock:
            removed, self._removed = self._removed, set()
        return list(removed)

    def add_locked(self, record: Record) -> None:
        """Add a sealed record, which is findable once its tenant's key is known."""
        with self._lock:
            self._locked.setdefault(record.header.names[0], []).append(record)

    def drop_locked(self, names: Container[bytes]) -> list[Record]:
        """Make sealed records unfindable whose tenant is not among these; returns them."""
        with self._lock:
            lost = [name for name in self._locked if name not in names]
            return [record for name in lost for record in self._locked.pop(name)]

    def unlock(self, name: bytes, key: bytes) -> None:
        """Open the sealed records of a tenant; those that the key does not open stay unfindable."""
        if name not in self._locked:
            return
        with self._lock:
            for record in self._locked.pop(name, ()):
                if record.open(key):
                    self.add(record)

    def is_live(self, record: Record) -> bool:
        """Whether look-ups may find it, now or once its key is known."""
        with self._lock:
            if record.digests:
                return record.num_indexed > 0
            return record in self._locked.get(record.header.names[0], ())

    def use(self, prefix: Prefix, end: int, now_s: float, reuse: ReuseClass | None = None) -> float:
        """Record a use of all blocks before ``end``, the root as much as the tail.

        Returns:
            Its time, also of what is stored with this use.
        """
        with self._lock:
            now_s = self.time_of_use(now_s)
            places = [self._places.get(digest) for digest in prefix.digests[:end]]
            for record in dict.fromkeys(place[0] for place in places if place is not None):
                record.use(now_s, reuse)
            return now_s

    def rank(self, record: Record, now_s: float, known: dict[Record, Rank]) -> Rank:
        """Return the rank of a record: never above one without which it is not reached.

        Args:
            record: A record that look-ups find.
            now_s: The time.
            known: Ranks at this time, which are added to.
        """
        path = list[Record]()
        with self._lock:
            step: Record | None = record
            while step is not None and step not in known and len(path) < MAX_PATH:
                path.append(step)
                step = self._before(step)
            for step in reversed(path):
                worth, used_s, _ = step.rank(now_s)
                before, first_block = self._before(step), step.header.first_block
                if before is not None and before in known:
                    worth, used_s, _ = min((worth, used_s, 0), known[before])
                elif before is None and first_block and _is_own(step):
                    worth, used_s = 0.0, -inf  # after a gap
                known[step] = worth, used_s, -first_block
        return known[record]

    def _before(self, record: Record) -> Record | None:
        """Return the record that ends where one begins; None at a root or after a gap."""
        return self._places.get(record.parent, (None, 0))[0]

    def time_of_use(self, now_s: float) -> float:
        """Return the time of a use: later than all earlier ones, even if the clock goes back."""
        with self._lock:
            self._last_use_s = max(now_s, nextafter(self._last_use_s, inf))
            return self._last_use_s

    def matches(self, prefix: Prefix, block: int, end: int | None = None) -> list[Match]:
        """Return consecutive runs of blocks from ``block`` on, at least up to ``end``."""
        end = prefix.num_blocks if end is None else end
        return self._matches(prefix, block, end, skips_gaps=False)

    def all_matches(self, prefix: Prefix, block: int) -> list[Match]:
        """Return all runs of blocks from ``block`` on that look-ups of a prefix find."""
        sparse = prefix.namespace.is_sparse
        return self._matches(prefix, block, prefix.num_blocks, skips_gaps=sparse)

    def last_matches(self, prefix: Prefix) -> list[Match]:
        """Return the runs of ``all_matches`` that no gap parts from the last one."""
        matches = self.all_matches(prefix, 0)
        for place in range(len(matches) - 1, 0, -1):
            if end_of(matches[place - 1]) < start_of(matches[place]):
                return matches[place:]
        return matches

    def _matches(self, prefix: Prefix, block: int, end: int, skips_gaps: bool) -> list[Match]:
        matches = list[Match]()
        with self._lock:
            while block < end:
                record, index = self._places.get(prefix.digests[block], (None, 0))
                count = record.num_common_blocks(prefix, block, index) if record else 0
                if record is not None and count:
                    matches.append((record, index, count))
                elif not skips_gaps:
                    break
                block += max(1, count)
        return matches


def start_of(match: Match) -> int:
    """Return the place of the first matching block in its sequence."""
    return match[0].header.first_block + match[1]


def end_of(match: Match) -> int:
    """Return the place after the last matching block."""
    return start_of(match) + match[2]


def _is_own(record: Record) -> bool:
    """Whether all tokens before a record are its tenant's, known, and stored without gaps."""
    header = record.header
    return bool(record.digests) and header.names[2] == NO_NAME and not header.is_sparse

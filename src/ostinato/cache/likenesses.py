"""Which likenesses of a cache are served sampled turns, and beside which others are they set?

::

    LruSizes      LRU at every size                       one stack, beside itself at its own size
    Player        another policy, or size                 small cache   ┐ beside one baseline:
    LearnedSizes  a policy that learns, at every size     learned cache ┘ LRU, of the same size

What is compared with LRU is anchored by what LRU has really found, and nothing knows that better
than LRU itself, or a policy with an account against it. Where the cache's own policy is neither,
the baseline is a small cache of that policy.

Likenesses start empty. So does the cache in the first episode; in later ones they count from the
moment on at which four times the size is filled, or from half of the log on.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from math import inf
from typing import Protocol

from ostinato.cache.anchor import Counted
from ostinato.cache.learned_cache import LearnedCache
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.cache.sample import TrafficLog
from ostinato.cache.small_cache import LruStack, SampledTurn, SmallCache
from ostinato.cache.tally import NUM_PARTS, SoFar, Tally
from ostinato.core.config import PolicyName

SIZES = (0.5, 2.0, 4.0)
"""Multiples of the memory for which estimates are made."""

Which = tuple[float, PolicyName]
"""A multiple of the memory and a policy."""

ALL = inf
"""A multiple at which whatever was asked for before is found."""

LEAST_SAMPLED, MOST_LOGGED = 4096, 2048
"""Sampled blocks after which another episode may follow, each as often as it is in use; and the
most that are logged for small caches."""


class Likeness(Protocol):
    """Who is served turns from the log.

    Attributes:
        position: Turns that it was served.
        took_s: What they took.
        share: What it may take, beside others.
    """

    position: int
    took_s: float
    share: int

    def serve(self, num_turns: int) -> None:
        """Take the next turns from the log."""


class Known:
    """Which names came before? In a bit for each of a million: two in a hundred err, to yes."""

    def __init__(self) -> None:
        self._bits = bytearray(1 << 17)

    def serve(self, names: "array[int]", num_asked: int) -> int:
        """Note names, and say how many of the first that were looked up came before."""
        bits, num_known, is_known = self._bits, 0, True
        for number, name in enumerate(names):
            place, bit = name >> 3 & 0x1FFFF, 1 << (name & 7)
            if not bits[place] & bit:
                bits[place] |= bit
                is_known = False
            elif is_known and number < num_asked:
                num_known += 1
        return num_known


class LruSizes:
    """LRU at every size, from one stack; without end it finds what is known."""

    def __init__(
        self, num_blocks: int, unit: float, tallies: Mapping[float, Tally], *, is_cold: bool
    ) -> None:
        self._own, self._unit = num_blocks, unit
        self._most = max(1, int(max(SIZES) * num_blocks))
        self._stack = LruStack(self._most)
        self._rows = [(max(1, round(memory * num_blocks)), tallies[memory]) for memory in SIZES]
        # What came before a later episode is not known in it.
        self._all = tallies.get(ALL) if is_cold else None
        self._known = Known()
        self._counts_from = 0 if is_cold else LEAST_SAMPLED // 2
        self._num_served, self._is_counting = 0, False

    def serve(self, names: "array[int]", num_asked: int, counts: Counted) -> None:
        """Take a turn."""
        found = self._stack.serve(names, num_asked)
        self._num_served += len(names)
        if not self._is_counting:
            if self._num_served < self._counts_from and not self._stack.fills(self._most):
                return
            self._begin(counts)
        own, part = bisect_right(found, self._own), names[0] % NUM_PARTS
        for size, tally in self._rows:
            tally.add(part, num_asked, own, bisect_right(found, size), self._unit)
        if self._all is not None:
            known = self._known.serve(names, num_asked)
            self._all.add(part, num_asked, own, max(own, known), self._unit)

    def seen(self, counts: Counted) -> None:
        """Note how far the traffic has come."""
        if self._is_counting:
            so_far = SoFar.of(counts)
            for tally in self._tallies:
                tally.reach(so_far)

    @property
    def _tallies(self) -> list[Tally]:
        several = [tally for _, tally in self._rows]
        return several if self._all is None else [*several, self._all]

    def _begin(self, counts: Counted) -> None:
        """Count from now on."""
        self._is_counting = True
        so_far = SoFar.of(counts) if self._counts_from else SoFar()
        for tally in self._tallies:
            tally.begin(so_far, self._own, self._unit)


class Baseline:
    """The cache's own policy at its own size; it is as far as the player that is furthest."""

    def __init__(
        self, policy: PolicyName, num_blocks: int, log: TrafficLog, *, is_cold: bool
    ) -> None:
        self._log, self._num_blocks = log, num_blocks
        self._likeness = LruStack(num_blocks) if policy == "lru" else SmallCache(num_blocks, policy)
        self._found = array("I")  # by turn
        self._num_missed = self._num_served = 0
        self.counts_from: int | None = 0 if is_cold else None

    def found(self, number: int, turn: SampledTurn) -> int:
        """Say what it found of a turn."""
        if number < len(self._found):
            return self._found[number]
        names = turn.names
        if isinstance(self._likeness, LruStack):
            hits = len(self._likeness.serve(names, turn.num_asked))
        else:
            hits = self._likeness.serve(turn)
        self._found.append(hits)
        self._num_served += len(names)
        self._num_missed += len(names) - hits
        enough = max(SIZES) * self._num_blocks
        if self.counts_from is None and (
            self._num_missed >= enough or self._num_served >= MOST_LOGGED // 2
        ):
            self.counts_from = number + 1
        return hits


class Player:
    """Another policy or size.

    Attributes:
        position: Turns that it was served.
        took_s: What they took.
        share: What it may take, beside others.
    """

    def __init__(
        self,
        which: Which,
        num_blocks: int,
        unit: float,
        own: Baseline,
        log: TrafficLog,
        tally: Tally,
    ) -> None:
        memory, policy = which
        self.position, self.took_s = 0, 0.0
        self.share = 1 if memory == 1.0 else 4
        self._size = max(1, round(memory * num_blocks))
        self._cache = SmallCache(self._size, policy)
        self._own, self._log, self._tally, self._unit = own, log, tally, unit

    def serve(self, num_turns: int) -> None:
        """Take the next turns from the log."""
        log, tally, unit = self._log, self._tally, self._unit
        first = self._own.counts_from
        for number in range(self.position, self.position + num_turns):
            turn = log.turn(number)
            own, other = self._own.found(number, turn), self._cache.serve(turn)
            first = self._own.counts_from
            if first is None or number < first:
                continue
            if number == first:
                tally.begin(log.so_far(number) if first else SoFar(), self._size, unit)
            tally.add(turn.names[0] % NUM_PARTS, turn.num_asked, own, other, unit)
        self.position += num_turns
        if first is not None and first < self.position:
            tally.reach(log.so_far(self.position - 1))


class LearnedSizes:
    """A policy that learns, at its own size and others; each beside LRU of that size.

    Attributes:
        position: Turns that it was served.
        took_s: What they took.
        share: What it may take, beside others.
    """

    def __init__(
        self,
        num_blocks: int,
        unit: float,
        experience: ReuseHazard,
        log: TrafficLog,
        tallies: Mapping[float, Tally],
        *,
        is_cold: bool,
    ) -> None:
        self.position, self.took_s, self.share = 0, 0.0, 4
        self._log, self._unit = log, unit
        sizes = {memory: max(1, round(memory * num_blocks)) for memory in tallies}
        self._rows = [
            (sizes[memory], LearnedCache(sizes[memory], experience), tally)
            for memory, tally in tallies.items()
        ]
        self._most = max(sizes.values())
        self._stack = LruStack(self._most)
        self._num_served, self._counts_from = 0, 0 if is_cold else None

    def serve(self, num_turns: int) -> None:
        """Take the next turns from the log."""
        for number in range(self.position, self.position + num_turns):
            self._take(number)
        self.position += num_turns
        if self._counts_from is not None and self._counts_from < self.position:
            so_far = self._log.so_far(self.position - 1)
            for _, _, tally in self._rows:
                tally.reach(so_far)

    def _take(self, number: int) -> None:
        turn, first = self._log.turn(number), self._counts_from
        part, num_asked, unit = turn.names[0] % NUM_PARTS, turn.num_asked, self._unit
        needed = self._stack.serve(turn.names, num_asked)
        for size, cache, tally in self._rows:
            found = cache.serve(turn)
            if first is None:
                continue
            if number == first:
                tally.begin(self._log.so_far(number) if first else SoFar(), size, unit)
            tally.add(part, num_asked, bisect_right(needed, size), found, unit)
        self._num_served += len(turn.names)
        if first is None and (
            self._stack.fills(self._most) or self._num_served >= MOST_LOGGED // 2
        ):
            self._counts_from = number + 1

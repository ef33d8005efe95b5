"""What was evicted recently: a ghost list.

It is remembered, so that its return can be noticed: a bounded list of runs of blocks, found by
their place in the sequence and their first block's tokens. Later tokens are compared; what came
before the run is not, so a run may be taken for another one at the same place: the policy errs by a
count, and no request gets a wrong token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.eviction.lifetimes import Cohort

_Name = tuple[Identity, int, bytes]


@dataclass(slots=True, eq=False)
class EvictedRun:
    """A run of blocks that is not cached any more."""

    entry: CacheEntry  # has the identity of the entry that it was part of, and nothing else
    start: int  # blocks between the root and its first one
    tokens: bytes  # packed tokens of whole blocks
    num_blocks: int
    uses: int  # how often they were in use
    idle_since_s: float  # when they were last released
    cohort: Cohort  # whose lives go on

    def part(self, first: int, last: int) -> "EvictedRun":
        """Return its blocks ``first .. last``."""
        size = len(self.tokens) // self.num_blocks
        tokens = self.tokens[first * size : last * size]
        return replace(self, start=self.start + first, tokens=tokens, num_blocks=last - first)


class GhostList:
    """The runs that were evicted last, as many as fit."""

    def __init__(self, max_blocks: int, dropped: Callable[[EvictedRun], None]) -> None:
        """Remember nothing.

        Args:
            max_blocks: Bound; the run that was evicted first is dropped first.
            dropped: Called with each run that is not remembered any more.
        """
        self.max_blocks, self.num_blocks = max_blocks, 0
        self._dropped = dropped
        self._runs: dict[_Name, EvictedRun] = {}

    def put(self, entry: CacheEntry, num_blocks: int, cohort: Cohort) -> None:
        """Remember the last blocks of an entry that is about to lose them."""
        start, tokens = entry.run_from(entry.num_blocks - num_blocks)
        owner = CacheEntry(entry.identity)  # not the entry, which would keep its ancestors
        run = EvictedRun(owner, start, tokens, num_blocks, entry.uses, entry.idle_since_s, cohort)
        self._insert(run, len(tokens) // num_blocks)
        while self.num_blocks > self.max_blocks:
            self._dropped(self._pop(next(iter(self._runs))))

    def take(
        self, key: PrefixKey, first: int, max_blocks: int, block_size: int
    ) -> EvictedRun | None:
        """Remove the run that begins at a sequence's block, as far as the sequence agrees.

        Returns:
            The part that agrees, at most ``max_blocks`` blocks; the rest is still remembered. None
            if no run begins there.
        """
        start = first * block_size
        name = (key.identity.root, first, key.tokens[start : start + block_size].tobytes())
        run = self._runs.get(name)
        if run is None:
            return None
        self._pop(name)
        stop = min(max_blocks, run.num_blocks)
        tokens = key.tokens[start : start + stop * block_size].tobytes()
        common = num_common_tokens(run.tokens[: len(tokens)], tokens) // block_size
        if common < run.num_blocks:
            self._insert(run.part(common, run.num_blocks), block_size * TOKEN_BYTES)
        return run if common == run.num_blocks else run.part(0, common)

    def erase(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Drop every run whose entry matches."""
        for name in [name for name, run in self._runs.items() if belongs(run.entry)]:
            self._dropped(self._pop(name))

    def check(self) -> None:
        """Assert that blocks are counted and bounded."""
        assert self.num_blocks == sum(run.num_blocks for run in self._runs.values())
        assert self.num_blocks <= self.max_blocks, "too much is remembered"

    def runs(self) -> list[EvictedRun]:
        """Return the remembered runs, earliest evicted first."""
        return list(self._runs.values())

    def _insert(self, run: EvictedRun, size: int) -> None:
        name = (run.entry.identity.root, run.start, run.tokens[:size])
        if name in self._runs:
            self._dropped(self._pop(name))
        self._runs[name] = run
        self.num_blocks += run.num_blocks

    def _pop(self, name: _Name) -> EvictedRun:
        run = self._runs.pop(name)
        self.num_blocks -= run.num_blocks
        return run

"""Compares cached keys, values and states with those that the model computes.

The prefixes of a share of the requests with a hit are recomputed in idle moments, into stores of
their own, and compared in every group of layers::

    a request with a hit ends ─► drawn? ─► waits for an idle moment ─► chunk, chunk, ... ─► compared
                                                                                            │
        counted, logged with both block tables, and the prefix is quarantined ◄── differs ──┘

They must be equal by law 7 where the native library computes whole steps, and equal up to measured
rounding elsewhere (``recomputation``). Prefixes that were evicted meanwhile are not compared. A
quarantined prefix is removed with all that continues it, so the next request computes it again.
"""

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.assembly import PrefixCache
from ostinato.core.identity import PrefixKey
from ostinato.core.request import Request
from ostinato.engine.loop.recomputation import AuditFinding, Recomputation
from ostinato.hybrid.manager import HybridCacheManager
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.model_runner import ModelRunner

logger = logging.getLogger("ostinato")

MAX_WAITING = 16
"""Hits that wait for an idle moment; further ones are not drawn."""

MAX_FINDINGS = 16
"""Findings that are kept; all are counted."""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """What audits have found since the start."""

    num_drawn: int = 0  # hits that were drawn
    num_same: int = 0  # compared, and equal
    num_different: int = 0  # compared, and different
    num_gone: int = 0  # not compared, since the cache had evicted or removed them
    num_tokens: int = 0  # tokens that were compared
    num_removed: int = 0  # blocks removed by quarantines
    findings: tuple[AuditFinding, ...] = ()  # the last few that differed


class HitAudit:
    """Draws hits, recomputes them, and compares; called between steps."""

    def __init__(
        self, share: float, quarantines: bool, runner: ModelRunner, cache: PrefixCache
    ) -> None:
        """Audit a share of the hits."""
        self.counts = AuditCounts()  # what it has found
        self.share = share  # of the hits that are drawn
        self._quarantines = quarantines
        self._runner, self._cache = runner, cache
        self._random = random.Random(0)
        self._waiting: deque[PrefixKey] = deque()
        self._running: Recomputation | None = None
        fused = runner.loaded.fused
        has_bits = fused is not None and fused.promises_bits
        self._is_exact = has_bits and isinstance(runner.attention, NativeAttention)
        self._unit = cache.manager.chunk_unit or cache.block_size

    def note(self, request: Request, num_cached_tokens: int) -> None:
        """Draw a request that has ended with this number of cached tokens, or not."""
        if request.images:  # they are freed: only the text before them can be recomputed
            num_cached_tokens = min(num_cached_tokens, request.images[0].start)
        num_tokens = num_cached_tokens - num_cached_tokens % self._unit
        if not num_tokens or self._random.random() >= self.share:
            return
        if len(self._waiting) < MAX_WAITING:
            tokens = request.prompt_token_ids[:num_tokens]
            self._waiting.append(PrefixKey(request.identity, tokens))
            self._count(num_drawn=1)

    def erase(self, tenant: bytes) -> None:
        """Remove a tenant's hits, and the keys and values that were recomputed for it."""
        self._remove_hits(lambda key: key.identity.belongs_to(tenant))

    def remove_adapter(self, adapter: bytes) -> None:
        """Remove the hits of an adapter that is no longer loaded."""
        self._remove_hits(lambda key: key.identity.adapter == adapter)

    def _remove_hits(self, matches: Callable[[PrefixKey], bool]) -> None:
        self._waiting = deque(key for key in self._waiting if not matches(key))
        if self._running is not None and matches(self._running.key):
            self._running = None

    def run_idle_work(self) -> bool:
        """Compute a chunk, or compare; returns whether there is more to do."""
        if self._running is None:
            if not self._waiting:
                return False
            key = self._waiting.popleft()
            if self._cache.manager.match(key, len(key.tokens)).num_tokens < len(key.tokens):
                self._count(num_gone=1)
            else:
                self._running = Recomputation(key, self._runner, self._is_exact)
        elif not self._running.compute_chunk(self._checkpoints(self._running.key)):
            done, self._running = self._running, None
            self._compare(done)
        return self._running is not None or bool(self._waiting)

    def _compare(self, done: Recomputation) -> None:
        manager, num_tokens = self._cache.manager, len(done.key.tokens)
        table = manager.pin(done.key, num_tokens)
        try:
            if len(table.blocks) * self._cache.block_size < num_tokens:
                return self._count(num_gone=1)
            finding = done.compared(table, self._checkpoints(done.key))
        finally:
            manager.unpin(table)
        self._count(num_tokens=num_tokens, num_same=finding is None)
        if finding is not None:
            self._report(finding)

    def _checkpoints(self, key: PrefixKey) -> dict[int, int]:
        """Return the slots of the cached states of a prefix, by their position."""
        manager = self._cache.manager
        if manager.chunk_unit is None:
            return {}
        assert isinstance(manager, HybridCacheManager)
        kept = manager.layer_groups[-1].kept(key, len(key.tokens) // self._cache.block_size)
        return {(place + 1) * self._unit: slot for place, slot in kept}

    def _report(self, finding: AuditFinding) -> None:
        if self._quarantines:
            finding = replace(finding, num_removed=self._remove(finding))
        logger.error(
            "an audit found wrong keys or values in the cache: from token %d of %d on, layers %s; "
            "cached in blocks %s, computed again in blocks %s; %d blocks were removed",
            finding.first_token,
            finding.num_tokens,
            finding.layers,
            finding.cached_blocks,
            finding.computed_blocks,
            finding.num_removed,
        )
        self._count(num_different=1, num_removed=finding.num_removed)
        findings = (*self.counts.findings, finding)[-MAX_FINDINGS:]
        self.counts = replace(self.counts, findings=findings)

    def _remove(self, finding: AuditFinding) -> int:
        """Remove the blocks from the first wrong one on, and all that continues them."""
        manager, place = self._cache.manager, finding.first_token // self._cache.block_size
        wrong = [set(blocks[place:]) for blocks in finding.cached_blocks]
        if manager.chunk_unit is not None:
            wrong[-1] = set(finding.cached_blocks[-1][finding.first_token // self._unit :])
        suspects: set[int] = set()  # entries, by id
        runs: list[bool] = []  # in order of the walk, whether a run is suspected
        for run in manager.index.runs():
            is_below = run.parent is not None and runs[run.parent]
            runs.append(is_below or any(not wrong[0].isdisjoint(e.blocks) for e in run.entries))
            suspects.update(id(entry) for entry in run.entries if runs[-1])
        for pool, blocks in zip(manager.pools[1:], wrong[1:], strict=False):
            suspects.update(id(e) for e in pool.entries() if not blocks.isdisjoint(e.blocks))

        num_removed = manager.remove(lambda entry: id(entry) in suspects)
        manager.settle()
        return num_removed

    def _count(self, **more: int) -> None:
        totals = {name: getattr(self.counts, name) + count for name, count in more.items()}
        self.counts = replace(self.counts, **totals)

"""Compares cached keys and values with those that the model computes.

The prefixes of a share of the requests with a hit are recomputed in idle moments, into a store of
their own; then keys and values are compared bit by bit::

    a request with a hit ends ─► drawn? ─► waits for an idle moment ─► chunk, chunk, ... ─► compared
                                                                                            │
        counted, logged with both block tables, and the prefix is quarantined ◄── differs ──┘

They must be equal by law 7 where the native library computes whole steps; elsewhere rounding may
differ, and an audit is refused. Prefixes that were evicted meanwhile are not compared. A
quarantined prefix is removed with all that continues it, so the next request computes it again.
"""

import logging
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ostinato.assembly import PrefixCache
from ostinato.cache.block_table import BlockTable
from ostinato.core.errors import ConfigError
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.core.request import Request
from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.model_runner import ModelRunner

logger = logging.getLogger("ostinato")

MOST_WAITING = 16
"""Hits that wait for an idle moment; further ones are not drawn."""

MOST_FINDINGS = 16
"""Findings that are kept; all are counted."""

CHUNK_TOKENS = 64
"""Tokens computed at a time: a request that arrives meanwhile waits for these at most."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A prefix whose cached keys or values differ from those that the model computes."""

    num_tokens: int  # tokens that were compared
    first_token: int  # the first of them that differs
    layers: tuple[int, ...]  # layers in which any differ
    cached_blocks: tuple[tuple[int, ...], ...]  # the cache's blocks, one table per group of layers
    computed_blocks: tuple[int, ...]  # those that they were compared with
    num_removed: int = 0  # blocks that were removed from the cache for it


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
        """Audit a share of the hits.

        Raises:
            ConfigError: The native library does not compute whole steps, so bits may differ.
        """
        self.counts = AuditCounts()  # what it has found
        self._share, self._quarantines = share, quarantines
        self._runner, self._cache = runner, cache
        self._random = random.Random(0)
        self._waiting: deque[PrefixKey] = deque()
        self._running: _Recomputation | None = None
        fused = runner.loaded.fused
        has_bits = fused is not None and fused.promises_bits
        if share and not (has_bits and isinstance(runner.attention, NativeAttention)):
            raise ConfigError(
                f"audit_share={share}: cached keys agree to the bit with those that are computed "
                "again only where the native library computes whole steps; the line of the log "
                "that begins 'Computing in' says why it does not. Set audit_share=0"
            )

    def note(self, request: Request, num_cached_tokens: int) -> None:
        """Draw a request that has ended, with so many cached tokens, or not."""
        if request.images:  # they are freed: only the text before them can be recomputed
            num_cached_tokens = min(num_cached_tokens, request.images[0].start)
        num_tokens = num_cached_tokens - num_cached_tokens % self._cache.block_size
        if not num_tokens or self._random.random() >= self._share:
            return
        if len(self._waiting) < MOST_WAITING:
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
                self._running = _Recomputation(key, self._runner)
        elif not self._running.compute_chunk():
            done, self._running = self._running, None
            self._compare(done)
        return self._running is not None or bool(self._waiting)

    def _compare(self, done: "_Recomputation") -> None:
        manager, num_tokens = self._cache.manager, len(done.key.tokens)
        table = manager.pin(done.key, num_tokens)
        try:
            if len(table.blocks) * self._cache.block_size < num_tokens:
                return self._count(num_gone=1)
            finding = done.compared(table)
        finally:
            manager.unpin(table)
        self._count(num_tokens=num_tokens, num_same=finding is None)
        if finding is not None:
            self._report(finding)

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
        findings = (*self.counts.findings, finding)[-MOST_FINDINGS:]
        self.counts = replace(self.counts, findings=findings)

    def _remove(self, finding: AuditFinding) -> int:
        """Remove the blocks from the first wrong one on, and all that continues them."""
        manager, first = self._cache.manager, finding.first_token // self._cache.block_size
        wrong = [set(blocks[first:]) for blocks in finding.cached_blocks]
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


class _Recomputation:
    """Recomputes a prefix, chunk by chunk, in a store of its own."""

    def __init__(self, key: PrefixKey, runner: ModelRunner) -> None:
        self.key = key
        self._cached = runner.kv_stores
        size = self._cached[0].block_size
        self._table = array("i", range(len(key.tokens) // size))
        self._runner = ModelRunner(
            runner.loaded,
            [len(self._table)] * runner.groups.num_groups,
            size,
            self._cached[0].dtype,
            runner.attention,
            runner.groups,
        )
        bounds = [*range(0, len(key.tokens), CHUNK_TOKENS), len(key.tokens)]
        self._chunks = pairwise(bounds)

    @torch.inference_mode()
    def compute_chunk(self) -> bool:
        """Compute the next chunk; returns False if there is none."""
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        first, last = chunk
        tables = (self._table,) * len(self._cached)
        tokens = self.key.tokens[first:last]
        sequence = ScheduledSequence(SequenceId(0), tokens, first, tables, None)
        plan = StepPlan((replace(sequence, identity=self.key.identity),))
        store = self._cached[0]
        adapters = StepAdapters.of(plan, self._runner.adapters)
        self._runner.forward(build_inputs(plan, store.block_size, store.device), adapters)
        return True

    def compared(self, table: BlockTable) -> AuditFinding | None:
        """Compare with the cache's blocks; returns where they differ, if they do."""
        first, layers = len(self.key.tokens), []
        for cached, own, blocks in zip(
            self._cached, self._runner.kv_stores, table.groups, strict=True
        ):
            held = [place for place, block in enumerate(blocks) if block < cached.num_blocks]
            own_slots, cached_slots = (
                _slots(own, held),
                _slots(cached, [blocks[place] for place in held]),
            )
            for layer in cached.layers:
                wrong = _rows_that_differ(own, cached, layer, own_slots, cached_slots)
                if len(wrong):
                    first = min(first, int(own_slots[wrong[0]]))
                    layers.append(layer)
        if not layers:
            return None
        cached_blocks = tuple(tuple(blocks) for blocks in table.groups)
        return AuditFinding(
            len(self.key.tokens), first, tuple(sorted(layers)), cached_blocks, tuple(self._table)
        )


def _slots(store: KVStore, blocks: list[int]) -> Tensor:
    """Return the slots of some blocks, shape (len(blocks) * block_size,), int64."""
    offsets = torch.arange(store.block_size)
    return (torch.tensor(blocks)[:, None] * store.block_size + offsets).flatten().long()


def _rows_that_differ(
    one: KVStore, other: KVStore, layer: int, slots: Tensor, other_slots: Tensor
) -> Tensor:
    """Return which rows of keys or values differ in any bit."""
    differ = torch.zeros(len(slots), dtype=torch.bool)
    for rows, other_rows in zip(
        one.read(layer, slots), other.read(layer, other_slots), strict=True
    ):
        differ |= (rows.view(torch.uint8) != other_rows.view(torch.uint8)).flatten(1).any(1)
    return differ.nonzero().flatten()

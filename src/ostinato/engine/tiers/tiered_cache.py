"""The tiers of one engine: loads from them, stores to them, and their counts.

::

    add ──► loads (tier_loads)      step ──► begin_step, end_step      idle ──► run_idle_work
    cache ──► stores (tier_stores)  lease, erase, close

A prefix on a tier is named by everything that its bytes depend on, so that no other model, format
or processor's arithmetic can use it.
"""

import hashlib
import json
import logging
import time
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import asdict, dataclass, field
from itertools import islice

import torch

from ostinato.assembly import PrefixCache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import RequestId
from ostinato.engine.settings.weights import IRRELEVANT_ENTRIES
from ostinato.engine.tiers.erasures import TierErasures
from ostinato.engine.tiers.groups import TierGroup
from ostinato.engine.tiers.load_note import LoadNote
from ostinato.engine.tiers.loads import TierLoads
from ostinato.engine.tiers.open_tiers import OpenTiers
from ostinato.engine.tiers.prefixes import first_tokens
from ostinato.engine.tiers.stores import GRACE_S, TierStores
from ostinato.engine.tiers.threads import TierThreads
from ostinato.runner.compute_path import ComputePath
from ostinato.runner.model_runner import ModelRunner
from ostinato.sched.scheduler import Scheduler
from ostinato.scheduling.held_requests import HeldRequests
from ostinato.scheduling.learned_prices import LearnedPrices
from ostinato.tenants.terms import EraseReceipt, LeaseId, LeaseTerms
from ostinato.tiers.port import Namespace, TierStats

logger = logging.getLogger("ostinato")

NUMERICS = 1
"""Increased when the same tokens give other keys and values than in the release before."""

WAIT_S = 0.005
"""How long the engine sleeps at most while it only waits for a tier or an image."""

FLUSH_S = 20.0
"""How long closing may take to write what is cached; after SIGTERM, 30 s are usual."""

LEASES_S = 10.0
"""How often new ends of leases that requests have refreshed are written."""

MAX_RETURNING = 8
"""Preempted requests at the head of the queue whose prefix may be loaded again."""

CPU_FLOPS, DEVICE_FLOPS = 2.5e11, 1e14
"""Operations per second of a thread and of a device, to estimate the time of a prompt."""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of the tiers of an engine since the start."""

    tiers: tuple[TierStats, ...] = ()  # as of the last call or the last write
    loaded_tokens: dict[str, int] = field(default_factory=dict)  # into the pool, by tier
    load_seconds: float = 0.0  # total time of loads
    load_faults: dict[str, int] = field(default_factory=dict)  # loads that ended early, by reason
    num_cheaper: int = 0  # loads that were not begun because computing is faster
    num_loading: int = 0  # requests that wait for a load now
    stores: dict[str, int] = field(default_factory=dict)  # extents, by result
    num_waiting: int = 0  # prefixes that wait to be written
    num_left_out: int = 0  # prefixes that were not written because too many waited
    load_bytes_per_s: float | None = None  # speed of loads; None before the first

    def as_dict(self) -> dict[str, object]:
        """Return it in plain values, for JSON."""
        return asdict(self)


class TieredCache:
    """The tiers behind one cache; called between steps, by the engine's thread."""

    def __init__(
        self,
        opened: OpenTiers,
        stores: TierStores,
        held: HeldRequests,
        cache: PrefixCache,
        scheduler: Scheduler,
        runner: ModelRunner,
        compute_path: ComputePath,
        prices: LearnedPrices,
    ) -> None:
        """Put opened tiers behind a cache that ``stores`` observes.

        Requests in ``held`` are passed over by the scheduler.
        """
        self._tier, self.groups = opened.tier, opened.groups
        self._cache, self._scheduler, self._runner = cache, scheduler, runner
        self._compute_path, self._held = compute_path, held
        self._namespaces: dict[tuple[str, bytes, str, bytes, int], Namespace] = {}
        estimate = _estimated_tokens_per_s(runner)
        parts = cache.manager, held, self.namespace_of
        self.loads = TierLoads(opened, *parts, stores.events, estimate, prices)
        self.stores = stores
        self._erasures = TierErasures(opened.tier)
        stores.events.open(cache.events, cache.manager, self.groups, self._erasures.covers)
        stores.open(opened, cache.manager, self.namespace_of, self._erasures.covers)
        self._notes: OrderedDict[RequestId, LoadNote] = OrderedDict()
        self._begun_s = 0.0
        # As they are on the tiers, by the cache's clock.
        self._lease_ends: dict[LeaseId, float] = {}
        self._leases_due_s = 0.0
        self._is_closed = False

    @property
    def counts(self) -> TierCounts:
        """The counts so far."""
        loads, stores = self.loads, self.stores
        stores.refresh_stats()
        return TierCounts(
            stores.tier_stats,
            dict(loads.loaded_tokens),
            loads.load_seconds,
            dict(loads.num_faults),
            loads.num_cheaper,
            len(loads),
            {str(result): count for result, count in stores.results.items()},
            stores.num_waiting,
            stores.num_left_out,
            loads.reading.per_s,
        )

    def read_stats(self) -> tuple[TierStats, ...]:
        """Return state and counts of each tier now; may block, in any thread."""
        return tuple(self._tier.stats())

    def namespace_of(self, identity: Identity, group: TierGroup) -> Namespace:
        """Return all that the bytes of a group's blocks depend on, besides tenant and tokens."""
        adapter, start = identity.adapter, identity.adapter_start
        shared = group.name, identity.weights, identity.kv_dtype, adapter, start
        known = self._namespaces.get(shared)
        if known is None:
            loaded, store, path = self._runner.loaded, self._runner.kv_stores[0], self._compute_path
            arithmetic = f"{path.instruction_set}/{path.attention}/{path.forward}"
            if store.device.type != "cpu":
                arithmetic += f"/{_device_name(store.device)}"
            known = self._namespaces[shared] = Namespace(
                weights=identity.weights,
                model_config=_config_digest(loaded.config.to_dict()),
                kv_dtype=identity.kv_dtype,
                layout=f"{group.layout}/{arithmetic}/{loaded.dtype}",
                block_size=group.unit,
                block_bytes=group.copies.block_bytes,
                layer_groups=(group.name,),
                # Of an activated one the same tokens depend on where it starts.
                adapter=adapter + (start.to_bytes(8, "little") if start else b""),
                numerics=NUMERICS,
            )
        return known

    def note_of(self, request_id: str) -> LoadNote | None:
        """Return what a tier had of a request's prompt, if it is remembered."""
        return self._notes.get(RequestId(request_id))

    # --- around a step ---

    def begin(self, request_id: RequestId) -> None:
        """Look up a request that was just added."""
        self._settle_erasures()
        for sequence in self._scheduler.requests.live[request_id]:
            if not self._erasures.covers(sequence.key.identity):
                self.loads.begin(sequence)

    def begin_step(self) -> list[tuple[RequestId, LoadNote]]:
        """Take finished loads, and copy out what is to be written; returns notes on the loads."""
        ended: list[tuple[RequestId, LoadNote]] = []
        if self._scheduler.stats.num_preemptions:
            waiting = islice(self._scheduler.requests.waiting, MAX_RETURNING)
            preempted = [one for one in waiting if one.num_preemptions]
            covers = self._erasures.covers
            self.loads.begin_again(one for one in preempted if not covers(one.key.identity))
        if self.loads:
            seats = self._scheduler.config.max_num_seqs - self._scheduler.num_running
            for sequence, note in self.loads.poll(seats):
                if note.loaded and sequence.finish_reason is None:
                    self._mark_loaded(sequence.key, note)
                if sequence.first_planned_s is None:  # hits count at first admission
                    ended.append((sequence.request.request_id, note))
            self._remember(ended)
        self.stores.pump()
        self._settle_erasures()
        self._write_lease_ends()
        self._begun_s = time.perf_counter()
        return ended

    def wait_for_loads(self) -> bool:
        """Wait a moment if no request can run before a load ends; returns whether that was so.

        Planning a step without requests would only slow down the threads that load.
        """
        if not self.loads or self._has_ready:
            return False
        self.loads.wait(WAIT_S)
        return True

    @property
    def _has_ready(self) -> bool:
        """Whether a request runs, or waits for no load."""
        return self._scheduler.num_running > 0 or len(self._held) < self._scheduler.num_waiting

    def end_step(self) -> None:
        """Let stores copy as long as a step took; if nothing can run, wait a moment for a tier."""
        self.loads.release_loaded()
        took_s = time.perf_counter() - self._begun_s
        self.stores.add_credit(took_s, torch.get_num_threads())
        if not self._has_ready:
            self.loads.wait(WAIT_S)

    def run_idle_work(self) -> bool:
        """Write in an idle moment; returns whether there is more to do."""
        self.loads.poll(0)  # of requests that were cancelled
        self.loads.release_loaded()
        self._write_lease_ends()
        has_more = self.stores.pump(is_idle=True)
        self._settle_erasures()
        if has_more:
            self.stores.wait(WAIT_S)
        elif self.loads:
            self.loads.wait(WAIT_S)
        return has_more or bool(self.loads)

    def _settle_erasures(self) -> None:
        """Announce what tiers report, and nothing of tenants whose erasure has ended only now."""
        self.stores.events.flush()
        self._erasures.settle()

    # --- administration ---

    def lease(self, key: PrefixKey, num_tokens: int, terms: LeaseTerms) -> None:
        """Write a leased prefix, with its terms unless it is pinned."""
        keep_until = 0.0 if terms.ttl_s is None else time.time() + terms.ttl_s
        self.stores.lease(key, num_tokens, keep_until, _refresh_s(terms))

    def begin_erase(self, salt: bytes, receipt: EraseReceipt) -> Future[EraseReceipt]:
        """Make a tenant unreachable in every tier, and erase it in the background.

        Args:
            salt: The tenant's; its requests and loads have ended.
            receipt: What was erased elsewhere.

        Returns:
            The receipt with those of the tiers.
        """
        written = self.stores.erase(salt)
        self.stores.events.erase(salt)

        def wipe() -> None:
            written.result()
            self.loads.wipe()

        return self._erasures.begin(salt, receipt, wipe)

    def close(self) -> None:
        """Write what is cached, within ``FLUSH_S``, and close the tiers.

        A medium that hangs is left after ``GRACE_S`` for each of its threads, 30 seconds in all.
        """
        if self._is_closed:
            return
        end_s = time.monotonic() + FLUSH_S
        self.loads.drain(GRACE_S)
        self._erasures.wait(end_s - time.monotonic())
        self._leases_due_s = 0.0
        self._write_lease_ends()
        if self.stores.outlives_process:
            self.stores.queue_everything()
            self.stores.flush(end_s - time.monotonic())
        self.stop()

    def stop(self) -> None:
        """End the threads and close the tiers, as they are; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if num_left := self._erasures.close(GRACE_S):
                logger.warning("%d erasures of tiers are not complete: repeat them", num_left)
            self.loads.close(GRACE_S)
            self.stores.close(GRACE_S)
            closing = TierThreads("ostinato-tier-close")
            wait_for_futures([closing.submit(self._tier.close)], GRACE_S)
            closing.close(0)

    def _remember(self, ended: list[tuple[RequestId, LoadNote]]) -> None:
        self._notes.update(ended)
        while len(self._notes) > max(1, self._cache.config.keep_explanations):
            self._notes.popitem(last=False)

    def _write_lease_ends(self) -> None:
        """Write the ends of leases that requests have refreshed, every ``LEASES_S``."""
        now_s = self._cache.manager.pool.now()
        if now_s < self._leases_due_s:
            return
        self._leases_due_s = now_s + LEASES_S
        ends, known = dict[LeaseId, float](), self._lease_ends
        for lease in self._cache.admin.leases():
            if lease.terms.refresh_on_hit and lease.expires_s is not None:
                ends[lease.lease_id] = end_s = lease.expires_s
                if end_s != known.get(lease.lease_id):
                    prefix = lease.table.key, lease.table.num_computed
                    keep_until = time.time() + end_s - now_s
                    self.stores.set_lease_end(*prefix, keep_until, _refresh_s(lease.terms))
        self._lease_ends = ends

    def _mark_loaded(self, key: PrefixKey, note: LoadNote) -> None:
        """Mark what was loaded as written, and renew the lease of what was leased."""
        for tier, start, stop in note.loaded:
            if tier == self.stores.fastest:  # what a slower one had is written there, too
                self.stores.mark(key, start, stop)
        ttl_s = note.keep_until - time.time()
        if ttl_s > 0:  # this use refreshes it
            terms = LeaseTerms(note.refresh_s or ttl_s, refresh_on_hit=note.refresh_s > 0)
            self._cache.admin.lease(first_tokens(key, note.leased), terms)


def _refresh_s(terms: LeaseTerms) -> float:
    """Return by how much each use extends a lease; 0 if uses do not."""
    return terms.ttl_s if terms.refresh_on_hit and terms.ttl_s is not None else 0.0


def _estimated_tokens_per_s(runner: ModelRunner) -> float:
    """Estimate how fast prompts are computed, until it is measured."""
    num_parameters = runner.loaded.size.num_parameters
    is_cpu = runner.kv_stores[0].device.type == "cpu"
    flops: float = CPU_FLOPS * torch.get_num_threads() if is_cpu else DEVICE_FLOPS
    return flops / max(1, 2 * num_parameters)


def _config_digest(config: dict[str, object]) -> bytes:
    kept = {name: value for name, value in config.items() if name not in IRRELEVANT_ENTRIES}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).digest()


def _device_name(device: torch.device) -> str:
    """Return the model of a device; others may round differently."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

"""What must be true of every step with tenants, leases, windows, epochs, erasure and events.

The checks know what they were told from outside: which requests were sent, and which leases were
granted. Everything else is recounted from block tables and contents, or taken from the events.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from ostinato.assembly import PrefixCache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.plan import StepPlan
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import SpanOutcome
from ostinato.sched.scheduler import Scheduler
from ostinato.sched.sequence import Sequence
from ostinato.settings import window_blocks
from ostinato.tenants.terms import EraseReceipt, LeaseId, LeaseReceipt, LeaseStatus, LeaseTerms
from tests.properties.expectations import EventConsumer, LeaseExpectation
from tests.support.cache.cache_views import held_windows, shares_of, windows_of
from tests.support.cache.fake_runner import FakeRunner
from tests.support.cache.step_checks import StepChecks

PUBLIC = b"public"
"""Salt of the one prefix that may be public."""


class ScenarioChecks(StepChecks):
    """Checks every step of one scheduler, and all that its cache promises to outsiders.

    Attributes:
        leases: Those that were granted and have not ended, by number.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        runner: FakeRunner,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(scheduler, cache, runner, clock)
        self.leases: dict[LeaseId, LeaseExpectation] = {}
        self._settings = cache.config
        self._consumer = EventConsumer()
        assert cache.events is not None
        self._events = cache.events
        self._events.subscribe(self._consumer.take)
        self._resident: list[Counter[bytes]] = []
        self._stale: set[tuple[int, bytes]] = set()

    # --- one step ---

    def before_plan(self) -> None:
        """Note also how much each tenant has."""
        super().before_plan()
        self._resident = self.oracle.residents(self.live())

    def after_plan(self, plan: StepPlan) -> None:
        """Check also hits, leases, guarantees and public prefixes."""
        self._cache.check()
        super().after_plan(plan)
        self.expire()
        for sequence in self.admitted:
            self._check_hit(sequence)
        self._check_public_prefix()
        self._check_guarantees()
        self._check_leases()
        num_leases = len(self.leases) + self._cache.admin.is_public(PUBLIC)
        assert self._cache.admin.num_leases == num_leases, "a lease outlived its time"

    def after_step(self) -> None:
        """Check also that the events have told everything, and what windows hold."""
        super().after_step()
        self._check_events()
        self._check_windows()

    def between_steps(self) -> None:
        """Check also who published, old weights, quotas and leases."""
        super().between_steps()
        self._check_writers()
        self._check_stale()
        self._check_quotas()
        self._check_leases()

    def after_lease(self, key: PrefixKey, terms: LeaseTerms, receipt: LeaseReceipt) -> None:
        """Note what the holder of a lease was promised."""
        self.expire()
        self.counts[f"lease {receipt.status}"] += 1
        wanted = len(key) // self._size * self._size
        assert (receipt.lease_id is None) == (receipt.status == LeaseStatus.REJECTED)
        assert (receipt.status == LeaseStatus.ACCEPTED) == (not receipt.reason)
        assert receipt.num_tokens == wanted or receipt.status != LeaseStatus.ACCEPTED
        if receipt.lease_id is not None:
            assert receipt.num_tokens > 0
            expires_s = None if terms.ttl_s is None else self._clock() + terms.ttl_s
            assert receipt.expires_s == expires_s
            self.leases[receipt.lease_id] = LeaseExpectation(
                key, receipt.num_tokens, terms, expires_s
            )
        self._check_bound()

    def expire(self) -> None:
        """Forget the leases whose time is up, whenever the cache does so."""
        now = self._clock()
        over = [number for number, promise in self.leases.items() if promise.is_over(now)]
        for number in over:
            del self.leases[number]
        self.counts["lease expired"] += len(over)

    def after_new_epoch(self) -> None:
        """Old content stays only while it is read, and no lease promises any of it."""
        self.counts["ran on under old weights"] += self._scheduler.num_running
        self._stale = self.oracle.stale()
        self.between_steps()
        self._check_events()

    def after_erasure(self, tenant: bytes, receipt: EraseReceipt) -> None:
        """Nothing of the tenant is in indexes, pools, stores, leases or kept events."""
        gone = [n for n, p in self.leases.items() if p.key.identity.belongs_to(tenant)]
        assert receipt.num_leases >= len(gone)  # some may be over, and not yet noticed
        for number in gone:
            del self.leases[number]
        for residents in self.oracle.residents(self.live()):
            assert not residents[tenant], "blocks of an erased tenant"
        for store in [*self._runner.stores, self._runner.states]:
            parts = [part for text in store if ":" in text for part in text.split("|")]
            owners = {part.partition(":")[0].partition("/")[0] for part in parts}
            assert tenant.decode() not in owners, "KV of an erased tenant"
        assert tenant not in self._cache.stats.tenants
        kept = self._events.replay(max(0, self._consumer.num_batches - 4)) or ()
        for event in [event for batch in kept for event in batch.events]:
            assert not getattr(event, "identity", Identity(tenant=b"?")).belongs_to(tenant)
        self.between_steps()
        self._check_events()

    def after_reset(self) -> None:
        """Nothing is cached, leased or known to outsiders."""
        assert not any(map(len, self.oracle.residents(self.live())))
        assert not self._cache.admin.num_leases
        self._stale.clear()
        self.between_steps()
        self._check_events()
        assert not self._consumer.cached

    def check_explanations(self, sequences: Mapping[str, Sequence]) -> None:
        """Law 10: an explanation covers its prompt, and agrees with what was counted."""
        history = self._cache.history
        assert history is not None
        history.check()
        for record in [r for r in history.records() if r.is_first and r.name in sequences]:
            sequence, tenant = sequences[record.name], record.identity.tenant
            others = {r.name for r in history.records() if r.identity.tenant != tenant}
            others.discard("")  # those of erased tenants have no name
            for administrator in (False, True):
                told = explain(history, record.name, Viewer(administrator, str))
                edges = [0, *(span.stop for span in told.spans)]
                assert [span.start for span in told.spans] == edges[:-1]
                assert edges == sorted(set(edges)) and edges[-1] == sequence.num_prompt_tokens
                num_cached = sequence.num_shared_tokens + sequence.num_copied_tokens
                assert told.num_cached_tokens == num_cached
                assert told.num_copied_tokens == sequence.num_copied_tokens
                for span in told.spans:
                    assert (span.reason is None) == (span.outcome is not SpanOutcome.COMPUTED)
                assert not others & {span.request for span in told.spans}
            self.counts["explained"] += 1

    def everything_ended(self) -> None:
        """Law 9: nothing is live or leased, so nothing is held; and no tenant is above quota."""
        assert not self.live() and self._cache.manager.num_live_tables == 0
        assert self._cache.admin.num_leases == 0
        residents = self.oracle.residents([])
        for group, pool in enumerate(self.oracle.pools):
            assert pool.num_free == pool.num_blocks, f"blocks leaked in group {group}"
            for tenant, count in residents[group].items():
                quota = shares_of(pool).of(tenant).share.quota
                assert quota is None or count <= quota, "more than its quota stayed"
        self._cache.admin.reset()
        self.after_reset()

    # --- what is checked ---

    def _check_hit(self, sequence: Sequence) -> None:
        """A hit is only for those who read, refreshes leases, and holds its window alone."""
        table = sequence.table
        assert table is not None
        assert not sequence.reading_is_off or not table.num_cached_tokens, "a hit without reading"
        used = table.num_cached_tokens
        used += 0 < used == len(sequence.key) - 1  # all that may hit did (law 4)
        for lease in self.leases.values():
            self.counts["lease refreshed"] += lease.use(sequence.key, used, self._clock())
        for window, held in zip(windows_of(self._cache.manager), held_windows(table), strict=True):
            first = window.first_needed(table.num_shared_tokens)
            assert held.first == first, "a hit holds its window, and no more"
            self.counts["hit through a window"] += bool(first)
        if self._settings.states is not None:
            self.counts["hit a state"] += bool(table.num_shared_tokens)
            self.counts["computed again"] += table.num_seen_tokens > table.num_shared_tokens

    def _check_public_prefix(self) -> None:
        """Content continues a public prefix only while that is public."""
        behind = [identity for identity, _ in self.oracle.contents() if identity.base]
        assert not behind or self._cache.admin.is_public(PUBLIC) or self._stale, "a lost tail"
        self.counts["continues a public prefix"] += bool(behind)

    def _check_guarantees(self) -> None:
        """Others' allocations leave a tenant its guarantee, or what it had if that was less.

        Of a tenant whose own sequence was preempted nothing is said: that one's private blocks
        counted until then. Nor of states, which go with the blocks that they end in.
        """
        now = self.oracle.residents(self.live())
        num_groups = 1 + len(self._settings.windows)
        for group, pool in enumerate(self.oracle.pools[:num_groups]):
            for tenant in self._settings.tenant_shares.keys() - set(map(_tenant, self.preempted)):
                guarantee, has = (
                    shares_of(pool).of(tenant).share.guaranteed,
                    now[group][tenant],
                )
                had = self._resident[group][tenant]
                assert has >= min(guarantee, had), (
                    f"{tenant!r} is below its guarantee in group {group}"
                )
                self.counts["guarantee held"] += 0 < has <= guarantee

    def _check_quotas(self) -> None:
        """A tenant of which nothing runs has no evictable block above its quota."""
        residents = self.oracle.residents(self.live())
        running = set(map(_tenant, self.running()))
        for group, pool in enumerate(self.oracle.pools):
            charged = Counter[int]()
            for tenant, count in residents[group].items():
                charged[id(shares_of(pool).of(tenant))] += count
            for account in shares_of(pool) if self._settings.tenant_shares else ():
                assert account.num_charged == charged[id(account)], "charged to somebody else"
            for tenant in self._settings.tenant_shares.keys() - running:
                account = shares_of(pool).of(tenant)
                self.counts["leased above quota"] += bool(account.num_over_quota)
                assert not account.num_over_quota or not account.policy.num_blocks, "above quota"

    def _check_leases(self) -> None:
        """What was promised would hit, now and under any pressure."""
        for promise in self.leases.values():
            key = promise.key
            match = self._cache.manager.match(key, promise.num_tokens)
            assert match.num_shared_tokens == promise.num_tokens, "a leased block is gone"
        assert self._cache.admin.num_leases >= len(self.leases), "a lease is gone"

    def _check_bound(self) -> None:
        """Leases and guarantees leave the longest sequence its blocks, in every group."""
        windows = [window.window for window in self._settings.windows]
        needed = [self._settings.reserved_blocks, *(window_blocks(w, self._size) for w in windows)]
        needed += [2] if self._settings.states is not None else []
        for group, pool in enumerate(self.oracle.pools):
            guarantees = sum(account.share.guaranteed for account in shares_of(pool))
            bound = len(self.oracle.leased(group)) + guarantees
            assert bound + needed[group] <= pool.num_blocks, f"too much is bound in group {group}"
        assert self._cache.admin.num_leased_blocks == len(self.oracle.leased(0))

    def _check_windows(self) -> None:
        """After each step a sequence holds of a window what its next token sees, and no more."""
        for sequence in self.running():
            assert sequence.table is not None
            windows = zip(self._settings.windows, held_windows(sequence.table), strict=True)
            for config, held in windows:
                first = max(0, sequence.num_computed - config.window + 1) // self._size
                assert held.first == first, "a block left the window and stayed, or was missed"
                self.counts["left the window"] += bool(first)

    def _check_writers(self) -> None:
        """Who does not write has published nothing; its children go on from where it is."""
        findable = {cached.block for _, cached in self.oracle.contents()}
        for sequence in self.running():
            if not sequence.request.cache_write and sequence.index == 0:
                assert sequence.table is not None
                own = sequence.table.blocks[sequence.table.num_shared_tokens // self._size :]
                assert not findable.intersection(own), "published without writing"
                self.counts["wrote nothing"] += 1

    def _check_stale(self) -> None:
        """Of old weights nothing new is published, and all goes with its last reader."""
        epoch, stale = self._cache.manager.epoch, self.oracle.stale()
        assert stale <= self._stale, "published under old weights"
        self._stale = stale
        if not any(s.key.identity.epoch < epoch for s in self.running()):
            assert not stale, "content of old weights without a reader"

    def _check_events(self) -> None:
        """Who heard the stream alone knows which full blocks are cached, in every group."""
        assert self._consumer.cached == self.oracle.full(), "the stream tells another story"


def _tenant(sequence: Sequence) -> bytes:
    return sequence.key.identity.tenant

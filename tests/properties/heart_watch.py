"""What must be true of the heart in every step, with everything switched on.

The watch knows what it was told from outside: who was sent what, and which leases were granted.
Everything else is recounted from block tables and contents, or heard from the stream of events.
"""

from collections import Counter
from collections.abc import Callable

from ostinato.assembly import PrefixCache
from ostinato.core.config import window_blocks
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.plan import StepPlan
from ostinato.sched.scheduler import Scheduler
from ostinato.sched.sequence import Sequence
from ostinato.tenants.terms import EraseReceipt, LeaseId, LeaseReceipt, LeaseStatus, LeaseTerms
from tests.properties.listener import Listener
from tests.properties.promise import Promise
from tests.properties.recount import Recount
from tests.support.fake_runner import FakeRunner
from tests.support.tiny_cache import held_windows, shares_of, windows_of

PUBLIC = b"public"
"""Salt of the one head that may be published."""


class HeartWatch:
    """Looks at every step of one scheduler.

    Attributes:
        leases: Those that were granted and have not ended, by number.
        met: What has happened so far, and how often.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        runner: FakeRunner,
        clock: Callable[[], float],
    ) -> None:
        """Begin before the first request, and listen to events."""
        self.leases: dict[LeaseId, Promise] = {}
        self.met: Counter[str] = Counter()
        self._scheduler, self._cache, self._runner = scheduler, cache, runner
        self._recount = Recount(cache, runner)
        self._config = scheduler.cache.config
        self._size = scheduler.cache.block_size
        self._clock = clock
        self._listener = Listener()
        assert self._cache.events is not None
        self._cache.events.subscribe(self._listener.take)
        self._tables: dict[Sequence, object] = {}
        self._resident: list[Counter[bytes]] = []
        self._stale: set[tuple[int, bytes]] = set()

    def know(self, identity: Identity) -> None:
        """Learn of an identity that something may be cached under."""
        self._recount.know(identity)

    def forget(self, sequence: Sequence) -> None:
        """Learn that a sequence has ended."""
        self._recount.forget(sequence)

    def live(self) -> list[Sequence]:
        """Return every live sequence, by rank."""
        members = self._scheduler.requests.live.values()
        return sorted((s for family in members for s in family), key=lambda s: s.rank)

    # --- one step ---

    def before_plan(self) -> None:
        """Note who runs and who has how much."""
        self._tables = {s: s.table for s in self.live()}
        self._resident = self._recount.residents(self.live())

    def after_plan(self, plan: StepPlan) -> None:
        """Compare a plan with what it was made from, and tell the runner of new weights."""
        assert plan.sequences or not self.live(), "requests are live, and nobody is planned"
        assert plan.num_tokens <= self._scheduler.config.max_num_batched_tokens, "above budget"
        self._cache.check()
        self._expire()
        planned = {s.sequence_id for s in plan.sequences}
        for sequence in self._running():
            if sequence.table is self._tables.get(sequence):
                continue
            if sequence.sequence_id in planned:
                self._admitted(sequence)
            else:
                self.met["forked"] += 1
        new = [s for s in self.live() if s not in self._tables]
        self.met["sibling without room"] += sum(s.table is None for s in new)
        self._check_heads()
        self._check_floors()
        self._check_leases()
        num_leases = len(self.leases) + self._cache.admin.is_public(PUBLIC)
        assert self._cache.admin.num_leases == num_leases, "a lease outlived its time"
        self._recount.learn(self._running())

    def after_step(self) -> None:
        """Look at everything that a step left behind; the stream has told all of it."""
        self.between_steps()
        self._check_stream()
        self._check_windows()

    def between_steps(self) -> None:
        """Check pools, indexes, tables, contents, tenants and leases."""
        self._cache.check()
        num_running = len(self._running())
        assert self._cache.manager.num_live_tables == self._scheduler.num_running == num_running
        self._recount.check_slots()
        self._check_writers()
        self._check_stale()
        self._check_quotas()
        self._check_leases()

    def leased(self, key: PrefixKey, terms: LeaseTerms, receipt: LeaseReceipt) -> None:
        """Take note of what somebody was promised."""
        self._expire()
        self.met[f"lease {receipt.status}"] += 1
        wanted = len(key) // self._size * self._size
        assert (receipt.lease_id is None) == (receipt.status == LeaseStatus.REJECTED)
        assert (receipt.status == LeaseStatus.ACCEPTED) == (not receipt.reason)
        assert receipt.num_tokens == wanted or receipt.status != LeaseStatus.ACCEPTED
        if receipt.lease_id is not None:
            assert receipt.num_tokens > 0
            expires_s = None if terms.ttl_s is None else self._clock() + terms.ttl_s
            assert receipt.expires_s == expires_s
            self.leases[receipt.lease_id] = Promise(key, receipt.num_tokens, terms, expires_s)
        self._check_bound()

    def after_new_epoch(self) -> None:
        """Old content stays only where somebody reads it; and nobody is promised any of it."""
        self.met["ran on under old weights"] += self._scheduler.num_running
        self._stale = self._recount.stale()
        self.between_steps()
        self._check_stream()

    def after_erasure(self, tenant: bytes, receipt: EraseReceipt) -> None:
        """Nothing of the tenant is in indexes, pools, stores, leases or kept events."""
        gone = [n for n, p in self.leases.items() if p.key.identity.belongs_to(tenant)]
        assert receipt.num_leases >= len(gone)  # some may be over, and not yet noticed
        for number in gone:
            del self.leases[number]
        for residents in self._recount.residents(self.live()):
            assert not residents[tenant], "blocks of an erased tenant"
        for store in self._runner.stores:
            parts = [part for text in store if ":" in text for part in text.split("|")]
            owners = {part.partition(":")[0].partition("/")[0] for part in parts}
            assert tenant.decode() not in owners, "KV of an erased tenant"
        assert tenant not in self._cache.stats.tenants
        kept = self._cache.events.replay(max(0, self._listener.num_batches - 4)) or ()
        for event in [event for batch in kept for event in batch.events]:
            assert not getattr(event, "identity", Identity(tenant=b"?")).belongs_to(tenant)
        self.between_steps()
        self._check_stream()

    def after_reset(self) -> None:
        """Nothing is cached, leased or known to outsiders."""
        assert not any(map(len, self._recount.residents(self.live())))
        assert not self._cache.admin.num_leases
        self._stale.clear()
        self.between_steps()
        self._check_stream()
        assert not self._listener.cached

    def nothing_runs(self) -> None:
        """Law 9: nothing is live or leased, so nothing is held; and nobody is above quota."""
        assert not self.live() and self._cache.manager.num_live_tables == 0
        assert self._cache.admin.num_leases == 0
        residents = self._recount.residents([])
        for group, pool in enumerate(self._recount.pools):
            assert pool.num_free == pool.num_blocks, f"blocks leaked in group {group}"
            for tenant, count in residents[group].items():
                quota = shares_of(pool).of(tenant).allotment.quota
                assert quota is None or count <= quota, "more than its quota stayed"
        self._cache.admin.reset()
        self.after_reset()

    # --- what is checked ---

    def _admitted(self, sequence: Sequence) -> None:
        """A hit is of this epoch, and only for those who read."""
        table = sequence.table
        assert table is not None
        self.met["admitted"] += 1
        self.met["shared"] += bool(table.num_shared_tokens)
        self.met["copied"] += bool(table.num_copied_tokens)
        assert sequence.reads_cache or not table.num_cached_tokens, "a hit without reading"
        epoch = self._cache.manager.epoch
        assert sequence.key.identity.epoch == epoch, "admitted under old weights"
        self._runner.truth(sequence.sequence_id).renew(epoch)
        used = table.num_cached_tokens
        used += 0 < used == len(sequence.key) - 1  # all that may hit did (law 4)
        for promise in self.leases.values():
            self.met["lease refreshed"] += promise.use(sequence.key, used, self._clock())
        for window, held in zip(windows_of(self._cache.manager), held_windows(table), strict=True):
            first = window.first_needed(table.num_shared_tokens)
            assert held.first == first, "a hit holds its window, and no more"
            self.met["hit through a window"] += bool(first)

    def _expire(self) -> None:
        now = self._clock()
        over = [number for number, promise in self.leases.items() if promise.is_over(now)]
        for number in over:
            del self.leases[number]
        self.met["lease expired"] += len(over)

    def _check_heads(self) -> None:
        """Behind a public prefix there is content only while it is published."""
        behind = [identity for identity, _ in self._recount.contents() if identity.public_prefix]
        assert not behind or self._cache.admin.is_public(PUBLIC) or self._stale, "a lost tail"
        self.met["behind a public prefix"] += bool(behind)

    def _check_floors(self) -> None:
        """Others' allocations leave a tenant its floor, or what it had if that was less.

        Of a tenant whose own sequence was preempted nothing is said: that one's private blocks
        counted until then.
        """
        now = self._recount.residents(self.live())
        lost = [s for s, table in self._tables.items() if table and s.table is not table]
        self.met["preempted"] += len(lost)
        for group, pool in enumerate(self._recount.pools):
            for tenant in self._config.allotments.keys() - set(map(_tenant, lost)):
                floor, has = shares_of(pool).of(tenant).allotment.floor, now[group][tenant]
                had = self._resident[group][tenant]
                assert has >= min(floor, had), f"{tenant!r} is below its floor in group {group}"
                self.met["floor held"] += 0 < has <= floor

    def _check_quotas(self) -> None:
        """A tenant of which nothing runs has no evictable block above its quota."""
        residents = self._recount.residents(self.live())
        running = set(map(_tenant, self._running()))
        for group, pool in enumerate(self._recount.pools):
            charged = Counter[int]()
            for tenant, count in residents[group].items():
                charged[id(shares_of(pool).of(tenant))] += count
            for account in shares_of(pool) if self._config.allotments else ():
                assert account.num_charged == charged[id(account)], "charged to somebody else"
            for tenant in self._config.allotments.keys() - running:
                account = shares_of(pool).of(tenant)
                self.met["leased above quota"] += bool(account.num_over_quota)
                assert not account.num_over_quota or not account.num_evictable, "above quota"

    def _check_leases(self) -> None:
        """What was promised would hit, now and under any pressure."""
        for promise in self.leases.values():
            key = promise.key
            match = self._cache.manager.match_first(key, promise.num_tokens)
            assert match.num_shared_tokens == promise.num_tokens, "a leased block is gone"
        assert self._cache.admin.num_leases >= len(self.leases), "a lease is gone"

    def _check_bound(self) -> None:
        """Leases and floors leave the longest sequence its blocks, in every group."""
        windows = [window.window for window in self._config.windows]
        needed = [self._config.reserved_blocks, *(window_blocks(w, self._size) for w in windows)]
        for group, pool in enumerate(self._recount.pools):
            floors = sum(account.allotment.floor for account in shares_of(pool))
            bound = len(self._recount.leased(group)) + floors
            assert bound + needed[group] <= pool.num_blocks, f"too much is bound in group {group}"
        assert self._cache.admin.num_leased_blocks == len(self._recount.leased(0))

    def _check_windows(self) -> None:
        """After each step a sequence holds of a window what its next token sees, and no more."""
        for sequence in self._running():
            assert sequence.table is not None
            windows = zip(self._config.windows, held_windows(sequence.table), strict=True)
            for config, held in windows:
                first = max(0, sequence.num_computed - config.window + 1) // self._size
                assert held.first == first, "a block left the window and stayed, or was missed"
                self.met["left the window"] += bool(first)

    def _check_writers(self) -> None:
        """Who does not write has published nothing; its children go on from where it is."""
        findable = {cached.block for _, cached in self._recount.contents()}
        for sequence in self._running():
            if not sequence.request.cache_write and sequence.index == 0:
                assert sequence.table is not None
                own = sequence.table.blocks[sequence.table.num_shared_tokens // self._size :]
                assert not findable.intersection(own), "published without writing"
                self.met["wrote nothing"] += 1

    def _check_stale(self) -> None:
        """Of old weights nothing new is published, and all goes with its last reader."""
        epoch, stale = self._cache.manager.epoch, self._recount.stale()
        assert stale <= self._stale, "published under old weights"
        self._stale = stale
        if not any(s.key.identity.epoch < epoch for s in self._running()):
            assert not stale, "content of old weights that nobody reads"

    def _check_stream(self) -> None:
        """Who heard the stream alone knows which full blocks are cached, in every group."""
        assert self._listener.cached == self._recount.full(), "the stream tells another story"

    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self.live() if sequence.table is not None]


def _tenant(sequence: Sequence) -> bytes:
    return sequence.key.identity.tenant

"""What must be true of every step, whatever was asked of the scheduler.

``StepChecks`` compares the state before a plan with the plan and the state after it. It knows
nothing of how the scheduler decides: which sequence could have waited for which it finds by
comparing texts, letter by letter.
"""

from collections import Counter
from collections.abc import Callable

from ostinato.assembly import PrefixCache
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.core.request import Request
from ostinato.observe.introspection import cached_blocks
from ostinato.sched.scheduler import Scheduler
from ostinato.sched.sequence import Sequence
from tests.support.cache.cache_views import num_common
from tests.support.cache.fake_kv import Chunk
from tests.support.cache.fake_runner import FakeRunner
from tests.support.cache.refcount_oracle import RefcountOracle


class StepChecks:
    """Checks every step of one scheduler.

    Attributes:
        admitted: Who was admitted in the last plan, in its order.
        preempted: Whose blocks were taken back in it.
        counts: What has happened so far, and how often.
        oracle: Recounts owners and contents.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        runner: FakeRunner,
        clock: Callable[[], float],
    ) -> None:
        """Begin before the first request."""
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.counts: Counter[str] = Counter()
        self._scheduler = scheduler
        self._config = scheduler.config
        self._cache = cache
        self._size = scheduler.cache.block_size
        self._runner = runner
        self._clock = clock
        self.oracle = RefcountOracle(cache, runner)
        self._tables: dict[Sequence, object] = {}
        self._uncomputed: dict[Sequence, int] = {}
        self._overtaken: Counter[Sequence] = Counter()
        self._num_computed = 0

    def know(self, request: Request) -> None:
        """Learn of a request that was added."""
        self.oracle.know(request.identity)

    def forget(self, sequence: Sequence) -> None:
        """Learn that a sequence has ended."""
        self.oracle.forget(sequence)

    def live(self) -> list[Sequence]:
        """Return every live sequence, by rank."""
        members = self._scheduler.requests.live.values()
        return sorted((s for family in members for s in family), key=lambda s: s.rank)

    def running(self) -> list[Sequence]:
        """Return every sequence that holds blocks, by rank."""
        return [sequence for sequence in self.live() if sequence.table is not None]

    # --- one step ---

    def before_plan(self) -> None:
        """Note who runs and who waits."""
        self._tables = {s: s.table for s in self.live()}
        self._uncomputed = {s: s.num_uncomputed for s in self.live()}

    def after_plan(self, plan: StepPlan) -> None:
        """Compare a plan with what it was made from."""
        shares = {scheduled.sequence_id: scheduled for scheduled in plan.sequences}
        planned = [s for number in shares for s in self.live() if s.sequence_id == number]
        before = {s for s, table in self._tables.items() if table is not None}
        self.preempted = [s for s in before if s.table is not self._tables[s]]
        stayed = [s for s in before if s not in self.preempted]
        self.admitted = [s for s in planned if s not in stayed]
        self._renew()
        self._count_events()
        assert plan.sequences or not self.live(), "requests are live, and none is planned"
        self._check_budget(plan)
        self._check_running(stayed, shares)
        self._check_victims(stayed)
        self._check_overtaking(shares)
        for late, sequence in enumerate(self.admitted):
            for leader in [*stayed, *self.admitted[:late]]:
                self._check_computed_once(leader, sequence, shares[sequence.sequence_id].start)
        self.oracle.learn(self.running())

    def count(self, plan: StepPlan) -> None:
        """Note what a step computed that did not fail."""
        self._num_computed += plan.num_tokens

    def after_step(self) -> None:
        """Check what a step left behind."""
        self.between_steps()

    def between_steps(self) -> None:
        """Check pool, indexes, live tables, contents and counters."""
        self._cache.check()
        running = self.running()
        assert self._cache.manager.num_live_tables == self._scheduler.num_running == len(running)
        assert self._scheduler.num_waiting == len(self.live()) - len(running)
        assert self._scheduler.has_work == bool(self.live())
        assert all(s.finish_reason is None for s in self.live()), "dead and alive"
        assert not any(s.num_computed for s in self.live() if s.table is None), "holds nothing"
        for sequence in running:
            self._check_written(sequence)
        self.oracle.check_slots()
        self._check_counters()

    def nothing_runs(self) -> None:
        """Law 9: when nothing is live, nothing is held."""
        assert not self.live() and not self._scheduler.num_running
        assert self._cache.manager.num_live_tables == 0
        self._cache.check()
        if not self._cache.admin.num_leases:
            assert self._cache.manager.pool.num_free == self._cache.config.num_blocks
            assert not any(cached.ref_count for cached in cached_blocks(self._cache.manager.index))

    # --- what is checked ---

    def _check_budget(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self._config.max_num_batched_tokens, "above the budget"
        assert self._scheduler.num_running <= self._config.max_num_seqs, "too many run"
        cap = self._config.max_chunk_tokens or plan.num_tokens
        assert all(len(s.tokens) <= cap for s in plan.sequences), "a chunk above its limit"

    def _check_running(
        self, stayed: list[Sequence], shares: dict[SequenceId, ScheduledSequence]
    ) -> None:
        """Rule 1: decodes never starve, nor does the first prefill; nor is anybody overtaken."""
        starved = [s for s in stayed if s.sequence_id not in shares]
        assert all(self._uncomputed[s] > 1 for s in starved), "a decode starves"
        prefills = [s for s in stayed if self._uncomputed[s] > 1]
        if prefills:
            first = min(prefills, key=lambda s: s.rank)
            assert first not in starved, "the first prefill starves"
        self.counts["prefill got nothing"] += len(starved)
        if self._config.order != "shortest_first":
            assert not (starved and self.admitted), "somebody was admitted while others starve"

    def _check_victims(self, stayed: list[Sequence]) -> None:
        """The last in rank pay, and somebody is left."""
        ranks = [s.rank for s in self.preempted]
        assert all(s.rank < rank for s in stayed for rank in ranks), "not the last in rank paid"
        assert stayed or not self.preempted, "everybody was preempted"

    def _check_overtaking(self, shares: dict[SequenceId, ScheduledSequence]) -> None:
        """Who waits for a prefill may be overtaken; in other orders others too, up to a bound."""
        queue = [s for s, table in self._tables.items() if table is None]
        waited = queue[:]
        for sequence in [s for s in waited if s.table is None]:
            if self._waits_for_prefill(sequence, shares):
                self.counts["waited for a prefill"] += 1
                waited.remove(sequence)
        for parent in self._tables.keys() - self.admitted:
            waited += self._siblings_without_room(parent)
        for sequence in self.admitted:
            waited.remove(sequence)
            if sequence in queue:
                queue.remove(sequence)
            bound = self._bound_by_order(queue)
            for other in [other for other in waited if other.rank < sequence.rank]:
                self._overtake(other, sequence, other in bound)
            waited += self._siblings_without_room(sequence)

    def _siblings_without_room(self, parent: Sequence) -> list[Sequence]:
        """Return who was forked off in this step, wanted room and found none."""
        family = self._scheduler.requests.live[parent.request.request_id]
        new = [s for s in family if s not in self._tables and s.table is None]
        return new if parent.index == 0 and parent.request.params.max_tokens != 1 else []

    def _bound_by_order(self, queue: list[Sequence]) -> list[Sequence]:
        """Return who may be overtaken only so often: with fair share, the first of each tenant."""
        if self._config.order != "fair_share":
            return queue
        firsts: dict[tuple[int, bytes], Sequence] = {}
        for sequence in queue:
            tenant = sequence.request.identity.tenant
            firsts.setdefault((sequence.request.priority, tenant), sequence)
        return list(firsts.values())

    def _overtake(self, other: Sequence, sequence: Sequence, is_bound: bool) -> None:
        assert self._config.order != "fcfs", f"{sequence.rank} overtook {other.rank}"
        assert other.request.priority == sequence.request.priority, "priority was overtaken"
        if self._config.order == "fair_share":
            mine, theirs = (s.request.identity.tenant for s in (other, sequence))
            assert mine != theirs, "overtaken by its own tenant"
        self._overtaken[other] += is_bound
        self.counts["overtook"] += 1
        assert self._overtaken[other] <= self._config.max_overtakes, "overtaken too often"

    def _waits_for_prefill(
        self, sequence: Sequence, shares: dict[SequenceId, ScheduledSequence]
    ) -> bool:
        """Whether a running prefill will compute more of it than it has computed by now.

        A state is found by those only that are planned after the step that computes it.
        """
        has_states = self._cache.config.states is not None
        return any(
            leader.num_tokens > (end := self._end_of(leader, shares))
            and self._num_shareable(leader, sequence)
            > (leader.num_computed if has_states else end // self._size * self._size)
            for leader in self._tables
            if leader.table is not None
        )

    def _check_computed_once(self, leader: Sequence, sequence: Sequence, start: int) -> None:
        """Law 1: what a running sequence has computed or will compute is not computed again.

        With windows it may be: what left the window of the one can be evicted before the other
        needs it. So it may with states, which are kept at few positions.
        """
        config = self._cache.config
        is_partial = config.windows or config.states is not None
        most = 0 if is_partial else self._num_shareable(leader, sequence)
        # The copy of a partial block is given up where its tenant can take no other block.
        if not self._cache.manager.pool.num_free or self._cache.config.tenant_shares:
            most = most // self._size * self._size
        assert start >= most, (
            f"{sequence.rank} computes from {start} on what {leader.rank} has up to {most}"
        )

    def _check_written(self, sequence: Sequence) -> None:
        """Law 3, between steps: what a sequence will read is where its tables say."""
        table, texts = sequence.table, self._texts(sequence)
        assert table is not None
        current = sequence.key.identity.epoch == self._cache.manager.epoch
        caching = self._cache.config.enable_prefix_caching
        may_write = sequence.request.cache_write and caching and current
        has_lost_prefix = sequence.key.identity.base is not None and not table.writes
        assert table.writes == may_write or has_lost_prefix
        end = sequence.num_computed
        self._runner.read(Chunk(sequence.rank, table.groups, texts, end, end))

    def _check_counters(self) -> None:
        stats, cache = self._scheduler.stats, self._cache.stats
        computed = stats.computed_prompt_tokens + stats.computed_output_tokens
        assert computed == self._num_computed, "computed tokens are miscounted"
        assert cache.first.num_requests == self.counts["admitted"], "admissions are miscounted"
        assert cache.preempted.num_requests == self.counts["came back"], "returns are miscounted"

    # --- small print ---

    def _renew(self) -> None:
        """Note under which weights sequences are computed: the admitted under those of now."""
        for sequence in self.admitted:
            identity = sequence.key.identity
            assert identity.epoch == self._cache.manager.epoch, "admitted under old weights"
            self.oracle.know(identity)
        for sequence in self.live():
            if sequence in self.admitted or sequence.table is None:
                self._runner.renew(sequence.sequence_id, sequence.key.identity.epoch)

    def _count_events(self) -> None:
        self.counts["preempted"] += len(self.preempted)
        for sibling in [s for s in self.live() if s not in self._tables]:
            self.counts["forked" if sibling.table is not None else "sibling without room"] += 1
        for sequence in self.admitted:
            if sequence.num_preemptions:
                self.counts["came back"] += 1
            else:
                self.counts["sibling admitted" if sequence.index else "admitted"] += 1
            assert sequence.table is not None
            self.counts["shared"] += bool(sequence.table.num_shared_tokens)
            self.counts["copied"] += bool(sequence.table.num_copied_tokens)

    def _num_shareable(self, leader: Sequence, sequence: Sequence) -> int:
        """Tokens of a sequence that a running one has published, or will publish.

        Whole blocks, and of the block in which they differ the text before the first image.
        """
        assert leader.table is not None
        if not leader.table.writes or sequence.reading_is_off:
            return 0
        common = num_common(self._texts(leader), self._texts(sequence))
        most = sequence.num_tokens - 1 if sequence.max_hit is None else sequence.max_hit
        common = min(common, leader.num_tokens // self._size * self._size, most)
        start = common // self._size * self._size
        if start and start == sequence.key.identity.start:
            return start  # the first private block is shared whole
        images = [i.start for i in sequence.request.images if i.start < common and i.end > start]
        return min([common, *(max(start, image) for image in images)])

    def _end_of(self, leader: Sequence, shares: dict[SequenceId, ScheduledSequence]) -> int:
        share = shares.get(leader.sequence_id)
        return leader.num_computed if share is None else share.end

    def _texts(self, sequence: Sequence) -> list[str]:
        return self._runner.truth(sequence.sequence_id).texts

"""The step planner: what one step computes.

Decodes take a token of the budget each, then prefills under way take chunks; a sequence that is
short of blocks preempts the last of the running; then waiting ones are admitted, unless a running
prefill computes their prefix (``single_flight``).
"""

from collections.abc import Callable

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.config import SchedulerConfig
from ostinato.core.plan import CopyRun, StepPlan
from ostinato.core.request import RequestContext
from ostinato.sched.request_table import RequestTable
from ostinato.sched.sequence import ScheduledChunk, Sequence
from ostinato.sched.single_flight import SingleFlight
from ostinato.sched.stats import SchedulerStats


class TokenBudget:
    """Tokens that may still be planned in this step.

    Decodes are served first and number at most ``max_num_seqs``, which is no more than the
    budget: so they never starve, and a prefill gets what they leave (chunked prefill,
    Sarathi, arXiv 2308.16369).
    """

    __slots__ = ("_max_chunk", "left")

    def __init__(self, max_tokens: int, max_chunk_tokens: int | None = None) -> None:
        """Start a step; without a limit on chunks one sequence may take all."""
        self.left = max_tokens
        self._max_chunk = max_tokens if max_chunk_tokens is None else max_chunk_tokens

    @property
    def most(self) -> int:
        """Most tokens that the next sequence could get."""
        return min(self.left, self._max_chunk)

    def take(self, num_tokens: int) -> int:
        """Take up to so many tokens for one sequence; return how many it gets."""
        taken = min(num_tokens, self.most)
        self.left -= taken
        return taken

    def give_back(self, num_tokens: int) -> None:
        """Return the tokens of a sequence that was planned and then preempted."""
        self.left += num_tokens


class StepPlanner:
    """One step, while it is planned.

    Attributes:
        chunks: What the sequences get of it, publishers before those who share their blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        requests: RequestTable,
        stats: SchedulerStats,
        clock: Callable[[], float],
    ) -> None:
        """Begin with an empty plan; ``stats`` counts what was waited for."""
        self.chunks: list[ScheduledChunk] = []
        self._config = config
        self._cache = cache
        self._requests = requests
        self._stats = stats
        self._clock = clock
        self._budget = TokenBudget(config.max_num_batched_tokens, config.max_chunk_tokens)
        self._in_flight = SingleFlight(cache.block_size)
        self._copies: list[CopyRun] = []
        self._is_short_of_blocks = False  # a sequence found too few

    def plan(self) -> StepPlan:
        """Decide; blocks are allocated and published on the way."""
        self._plan_running()
        self._publish_running()
        self._admit_waiting()
        return StepPlan(tuple(s.schedule() for s in self.chunks), tuple(self._copies))

    def _plan_running(self) -> None:
        """Give decodes a token each and prefills under way what is left."""
        running = self._requests.running
        decodes_first = sorted(running, key=lambda s: (s.num_uncomputed > 1, s.rank))
        for sequence in decodes_first:
            if sequence.table is not None and self._budget.left:
                num_tokens = self._make_room(sequence)
                if num_tokens:
                    self.chunks.append(ScheduledChunk(sequence, self._budget.take(num_tokens)))

    def _make_room(self, sequence: Sequence) -> int:
        """Give a running sequence slots for its next tokens; the last in rank pays for one.

        Returns:
            New tokens that have slots; 0 if the sequence itself was preempted.
        """
        wanted = sequence.num_computed + min(sequence.num_uncomputed, self._budget.most)
        while sequence.table is not None:
            room = self._cache.growable(sequence.table, wanted)
            if room > sequence.num_computed:
                self._cache.grow(sequence.table, room)
                return room - sequence.num_computed
            self._is_short_of_blocks = True
            victim = max(self._requests.running, key=lambda s: s.rank)
            for chunk in [chunk for chunk in self.chunks if chunk.sequence is victim]:
                self._budget.give_back(chunk.num_tokens)
                self.chunks.remove(chunk)
            self._requests.preempt(victim)
        return 0

    def _publish_running(self) -> None:
        """Make findable what the running will have computed, and note who goes on."""
        planned = {chunk.sequence.sequence_id: chunk.end for chunk in self.chunks}
        for sequence in self._requests.running:
            self._in_flight.add(sequence, planned.get(sequence.sequence_id, sequence.num_computed))
        for chunk in self.chunks:
            self._publish(chunk)

    def _publish(self, chunk: ScheduledChunk) -> None:
        """Make findable what a chunk computes; a prompt that is complete brings its forks."""
        assert chunk.sequence.table is not None
        self._requests.waiting.planned(chunk.sequence, chunk.num_tokens)
        self._cache.publish(chunk.sequence.table, chunk.end)
        if chunk.samples and chunk.sequence.fork_seeds:
            self._fork(chunk)

    def _admit_waiting(self) -> None:
        """Admit in order while there is a seat, budget and room."""
        order = self._requests.waiting.in_order()
        while self._has_seat():  # asked first: who is next may cost a look at all
            sequence = next(order, None)
            if sequence is None or not self._try_admit(sequence):
                break

    def _has_seat(self) -> bool:
        """Whether another sequence may run in this step, if there are blocks for it."""
        is_free = len(self._requests.running) < self._config.max_num_seqs
        return is_free and self._budget.left > 0 and not self._is_short_of_blocks

    def _try_admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence, unless it waits for a prefill; False if it does not fit."""
        self._rekey(sequence)
        match = self._cache.match(sequence.key) if sequence.reads_cache else self._cache.no_match()
        leader = self._in_flight.leader(sequence, match)
        if leader is not None:
            is_mine = leader.key.identity.tenant == sequence.key.identity.tenant
            sequence.waits_for = leader.request.request_id if is_mine else ""
            return True
        is_sibling = sequence.index > 0 and not sequence.num_preemptions
        again = is_sibling or sequence.num_preemptions > 0
        writes, request = sequence.request.cache_write, sequence.request
        context = RequestContext(
            request.request_id, sequence.reading_is_off, request.fields, request.num_kept_tokens,
            sequence.num_known_tokens, sequence.waits_for, is_sibling,
        )  # fmt: skip
        most_new = self._budget.most
        admitted = self._cache.admit(sequence.key, match, writes, again, most_new, context)
        if admitted is None:
            return False
        table, copies = admitted
        self._copies += copies
        self._requests.admit(sequence, table)
        self._start(sequence, table)
        return True

    def _start(self, sequence: Sequence, table: BlockTable) -> None:
        """Give an admitted sequence its first chunk."""
        if sequence.first_planned_s is None:
            sequence.first_planned_s = self._clock()
            sequence.num_shared_tokens = table.num_shared_tokens
            sequence.num_copied_tokens = table.num_copied_tokens
            self._stats.waited_prompt_tokens += sequence.num_waited_tokens
        slots = table.num_slots - sequence.num_computed
        chunk = ScheduledChunk(sequence, self._budget.take(min(sequence.num_uncomputed, slots)))
        self.chunks.append(chunk)
        self._in_flight.add(sequence, chunk.end)
        self._publish(chunk)

    def _fork(self, chunk: ScheduledChunk) -> None:
        """Make the forks of a prompt that is computed in this step (``n > 1``).

        A fork that finds no room waits like a preempted sequence, first token in hand;
        one whose first token is its last needs no room.
        """
        parent = chunk.sequence
        chunk.children, parent.fork_seeds = parent.forks(), ()
        self._requests.join(chunk.children)
        if parent.request.params.max_tokens == 1:
            return
        for child in chunk.children:
            if len(self._requests.running) < self._config.max_num_seqs:
                self._fork_blocks(chunk, child)

    def _fork_blocks(self, chunk: ScheduledChunk, child: Sequence) -> None:
        """Move a fork to the running, if there are blocks for what it cannot share."""
        assert chunk.sequence.table is not None
        forked = self._cache.fork(chunk.sequence.table, chunk.end)
        if forked is None:
            self._is_short_of_blocks = True
            return
        table, copies = forked
        child.key = table.key
        self._copies += copies
        self._requests.run(child, table)

    def _rekey(self, sequence: Sequence) -> None:
        """Look a waiting sequence up under the weights of now, not of when it came."""
        if sequence.key.identity.epoch != self._cache.epoch:
            sequence.key = self._cache.rekey(sequence.key)

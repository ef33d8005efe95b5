"""Who runs, who waits for whom, who is preempted?

A step is plan, then run, then commit or fail::

    plan    decodes take a token of the budget each, then prefills under way take chunks;
            who is short of blocks preempts the last of the running; then the waiting are
            admitted, unless a running prefill computes their prefix (``flight``)
    commit  tokens are appended, ended sequences give their blocks back
    fail    the sequences of the step end; nothing that they published stays

Rules:

1. Every decode gets its token in every step, and the first prefill at least one: nobody
   starves.
2. Sequences are planned in an order in which whoever shares blocks of the step comes after
   their publisher; ``CacheManager.fail`` relies on it.
3. A preempted sequence keeps its tokens and its place; its blocks stay findable.
4. Whoever is next and does not fit is not overtaken; whoever waits for a prefill is.
5. Nobody is admitted in a step in which a running sequence got nothing: so whoever is waited
   for goes on.
"""

import time
from collections.abc import Callable

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import DuplicateRequest
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import CopyRun, SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import FinishReason, Request
from ostinato.sched.admission import check_prompt, finish_reason, max_sequence_tokens
from ostinato.sched.budget import TokenBudget
from ostinato.sched.flight import Flight
from ostinato.sched.roster import Roster
from ostinato.sched.sequence import Sequence
from ostinato.sched.share import SequenceUpdate, Share, tables_of
from ostinato.sched.stats import SchedulerStats


class Scheduler:
    """Decides what each step computes.

    Attributes:
        config: As given.
        cache: As given.
        stats: Counters since the start.
        roster: Every live sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a scheduler without requests over a cache."""
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._clock = clock
        self.roster = Roster(config, cache, self.stats, self._num_cached_tokens)
        self._longest = max_sequence_tokens(config, cache.config)
        self._next_id = 0
        self._shares: list[Share] = []
        self._copies: list[CopyRun] = []
        self._is_short_of_blocks = False  # in this step somebody found too few

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self.roster.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.roster.running)

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.roster)

    def check(self, request: Request) -> None:
        """Refuse a request that could never be served; no effects.

        Raises:
            EmptyPrompt: It has no tokens.
            PromptTooLong: It can never fit the model's context or the pool.
            DuplicateRequest: Its id is in use.
        """
        check_prompt(len(request.prompt_token_ids), self.config, self.cache.config)
        if request.request_id in self.roster:
            raise DuplicateRequest(
                f"request id {request.request_id!r} is in use: wait until that request has "
                "ended, or choose another id"
            )

    def add(self, request: Request, seeds: tuple[int, ...]) -> None:
        """Take a request.

        Args:
            request: What to continue.
            seeds: One per continuation, ``request.params.n`` of them.

        Raises:
            EmptyPrompt: It has no tokens.
            PromptTooLong: It can never fit the model's context or the pool.
            DuplicateRequest: Its id is in use.
        """
        self.check(request)
        assert len(seeds) == request.params.n, "one seed per continuation"
        key = PrefixKey(request.identity, request.prompt_token_ids, request.images)
        number = SequenceId(self._next_id)
        self._next_id += len(seeds)  # siblings get the numbers behind it
        form = None if request.form is None else request.form.copy()
        sequence = Sequence(number, request, 0, key, seeds[0], seeds[1:], form=form)
        if sequence.reads_cache:
            sequence.num_known_tokens = self.cache.match(key).num_shared_tokens
        self.roster.enter(sequence)

    def plan(self) -> StepPlan:
        """Decide what the next forward pass computes.

        Returns:
            The plan; without sequences if nothing can run.

        Effects: blocks are allocated and published; ``commit`` or ``fail`` must follow.
        """
        assert not self._shares, "the last step was neither committed nor failed"
        self.cache.custody.expire()
        budget = TokenBudget(self.config.max_num_batched_tokens, self.config.max_chunk_tokens)
        flight = Flight(self.cache.block_size)
        self._is_short_of_blocks = False
        self._plan_running(budget)
        self._publish_running(flight)
        self._admit_waiting(budget, flight)
        return StepPlan(tuple(s.schedule() for s in self._shares), tuple(self._copies))

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Take the result of the planned step.

        Returns:
            What it brought, in the order of the plan.
        """
        shares = self._end_step()
        self.cache.commit(tables_of(shares))
        updates: list[SequenceUpdate] = []
        for share, outcome in zip(shares, result.sequences, strict=True):
            updates += self._commit_share(share, outcome)
        return updates

    def fail(self) -> list[SequenceUpdate]:
        """End the sequences of a step whose forward pass raised; others go on.

        Returns:
            One update per sequence that ended, with ``FinishReason.ERROR``.
        """
        self.stats.num_failed_steps += 1
        shares = self._end_step()
        self.cache.fail(tables_of(shares))
        ended = [member for share in shares for member in share.family]
        for sequence in ended:
            self.roster.lose(sequence, FinishReason.ERROR)
        return [SequenceUpdate(sequence) for sequence in ended]

    def finish(self, sequence: Sequence, reason: FinishReason, stop: str | None = None) -> None:
        """End a live sequence between steps, such as at a stop string."""
        assert not self._shares, "a step is under way"
        sequence.stop_reason = stop
        self.roster.leave(sequence, reason)

    def cancel(self, request_id: RequestId) -> list[Sequence]:
        """End all sequences of a request between steps; an unknown id has none.

        Returns:
            The sequences that ended.

        Effects: their blocks are given back at once; what was computed stays findable.
        """
        ended = self.roster.of(request_id)
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT)
        return ended

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, between steps."""
        assert not self._shares, "a step is under way"
        for sequence in self.roster.running[:]:
            self.roster.preempt(sequence)

    def _plan_running(self, budget: TokenBudget) -> None:
        """Give decodes a token each and prefills under way what is left."""
        running = self.roster.running
        decodes_first = sorted(running, key=lambda s: (s.num_uncomputed > 1, s.rank))
        for sequence in decodes_first:
            if sequence.table is not None and budget.left:
                num_tokens = self._make_room(sequence, budget)
                if num_tokens:
                    self._shares.append(Share(sequence, budget.take(num_tokens)))

    def _make_room(self, sequence: Sequence, budget: TokenBudget) -> int:
        """Give a running sequence slots for its next tokens; the last in rank pays for one.

        Returns:
            New tokens that have slots; 0 if the sequence itself was preempted.
        """
        wanted = sequence.num_computed + min(sequence.num_uncomputed, budget.most)
        while sequence.table is not None:
            room = self.cache.growable(sequence.table, wanted)
            if room > sequence.num_computed:
                self.cache.grow(sequence.table, room)
                return room - sequence.num_computed
            self._is_short_of_blocks = True
            victim = max(self.roster.running, key=lambda s: s.rank)
            for share in [share for share in self._shares if share.sequence is victim]:
                budget.give_back(share.num_tokens)
                self._shares.remove(share)
            self.roster.preempt(victim)
        return 0

    def _publish_running(self, flight: Flight) -> None:
        """Make findable what the running will have computed, and note who goes on."""
        planned = {share.sequence.sequence_id: share.end for share in self._shares}
        for sequence in self.roster.running:
            flight.add(sequence, planned.get(sequence.sequence_id, sequence.num_computed))
        for share in self._shares:
            self._publish(share)

    def _publish(self, share: Share) -> None:
        """Make findable what a share computes; a prompt that is complete brings its siblings."""
        assert share.sequence.table is not None
        self.roster.waiting.planned(share.sequence, share.num_tokens)
        self.cache.publish(share.sequence.table, share.end)
        if share.samples and share.sequence.sibling_seeds:
            self._fork(share)

    def _admit_waiting(self, budget: TokenBudget, flight: Flight) -> None:
        """Admit in order while there is a seat, budget and room."""
        order = self.roster.waiting.in_order()
        while self._has_seat(budget):  # asked first: who is next may cost a look at all
            sequence = next(order, None)
            if sequence is None or not self._try(sequence, budget, flight):
                break

    def _has_seat(self, budget: TokenBudget) -> bool:
        """Whether another sequence may run in this step, if there are blocks for it."""
        is_free = len(self.roster.running) < self.config.max_num_seqs
        return is_free and budget.left > 0 and not self._is_short_of_blocks

    def _try(self, sequence: Sequence, budget: TokenBudget, flight: Flight) -> bool:
        """Admit a waiting sequence, unless it waits for a prefill; False if it does not fit."""
        self._renew(sequence)
        match = self.cache.match(sequence.key) if sequence.reads_cache else self.cache.no_match()
        leader = flight.leader(sequence, match)
        if leader is not None:
            is_mine = leader.key.identity.tenant == sequence.key.identity.tenant
            sequence.waits_for = leader.request.request_id if is_mine else ""
            return True
        again = sequence.num_preemptions > 0
        writes = sequence.request.cache_write
        admitted = self.cache.admit(sequence.key, match, writes, again, budget.most)
        if admitted is None:
            return False
        table, copies = admitted
        self._copies += copies
        self.roster.admit(sequence, table)
        self._start(sequence, table, budget, flight)
        return True

    def _start(
        self, sequence: Sequence, table: BlockTable, budget: TokenBudget, flight: Flight
    ) -> None:
        """Give an admitted sequence its first share."""
        if sequence.first_planned_s is None:
            sequence.first_planned_s = self._clock()
            sequence.num_shared_tokens = table.num_shared_tokens
            sequence.num_copied_tokens = table.num_copied_tokens
            self.stats.waited_prompt_tokens += sequence.num_waited_tokens
        self._describe(sequence, table)
        slots = self.cache.num_slots(table) - sequence.num_computed
        share = Share(sequence, budget.take(min(sequence.num_uncomputed, slots)))
        self._shares.append(share)
        flight.add(sequence, share.end)
        self._publish(share)

    def _describe(self, sequence: Sequence, table: BlockTable) -> None:
        """Tell the chronicle whose table it is, for explanations."""
        visit, request = table.visit, sequence.request
        if visit is None:
            return
        chronicle, off = self.cache.chronicle, sequence.reading_is_off
        if not self.cache.config.enable_prefix_caching:
            off = "enable_prefix_caching=False"
        chronicle.describe(visit, request.request_id, off, request.fields)
        chronicle.waited(visit, sequence.num_known_tokens, sequence.waits_for)

    def _fork(self, share: Share) -> None:
        """Make the siblings of a prompt that is computed in this step (``n > 1``).

        A sibling that finds no room waits like a preempted sequence, first token in hand;
        one whose first token is its last needs no room.
        """
        parent = share.sequence
        share.children, parent.sibling_seeds = parent.siblings(), ()
        self.roster.join(share.children)
        if parent.request.params.max_tokens == 1:
            return
        for child in share.children:
            if len(self.roster.running) < self.config.max_num_seqs:
                self._fork_blocks(share, child)

    def _fork_blocks(self, share: Share, child: Sequence) -> None:
        """Move a sibling to the running, if there are blocks for what it cannot share."""
        assert share.sequence.table is not None
        forked = self.cache.fork(share.sequence.table, share.end)
        if forked is None:
            self._is_short_of_blocks = True
            return
        table, copies = forked
        child.key = table.key
        self._copies += copies
        self.roster.run(child, table)

    def _commit_share(self, share: Share, outcome: SequenceResult) -> list[SequenceUpdate]:
        """Take one sequence's result; append its token and those of its children."""
        sequence, start = share.sequence, share.sequence.num_computed
        samples, end = share.samples, share.end
        self.stats.count_computed(start, end, sequence.num_prompt_tokens)
        sequence.take_prompt_logprobs(start, outcome.prompt_logprobs)
        for member in share.family:
            member.num_computed = end if member.table is not None else 0
        if not samples:
            return []
        tokens = zip(share.family, outcome.samples, strict=True)
        return [self._append(member, token) for member, token in tokens]

    def _append(self, sequence: Sequence, token: SampledToken) -> SequenceUpdate:
        """Append a sampled token, and end or requeue the sequence if need be."""
        if token.error:
            self.roster.leave(sequence, FinishReason.ERROR)
            return SequenceUpdate(sequence, token)
        sequence.key.append(token.token_id)
        if sequence.form is not None:
            sequence.form.advance(token.token_id)
        reason = finish_reason(sequence, self._longest)
        if reason is not None:
            self.roster.leave(sequence, reason)
        elif sequence.table is None:  # a sibling that found no room
            self.roster.wait_again(sequence)
        return SequenceUpdate(sequence, token)

    def _end_step(self) -> list[Share]:
        """Close the step: its shares are handed over once."""
        self.stats.num_steps += bool(self._shares)
        shares, self._shares, self._copies = self._shares, [], []
        return shares

    def _renew(self, sequence: Sequence) -> None:
        """Look a waiting sequence up under the weights of now, not of when it came."""
        if sequence.key.identity.epoch != self.cache.custody.epoch:
            sequence.key = self.cache.custody.renew(sequence.key)

    def _num_cached_tokens(self, sequence: Sequence) -> int:
        """Look a waiting sequence up; no effects."""
        return self.cache.match(sequence.key).num_tokens if sequence.reads_cache else 0

"""The step planner: what one step computes.

Decodes take a token of the budget each; they number at most ``max_num_seqs``, which is no more
than the budget, and so they never starve. Running prefills take chunks of what is left (chunked
prefill, Sarathi, arXiv 2308.16369), as far as the time of a step and the waiting order allow. A
sequence that is short of blocks preempts the last of the running. Then waiting ones are admitted,
unless a running prefill computes their prefix.
"""

from array import array
from operator import attrgetter

from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.config import SchedulerConfig
from ostinato.core.ids import SequenceId
from ostinato.core.plan import CopyRun, StepPlan
from ostinato.core.request import RequestContext
from ostinato.sched.sequence import ScheduledChunk, Sequence
from ostinato.sched.waiting_queue import RequestTable, StepRoom

_END_OF, _NUM_COMPUTED = attrgetter("end"), attrgetter("num_computed")


class PromptRoom:
    """What is left of a step for prompts; by default they may take all of it."""

    def max_chunk_tokens(self, start: int) -> int:
        """Return how many tokens after ``start`` others still fit into the step; 0 if none."""
        return 2**31

    def take(self, start: int, num_tokens: int) -> None:
        """Note that a prompt computes so many tokens after ``start`` others in this step.

        A negative number gives them back.
        """


class StepCosts:
    """The port of step times: bounds what prompts compute in a step; by default nothing does."""

    def begin(self, decoding: list[int], starts: list[int], is_alone: bool) -> PromptRoom:
        """Begin to divide a step among prompts.

        Args:
            decoding: Lengths of the sequences that decode in it.
            starts: Tokens that are computed of each prompt that has begun.
            is_alone: Whether only one sequence lives.
        """
        return PromptRoom()

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Note how long a step took, from its plan to its commit."""


class Drafts:
    """The port of drafts: guesses of the tokens that decodes sample next; by default none."""

    def propose(self, decoding: list[Sequence]) -> "dict[SequenceId, array[int]]":
        """Return guesses for some of the sequences that decode in a step without prompts."""
        return {}

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Note for how many drafts a step had rows, and how many of them were right."""


class StepPlanner:
    """One step, while it is planned.

    Prefills that will go on after it are *leaders*: others wait for them to compute a prefix (law
    1, single flight). Nothing about the wait is stored: each step derives it again from the running
    sequences. If a leader is cancelled, fails or is preempted, its followers are admitted without
    it, so no sequence waits for one that makes no progress. A prompt that is finished in this step
    needs no wait: its blocks can be found once they are planned; its states, after the step.

    Attributes:
        chunks: What the sequences get of it, publishers before those who share their blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        begun_s: float,
        costs: StepCosts,
        drafts: Drafts,
    ) -> None:
        """Begin with an empty plan."""
        self.chunks: list[ScheduledChunk] = []
        self._config = config
        self._costs = costs
        self._drafts = drafts
        self._cache = requests.cache
        self._requests = requests
        self._begun_s = begun_s
        self._budget = config.max_num_batched_tokens
        self._max_chunk = config.max_chunk_tokens or self._budget
        self._leaders: list[tuple[Sequence, BlockTable, int]] = []  # tokens that are published
        self._room = PromptRoom()
        self._min_chunk_tokens = self._cache.chunk_unit or 1
        self._copies: list[CopyRun] = []
        self._is_short = False  # a sequence found too few blocks, or no time
        self._is_decoding, self._has_prompt = True, False  # whose chunks there are so far
        self._limits: dict[SequenceId, int] = {}  # most tokens of some prompts

    def plan(self) -> StepPlan:
        """Decide; blocks are allocated and published on the way."""
        self._requests.forked.clear()
        if self._requests.running or self._requests.branches:
            self._plan_running()
            self._publish_running()
        else:
            self._begin_prompts([])
        self._admit_waiting()
        if not self.chunks:
            self._make_room()
        sequences = tuple(map(ScheduledChunk.schedule, self.chunks))
        return StepPlan(sequences, tuple(self._copies), *self._cache.state_copies)

    def _max_chunk_tokens(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens a prompt may compute; the step's first gets some in any case."""
        room = min(self._budget, self._max_chunk)
        limit = self._room.max_chunk_tokens(start)
        limit = min(limit, self._limits.get(sequence.sequence_id, limit))
        return min(room, limit if self._has_prompt else max(limit, self._min_chunk_tokens))

    def _add_chunk(self, sequence: Sequence, end: int) -> ScheduledChunk:
        """Give a sequence what it needs of the budget to be computed up to ``end``."""
        chunk = ScheduledChunk(sequence, end - sequence.num_computed)
        self._budget -= chunk.num_tokens
        self.chunks.append(chunk)
        if self._is_decoding:
            return chunk
        self._has_prompt = True
        self._room.take(sequence.num_computed, chunk.num_tokens)
        return chunk

    def _plan_running(self) -> None:
        """Give decodes a token each, and running prefills the rest."""
        running = sorted(self._requests.running, key=lambda s: s.rank)
        for sequence in running:
            if sequence.num_uncomputed == 1 and sequence.table is not None:
                self._plan_next(sequence)
        if self._requests.branches:
            self._plan_branches()
        prefilling = [s for s in running if s.num_uncomputed > 1 and s.table is not None]
        if self.chunks and not prefilling:
            self._add_drafts()
        self._begin_prompts(prefilling)
        for sequence in prefilling:
            if sequence.table is not None and self._budget:
                self._plan_next(sequence)

    def _plan_branches(self) -> None:
        """Let sequences of searches go on, each with its token: forks first, then their parents.

        A fork publishes at once, since the cache takes a fork that has published for settled only
        while no other follows it. One that finds no room waits like a preempted sequence.
        """
        requests = self._requests
        branches, requests.branches = requests.branches, []
        for parent, sequence, token in branches:
            if sequence.finish_reason is not None:
                continue
            is_running = sequence is parent or self._fork_running(parent, sequence)
            sequence.key.append(token)
            if not is_running:
                requests.wait(sequence)
            elif sequence.table is not None and self._budget:
                num_chunks = len(self.chunks)
                self._plan_next(sequence)
                if sequence is not parent and len(self.chunks) > num_chunks:
                    self._publish(self.chunks[-1])

    def _fork_running(self, parent: Sequence, child: Sequence) -> bool:
        """Fork a sequence between two of its tokens; False if it has no room, seat or table.

        States and windows are not forked here: after the step the parent's state is that of its
        next token, and a fork of windows publishes nothing before its copies have run.
        """
        table, has_seat = parent.table, len(self._requests.running) < self._config.max_num_seqs
        if table is None or len(self._cache.pools) > 1 or not has_seat:
            return False
        end = table.num_slots + 1  # a block for the token that follows, whether it needs one or not
        forked = self._cache.fork(table) if self._cache.growable(table, end) == end else None
        if forked is None:
            self._is_short = True
            return False
        child.key, child.num_computed = forked[0].key, parent.num_computed
        self._requests.run(child, forked[0])
        self._requests.forked += [parent, child]
        self._copies += forked[1]
        return True

    def _make_room(self) -> None:
        """Take the blocks of one sequence that only waits for its siblings: they lack room."""
        held = [s for s in self._requests.running if s.sampled is not None]
        if held:
            self._requests.preempt(max(held, key=lambda s: s.rank))

    def _add_drafts(self) -> None:
        """Add rows for guesses of what decodes sample next, where they find room at once."""
        guesses = self._drafts.propose([chunk.sequence for chunk in self.chunks])
        for chunk in self.chunks if guesses else ():
            sequence, table = chunk.sequence, chunk.sequence.table
            drafts = guesses.get(sequence.sequence_id)
            if not drafts or table is None or sequence.fork_seeds:
                continue
            longest = self._config.max_model_len - 1 - chunk.end  # the last token needs no row
            count = min(len(drafts), sequence.max_drafts, longest, self._budget)
            if count > 0 and (room := self._cache.growable(table, chunk.end + count)) > chunk.end:
                self._cache.grow(table, room)
                chunk.drafts = drafts[: room - chunk.end]
                self._budget -= len(chunk.drafts)

    def _begin_prompts(self, prefilling: list[Sequence]) -> None:
        """Let step costs and waiting order divide what decodes leave of the step."""
        requests = self._requests
        num_running, waiting = len(requests.running), requests.waiting
        decoding = list(map(_END_OF, self.chunks))
        self._is_decoding = False
        starts = list(map(_NUM_COMPUTED, prefilling))
        self._room = self._costs.begin(decoding, starts, num_running + len(waiting) == 1)
        room = StepRoom(self._budget, self._config.max_num_seqs - num_running)
        self._limits = requests.order.divide(prefilling, waiting, room)

    def _plan_next(self, sequence: Sequence) -> None:
        """Plan a running sequence's next tokens; while none has a slot, preempt the last in rank.

        That may be the sequence itself.
        """
        end = self._end_of_chunk(sequence)
        if end == sequence.num_computed and sequence.sequence_id not in self._limits:
            self._is_short = True
        while sequence.table is not None and end > sequence.num_computed:
            room = self._cache.growable(sequence.table, end)
            if room > sequence.num_computed:
                self._cache.grow(sequence.table, room)
                self._add_chunk(sequence, room)
                return
            self._is_short = True
            victims = [s for s in self._requests.running if s not in self._requests.forked]
            if not victims:
                return
            victim = max(victims, key=lambda s: s.rank)
            for chunk in [chunk for chunk in self.chunks if chunk.sequence is victim]:
                self._budget += chunk.num_tokens
                self._room.take(victim.num_computed, -chunk.num_tokens)
                self.chunks.remove(chunk)
            self._requests.preempt(victim)

    def _end_of_chunk(self, sequence: Sequence) -> int:
        """Return where a sequence's next chunk may end: where its state can be kept, if it has."""
        start, end = sequence.num_computed, len(sequence.key.tokens)
        if end - start == 1:
            return end
        end = min(end, start + self._max_chunk_tokens(sequence, start))
        if self._cache.chunk_unit is None:
            return end
        assert sequence.table is not None
        waiting = (s.key for s in self._requests.waiting if not s.reading_is_off)
        return self._cache.end_of_chunk(sequence.table, start, end, waiting)

    def _publish_running(self) -> None:
        """Publish the blocks that this step computes; record which prefills continue."""
        planned = {chunk.sequence.sequence_id: chunk.end for chunk in self.chunks}
        for sequence in self._requests.running:
            num_planned = planned.get(sequence.sequence_id, sequence.num_computed)
            if num_planned < len(sequence.key.tokens):
                self._add_leader(sequence, num_planned)
        for chunk in self.chunks:
            if not chunk.is_published:
                self._publish(chunk)

    def _publish(self, chunk: ScheduledChunk) -> None:
        """Publish what a chunk computes, and fork a prompt that is complete."""
        assert chunk.sequence.table is not None
        chunk.is_published = True
        self._requests.order.planned(chunk.sequence, chunk.num_tokens)
        self._cache.publish(chunk.sequence.table, chunk.end)
        if chunk.samples and chunk.sequence.fork_seeds:
            self._fork(chunk)

    def _admit_waiting(self) -> None:
        """Admit in order while there is a seat, budget and room."""
        candidates = self._requests.order.candidates(self._requests.waiting)
        while (
            self._requests.waiting and self._has_seat()
        ):  # checked first: ranking may scan the whole queue
            sequence = next(candidates, None)
            if sequence is None or not self._try_admit(sequence):
                break

    def _has_seat(self) -> bool:
        """Whether another sequence may run in this step, if there are blocks for it."""
        is_free = len(self._requests.running) < self._config.max_num_seqs
        return is_free and self._budget >= self._min_chunk_tokens and not self._is_short

    def _try_admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence, unless it waits for a prefill; False if it does not fit."""
        cache, request = self._cache, sequence.request
        if sequence.key.identity.epoch != cache.epoch:
            sequence.key, sequence.match = cache.rekey(sequence.key), None
        reading_is_off = sequence.reading_is_off if (max_hit := sequence.max_hit) == 0 else ""
        match, sequence.match = sequence.match, None
        if match is None or match.version != cache.version:
            match = cache.match(sequence.key, max_hit)
        may_wait = self._leaders and not reading_is_off
        leader = self._leader(sequence, match) if may_wait else None
        if leader is not None:
            is_same_tenant = leader.key.identity.tenant == sequence.key.identity.tenant
            sequence.waits_for = leader.request.request_id if is_same_tenant else ""
            return True
        chunk_tokens = self._max_chunk_tokens(sequence, match.num_tokens)
        if chunk_tokens < min(self._min_chunk_tokens, len(sequence.key.tokens) - match.num_tokens):
            return False
        is_sibling = sequence.index > 0 and not sequence.num_preemptions
        context = RequestContext(
            request.request_id, reading_is_off, request.prompt_sections, request.num_kept_tokens,
            sequence.num_known_tokens, sequence.waits_for, is_sibling,
            is_readmission=is_sibling or sequence.num_preemptions > 0,
        )  # fmt: skip
        admitted = cache.admit(sequence.key, match, request.cache_write, chunk_tokens, context)
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
            sequence.first_planned_s = self._begun_s
            sequence.num_shared_tokens = table.num_shared_tokens
            sequence.num_copied_tokens = table.num_copied_tokens
            self._requests.stats.waited_prompt_tokens += sequence.num_waited_tokens
        chunk = self._add_chunk(sequence, min(self._end_of_chunk(sequence), table.num_slots))
        if not chunk.samples:
            self._add_leader(sequence, chunk.end)
        self._publish(chunk)

    def _add_leader(self, sequence: Sequence, num_planned: int) -> None:
        """Note a prompt of which so many tokens, and not all, are computed after this step."""
        table = sequence.table
        if table is not None and table.writes:
            if self._cache.chunk_unit is not None:  # states are findable after the step
                num_planned = sequence.num_computed
            published = num_planned - num_planned % self._cache.block_size
            self._leaders.append((sequence, table, published))

    def _leader(self, sequence: Sequence, match: PrefixMatch) -> Sequence | None:
        """Find a prefill that will publish more of a prompt than is cached now; None if none does.

        Cost: O(prefills in flight) comparisons of packed tokens.
        """
        for leader, table, published in self._leaders:
            common = leader.key.num_common_tokens(sequence.key)
            to_publish = leader.num_tokens - leader.num_tokens % self._cache.block_size
            max_tokens = min(common, to_publish, sequence.num_tokens - 1)
            to_hit = self._cache.deepest_hit(table, sequence.key, max_tokens)
            # What the leader computed before may be evicted from a window: no use in waiting.
            if to_hit > max(match.num_tokens, published):
                return leader
        return None

    def _fork(self, chunk: ScheduledChunk) -> None:
        """Make the forks of a prompt that is computed in this step (``n > 1``).

        A fork that finds no room waits like a preempted sequence, first token in hand;
        one whose first token is its last needs no room.
        """
        parent, table = chunk.sequence, chunk.sequence.table
        assert table is not None
        forks, parent.fork_seeds = parent.forks(), ()
        chunk.members += forks
        self._requests.live[parent.request.request_id] += forks
        for child in forks if parent.request.params.max_tokens != 1 else ():
            if len(self._requests.running) == self._config.max_num_seqs:
                break
            forked = self._cache.fork(table)
            if forked is None:
                self._is_short = True
                break
            child.key = forked[0].key
            self._requests.run(child, forked[0])
            self._copies += forked[1]

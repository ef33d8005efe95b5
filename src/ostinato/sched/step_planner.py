"""The step planner: what one step computes.

Decodes take a token of the budget each; they number at most ``max_num_seqs``, which is no more
than the budget, and so they never starve. Running prefills take chunks of what is left (chunked
prefill, Sarathi, arXiv 2308.16369), as far as the time of a step and the waiting order allow. A
sequence that is short of blocks preempts the last of the running. Then waiting ones are admitted,
unless a running prefill computes their prefix.
"""

from array import array
from dataclasses import dataclass, field
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
        """Note that a prompt computes ``num_tokens`` tokens after ``start`` others in this step.

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


@dataclass(eq=False)
class StepPlanner:
    """One step, while it is planned.

    Prefills that continue after it are *leaders*; other prompts wait for their prefixes (law 1,
    single flight). Nothing about the wait is stored: each step derives it again from the running
    sequences. If a leader is cancelled, fails or is preempted, its followers are admitted without
    it, so no sequence waits for one that makes no progress. A prompt that is finished in this step
    needs no wait: its blocks can be found once they are planned; its states, after the step.

    Attributes:
        chunks: What the sequences get of it, publishers before those who share their blocks.
    """

    config: SchedulerConfig
    requests: RequestTable
    begun_s: float
    costs: StepCosts
    drafts: Drafts
    chunks: list[ScheduledChunk] = field(init=False, default_factory=list)
    _leaders: list[tuple[Sequence, BlockTable, int]] = field(init=False, default_factory=list)
    """Each with its tokens that are published."""
    _room: PromptRoom = field(init=False, default_factory=PromptRoom)
    _limits: dict[SequenceId, int] = field(init=False, default_factory=dict)
    """Most tokens of some prompts."""
    _copies: list[CopyRun] = field(init=False, default_factory=list)
    _is_short: bool = field(init=False, default=False)
    """Whether a sequence found too few blocks, or no time."""
    _has_prompt: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Begin with an empty plan."""
        self._cache = self.requests.cache
        self._budget = self.config.max_num_batched_tokens
        self._min_chunk_tokens = self._cache.chunk_unit or 1

    def plan(self) -> StepPlan:
        """Decide; blocks are allocated and published on the way."""
        self.requests.forked.clear()
        prefilling = self._plan_decodes() if self.requests.running or self.requests.branches else []
        self._begin_prompts(prefilling)
        for sequence in prefilling:
            if sequence.table is not None and self._budget:
                self._plan_next(sequence)
        if self.requests.running:
            self._publish_running()
        self._admit_waiting()
        if not self.chunks:
            self._make_room()
        sequences = tuple(map(ScheduledChunk.schedule, self.chunks))
        return StepPlan(sequences, tuple(self._copies), *self._cache.state_copies)

    def _max_chunk_tokens(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens a prompt may compute; the step's first gets some in any case."""
        room = min(self._budget, self.config.max_chunk_tokens or self._budget)
        limit = self._room.max_chunk_tokens(start)
        limit = min(limit, self._limits.get(sequence.sequence_id, limit))
        return min(room, limit if self._has_prompt else max(limit, self._min_chunk_tokens))

    def _add_chunk(self, sequence: Sequence, end: int) -> ScheduledChunk:
        """Give a sequence what it needs of the budget to be computed up to ``end``."""
        chunk = ScheduledChunk(sequence, end - sequence.num_computed)
        self._budget -= chunk.num_tokens
        self.chunks.append(chunk)
        self._has_prompt = True
        self._room.take(sequence.num_computed, chunk.num_tokens)
        return chunk

    def _plan_decodes(self) -> list[Sequence]:
        """Give decodes a token each; return the running prefills."""
        running = sorted(self.requests.running, key=lambda s: s.rank)
        for sequence in running:
            if sequence.num_uncomputed == 1 and sequence.table is not None:
                self._plan_next(sequence)
        if self.requests.branches:
            self._plan_branches()
        prefilling = [s for s in running if s.num_uncomputed > 1 and s.table is not None]
        if self.chunks and not prefilling:
            self._add_drafts()
        return prefilling

    def _plan_branches(self) -> None:
        """Let sequences of searches go on, each with its token: forks first, then their parents.

        A fork publishes at once, since the cache takes a fork that has published for settled only
        while no other follows it. One that finds no room waits like a preempted sequence.
        """
        branches, self.requests.branches = self.requests.branches, []
        for parent, sequence, token in branches:
            if sequence.finish_reason is not None:
                continue
            is_running = sequence is parent or self._fork_running(parent, sequence)
            sequence.key.append(token)
            if not is_running:
                self.requests.wait(sequence)
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
        table, has_seat = parent.table, len(self.requests.running) < self.config.max_num_seqs
        if table is None or len(self._cache.pools) > 1 or not has_seat:
            return False
        end = table.num_slots + 1  # a block for the token that follows, whether it needs one or not
        if not self._try_fork(table, child, end):
            return False
        child.num_computed = parent.num_computed
        self.requests.forked += [parent, child]
        return True

    def _try_fork(self, table: BlockTable, child: Sequence, end: int = 0) -> bool:
        """Run a sequence on a fork of another's table, if ``end`` tokens could have slots."""
        forked = self._cache.fork(table) if self._cache.growable(table, end) == end else None
        if forked is None:
            self._is_short = True
            return False
        child.key = forked[0].key
        self.requests.run(child, forked[0])
        self._copies += forked[1]
        return True

    def _make_room(self) -> None:
        """Take the blocks of one sequence that only waits for its siblings: they lack room."""
        held = [s for s in self.requests.running if s.sampled is not None]
        if held:
            self.requests.preempt(max(held, key=lambda s: s.rank))

    def _add_drafts(self) -> None:
        """Add rows for guesses of what decodes sample next, where they find room at once."""
        guesses = self.drafts.propose([chunk.sequence for chunk in self.chunks])
        for chunk in self.chunks if guesses else ():
            sequence, table = chunk.sequence, chunk.sequence.table
            drafts = guesses.get(sequence.sequence_id)
            if not drafts or table is None or sequence.fork_seeds:
                continue
            longest = self.config.max_model_len - 1 - chunk.end  # the last token needs no row
            count = min(len(drafts), sequence.max_drafts, longest, self._budget)
            if count > 0 and (room := self._cache.growable(table, chunk.end + count)) > chunk.end:
                self._cache.grow(table, room)
                chunk.drafts = drafts[: room - chunk.end]
                self._budget -= len(chunk.drafts)

    def _begin_prompts(self, prefilling: list[Sequence]) -> None:
        """Let step costs and waiting order divide what decodes leave of the step."""
        num_running, waiting = len(self.requests.running), self.requests.waiting
        decoding = list(map(_END_OF, self.chunks))
        self._has_prompt = False  # of decodes alone are the chunks so far
        starts = list(map(_NUM_COMPUTED, prefilling))
        self._room = self.costs.begin(decoding, starts, num_running + len(waiting) == 1)
        room = StepRoom(self._budget, self.config.max_num_seqs - num_running)
        self._limits = self.requests.order.divide(prefilling, waiting, room)

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
            victims = [s for s in self.requests.running if s not in self.requests.forked]
            if not victims:
                return
            victim = max(victims, key=lambda s: s.rank)
            for chunk in [chunk for chunk in self.chunks if chunk.sequence is victim]:
                self._budget += chunk.num_tokens
                self._room.take(victim.num_computed, -chunk.num_tokens)
                self.chunks.remove(chunk)
            self.requests.preempt(victim)

    def _end_of_chunk(self, sequence: Sequence) -> int:
        """Return where a sequence's next chunk may end: where its state can be kept, if it has."""
        start, end = sequence.num_computed, len(sequence.key.tokens)
        if end - start == 1:
            return end
        end = min(end, start + self._max_chunk_tokens(sequence, start))
        if self._cache.chunk_unit is None:
            return end
        assert sequence.table is not None
        waiting = (s.key for s in self.requests.waiting if not s.reading_is_off)
        return self._cache.end_of_chunk(sequence.table, start, end, waiting)

    def _publish_running(self) -> None:
        """Publish the blocks that this step computes; record which prefills continue."""
        planned = {chunk.sequence.sequence_id: chunk.end for chunk in self.chunks}
        for sequence in self.requests.running:
            self._add_leader(sequence, planned.get(sequence.sequence_id, sequence.num_computed))
        for chunk in self.chunks:
            if not chunk.is_published:
                self._publish(chunk)

    def _publish(self, chunk: ScheduledChunk) -> None:
        """Publish what a chunk computes, and fork a prompt that is complete."""
        assert chunk.sequence.table is not None
        chunk.is_published = True
        self.requests.order.planned(chunk.sequence, chunk.num_tokens)
        self._cache.publish(chunk.sequence.table, chunk.end)
        if chunk.samples and chunk.sequence.fork_seeds:
            self._fork(chunk)

    def _admit_waiting(self) -> None:
        """Admit in order while there is a seat, budget and room."""
        candidates = self.requests.order.candidates(self.requests.waiting)
        while (  # checked first: ranking may scan the whole queue
            self.requests.waiting
            and not self._is_short
            and self._budget >= self._min_chunk_tokens
            and len(self.requests.running) < self.config.max_num_seqs
        ):
            sequence = next(candidates, None)
            if sequence is None or not self._try_admit(sequence):
                break

    def _try_admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence, unless it waits for a prefill; False if it does not fit."""
        cache, request = self._cache, sequence.request
        if sequence.key.identity.epoch != cache.epoch:
            sequence.key, sequence.match = cache.rekey(sequence.key), None
        reading_is_off = sequence.reading_is_off if (max_hit := sequence.max_hit) == 0 else ""
        match, sequence.match = sequence.match, None
        if match is None or match.version != cache.version:
            match = cache.match(sequence.key, max_hit)
        leader = self._leader(sequence, match) if self._leaders and not reading_is_off else None
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
        self.requests.admit(sequence, table)
        self._start(sequence, table)
        return True

    def _start(self, sequence: Sequence, table: BlockTable) -> None:
        """Give an admitted sequence its first chunk."""
        if sequence.first_planned_s is None:
            sequence.first_planned_s = self.begun_s
            sequence.num_shared_tokens = table.num_shared_tokens
            sequence.num_copied_tokens = table.num_copied_tokens
            self.requests.stats.waited_prompt_tokens += sequence.num_waited_tokens
        chunk = self._add_chunk(sequence, min(self._end_of_chunk(sequence), table.num_slots))
        if not chunk.samples:
            self._add_leader(sequence, chunk.end)
        self._publish(chunk)

    def _add_leader(self, sequence: Sequence, num_planned: int) -> None:
        """Note a running sequence that has ``num_planned`` computed tokens after this step."""
        table = sequence.table
        if table is not None and table.writes and num_planned < len(sequence.key.tokens):
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
        forks = [parent.twin(index, seed) for index, seed in enumerate(parent.fork_seeds, 1)]
        parent.fork_seeds = ()
        chunk.members += forks
        self.requests.live[parent.request.request_id] += forks
        for child in forks if parent.request.params.max_tokens != 1 else ():
            has_seat = len(self.requests.running) < self.config.max_num_seqs
            if not has_seat or not self._try_fork(table, child):
                break

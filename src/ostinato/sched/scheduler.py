"""The scheduler: which sequences run, wait for another, or are preempted.

A step is plan, then run, then commit or fail::

    plan    sequences get their chunks, and blocks for them (``step_planner``)
    commit  tokens are appended, ended sequences release their blocks
    fail    the sequences of the step end; nothing that they published stays

Rules:

1. Every decode gets its token in every step, and the first prefill at least one: no
   sequence starves.
2. Sequences are planned in an order in which a sequence that shares blocks of the
   step comes after their publisher; ``CacheManager.fail`` relies on it.
3. A preempted sequence keeps its tokens and its place; its blocks stay findable.
4. The head of the queue is never skipped if it does not fit, only if it waits for a prefill.
5. No sequence is admitted in a step in which a running one got nothing: so a prefill that
   others wait for goes on.
"""

import time
from collections.abc import Callable

from ostinato.cache.manager import CacheManager
from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import DuplicateRequest
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import FinishReason, Request
from ostinato.sched.admission import check_prompt, finish_reason, max_sequence_tokens
from ostinato.sched.sequence import ScheduledChunk, Sequence, SequenceUpdate, tables_of
from ostinato.sched.stats import SchedulerStats
from ostinato.sched.step_planner import StepPlanner
from ostinato.sched.waiting_queue import FirstComeFirstServed, MakeOrder, RequestTable


class Scheduler:
    """Decides what each step computes.

    Attributes:
        config: As given.
        cache: As given.
        stats: Counters since the start.
        requests: Every live sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        clock: Callable[[], float] = time.monotonic,
        make_order: MakeOrder = lambda num_cached: FirstComeFirstServed(),
    ) -> None:
        """Make a scheduler without requests; a clock's seconds never fall."""
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._clock = clock
        self.requests = RequestTable(cache, self.stats, make_order(self.num_cached_tokens))
        self._longest = max_sequence_tokens(config, cache.config)
        self._next_id = 0
        self._chunks: list[ScheduledChunk] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self.requests.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.requests.running)

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.requests.live)

    def check(self, request: Request) -> None:
        """Refuse a request that could never be served; no effects.

        Raises:
            RequestError: It has no tokens, never fits the context or the pool, or its id is in use.
        """
        check_prompt(len(request.prompt_token_ids), self.config, self.cache.config)
        if request.request_id in self.requests.live:
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
            RequestError: What ``check`` raises.
        """
        self.check(request)
        assert len(seeds) == request.params.n, "one seed per continuation"
        key = PrefixKey(request.identity, request.prompt_token_ids, request.images)
        number = SequenceId(self._next_id)
        self._next_id += len(seeds)  # forks get the numbers after it
        constraint = None if request.constraint is None else request.constraint.copy()
        sequence = Sequence(number, request, 0, key, seeds[0], seeds[1:], constraint=constraint)
        if not sequence.reading_is_off:
            sequence.num_known_tokens = self.cache.match(key).num_shared_tokens
        self.requests.enter(sequence)

    def plan(self) -> StepPlan:
        """Decide what the next forward pass computes.

        Returns:
            The plan; without sequences if nothing can run.

        Effects: blocks are allocated and published; ``commit`` or ``fail`` must follow.
        """
        assert not self._chunks, "the last step was neither committed nor failed"
        self.cache.begin_step()
        step = StepPlanner(self.config, self.cache, self.requests, self.stats, self._clock)
        self._chunks = step.chunks
        return step.plan()

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Take the result of the planned step; return what it brought, in the order of the plan."""
        chunks = self._end_step()
        self.cache.commit(tables_of(chunks))
        updates: list[SequenceUpdate] = []
        for chunk, outcome in zip(chunks, result.sequences, strict=True):
            updates += self._commit_chunk(chunk, outcome)
        return updates

    def fail(self) -> list[SequenceUpdate]:
        """End the sequences of a step whose forward pass raised, and return them; others go on."""
        self.stats.num_failed_steps += 1
        chunks = self._end_step()
        self.cache.fail(tables_of(chunks))
        ended = [member for chunk in chunks for member in chunk.members]
        for sequence in ended:
            self.requests.fail(sequence, FinishReason.ERROR)
        return [SequenceUpdate(sequence) for sequence in ended]

    def finish(self, sequence: Sequence, reason: FinishReason, stop: str | None = None) -> None:
        """End a live sequence between steps, such as at a stop string."""
        assert not self._chunks, "a step is under way"
        sequence.stop_reason = stop
        self.requests.leave(sequence, reason)

    def cancel(self, request_id: RequestId) -> list[Sequence]:
        """End all sequences of a request between steps, and return them.

        Effects: their blocks are released at once; what was computed stays findable.
        """
        ended = list(self.requests.live.get(request_id, ()))
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT)
        return ended

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, between steps."""
        assert not self._chunks, "a step is under way"
        for sequence in self.requests.running[:]:
            self.requests.preempt(sequence)

    def _commit_chunk(self, chunk: ScheduledChunk, outcome: SequenceResult) -> list[SequenceUpdate]:
        """Take one sequence's result; append its token and those of its children."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        samples, end = chunk.samples, chunk.end
        self.stats.count_computed(start, end, sequence.num_prompt_tokens)
        if outcome.prompt_logprobs:
            sequence.take_prompt_logprobs(start, outcome.prompt_logprobs)
        for member in chunk.members:
            member.num_computed = end if member.table is not None else 0
        if not samples:
            return []
        tokens = zip(chunk.members, outcome.samples, strict=True)
        return [self._append(member, token) for member, token in tokens]

    def _append(self, sequence: Sequence, token: SampledToken) -> SequenceUpdate:
        """Append a sampled token, and end or requeue the sequence if need be."""
        if token.error:
            self.requests.leave(sequence, FinishReason.ERROR)
            return SequenceUpdate(sequence, token)
        sequence.key.append(token.token_id)
        if sequence.constraint is not None:
            sequence.constraint.advance(token.token_id)
        reason = finish_reason(sequence, self._longest)
        if reason is not None:
            self.requests.leave(sequence, reason)
        elif sequence.table is None:  # a fork that found no room
            self.requests.waiting.add(sequence)
        return SequenceUpdate(sequence, token)

    def _end_step(self) -> list[ScheduledChunk]:
        """Close the step: its chunks are handed over once."""
        self.stats.num_steps += bool(self._chunks)
        chunks, self._chunks = self._chunks, []
        return chunks

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Look a waiting sequence up; no effects."""
        return 0 if sequence.reading_is_off else self.cache.match(sequence.key).num_tokens

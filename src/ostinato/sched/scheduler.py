"""The scheduler: which sequences run, wait for another, or are preempted.

A step is plan, then run, then commit or fail::

    plan    sequences get their chunks, and blocks for them (``step_planner``)
    commit  tokens are appended, ended sequences release their blocks
    fail    the sequences of the step end; nothing that they published stays
"""

import time
from collections.abc import Callable
from itertools import count

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.core.errors import DuplicateRequest, PromptTooLong, RequestError
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import FinishReason, Request
from ostinato.sched.sequence import ScheduledChunk, Sequence, SequenceUpdate
from ostinato.sched.step_planner import Drafts, StepCosts, StepPlanner
from ostinato.sched.waiting_queue import Branch, FirstComeFirstServed, MakeOrder, RequestTable


class Scheduler:
    """Decides what each step computes.

    Attributes:
        stats: Counters since the start.
        requests: Every live sequence.
        longest_tokens: Most tokens of a prompt and its answer together.
        costs: Of steps; they are told how long each one took.
        drafts: Guesses of what decodes sample next.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        clock: Callable[[], float] = time.monotonic,
        make_order: MakeOrder = lambda num_cached: FirstComeFirstServed(),
        costs: StepCosts | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """Make a scheduler without requests; a clock's seconds never fall."""
        self.config = config
        self.cache = cache
        self.costs = StepCosts() if costs is None else costs
        self.drafts = Drafts() if drafts is None else drafts
        self._sampled: dict[RequestId, None] = {}  # searches that got samples in this step
        self._accepted: list[tuple[Sequence, list[SampledToken]]] = []
        self._clock = clock
        self.requests = RequestTable(cache, make_order(self.num_cached_tokens))
        self.stats = self.requests.stats
        self.longest_tokens = max_sequence_tokens(config, cache.config)
        self._next_id = 0
        self._chunks: list[ScheduledChunk] = []
        self._plan, self._planned_s = StepPlan(()), 0.0

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
        num_tokens = len(request.prompt_token_ids)
        if not 0 < num_tokens < self.longest_tokens:
            self.check_length(num_tokens)
        width, seats = request.search.width if request.search else 1, self.config.max_num_seqs
        if width > seats:
            raise RequestError(
                f"{width} beams: at most max_num_seqs={seats} sequences run at once; search fewer, "
                "or raise max_num_seqs"
            )
        if request.request_id in self.requests.live:
            raise DuplicateRequest(
                f"request id {request.request_id!r} is in use: wait until that request has "
                "ended, or choose another id"
            )

    def check_length(self, num_tokens: int) -> None:
        """Raise EmptyPrompt or PromptTooLong if a prompt of ``num_tokens`` can never be served."""
        longest = self.config.max_model_len
        if num_tokens >= longest:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and max_model_len={longest} leaves no room "
                "for an answer: shorten the prompt, or raise max_model_len as far as the model goes"
            )
        self.cache.check_fits(num_tokens)

    def add(self, request: Request, seeds: tuple[int, ...]) -> None:
        """Take a request, with one seed per continuation.

        Raises:
            RequestError: What ``check`` raises.
        """
        self.check(request)
        assert len(seeds) == request.params.n, "one seed per continuation"
        key = PrefixKey(request.identity, request.prompt_token_ids, request.images)
        number = SequenceId(self._next_id)
        # Forks are numbered after it.
        self._next_id += len(seeds) if request.search is None else request.search.width
        constraint = None if request.constraint is None else request.constraint.copy()
        sequence = Sequence(number, request, 0, key, seeds[0], seeds[1:], constraint=constraint)
        sequence.match = self.cache.match(key, sequence.max_hit)
        sequence.num_known_tokens = sequence.match.num_shared_tokens
        self.requests.enter(sequence)

    def plan(self) -> StepPlan:
        """Plan the next forward pass; without sequences if nothing can run.

        Effects: blocks are allocated and published; ``commit`` or ``fail`` must follow.
        """
        assert not self._chunks, "the last step was neither committed nor failed"
        assert not self._accepted, "tokens of the last step are not committed yet"
        self.cache.begin_step()
        self._planned_s = self._clock()
        step = StepPlanner(self.config, self.requests, self._planned_s, self.costs, self.drafts)
        self._chunks = step.chunks
        self._plan = step.plan()
        if not self._chunks and self.requests.forked:  # there is no step that could copy for them
            self.cache.fail()
            self.requests.requeue_forked()
        return self._plan

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Take the result of the planned step; return what it brought, in the order of the plan.

        A sequence whose drafts were right gets one token here, and the others by
        ``commit_accepted``, so that the caller may end it at any of them, as if each had had a
        step of its own.
        """
        assert len(result.sequences) == len(self._chunks), "a result per planned sequence"
        for chunk, outcome in zip(self._chunks, result.sequences, strict=True):
            surplus = len(outcome.samples) - len(chunk.members)
            is_full = not chunk.samples or 0 <= surplus <= len(chunk.drafts or ())
            assert is_full, "a sample per continuation of each sequence whose tokens are computed"
        self.costs.note(self._plan, self._clock() - self._planned_s)
        chunks = self._end_step()
        self.cache.commit()
        updates: list[SequenceUpdate] = []
        for chunk, outcome in zip(chunks, result.sequences, strict=True):
            updates += self._commit_chunk(chunk, outcome)
        while self._sampled:
            updates += self._continue_search(self.requests.live[self._sampled.popitem()[0]])
        return updates

    def commit_accepted(self) -> list[SequenceUpdate]:
        """Take the next token of each sequence whose drafts were right; none once all are taken."""
        accepted, self._accepted = self._accepted, []
        updates: list[SequenceUpdate] = []
        for sequence, (token, *more) in accepted:
            if sequence.finish_reason is not None:
                continue
            start, sequence.num_computed = sequence.num_computed, sequence.num_computed + 1
            self.stats.count_computed(start, start + 1, sequence.num_prompt_tokens)
            updates.append(self._append(sequence, token))
            if more:
                self._accepted.append((sequence, more))
        return updates

    def fail(self) -> list[SequenceUpdate]:
        """End the sequences of a step whose forward pass raised, and return them; others go on."""
        self.stats.num_failed_steps += 1
        chunks = self._end_step()
        self.cache.fail()
        members = [member for chunk in chunks for member in chunk.members]
        ended = list(dict.fromkeys([*members, *self.requests.forked]))
        for sequence in ended:
            self.requests.fail(sequence, FinishReason.ERROR)
        return [SequenceUpdate(sequence) for sequence in ended]

    def finish(self, sequence: Sequence, reason: FinishReason, stop: str | None = None) -> None:
        """End a live sequence between steps, such as at a stop string."""
        assert not self._chunks, "a step is under way"
        assert sequence in self.requests.live.get(sequence.request.request_id, ()), "it has ended"
        sequence.stop_reason = stop
        self.requests.finish(sequence, reason)

    def cancel(self, request_id: RequestId) -> list[Sequence]:
        """End a request between steps; return its sequences. What is computed stays findable."""
        ended = list(self.requests.live.get(request_id, ()))
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT)
        return ended

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Look a waiting sequence up; no effects."""
        return self.cache.match(sequence.key, sequence.max_hit).num_tokens

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, between steps."""
        assert not self._chunks, "a step is under way"
        for sequence in self.requests.running[:]:
            self.requests.preempt(sequence)

    def _commit_chunk(self, chunk: ScheduledChunk, outcome: SequenceResult) -> list[SequenceUpdate]:
        """Take one sequence's result; append its token and those of its children."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        self.stats.count_computed(start, chunk.end, sequence.num_prompt_tokens)
        sequence.prompt_logprobs += outcome.prompt_logprobs
        sequence.hidden_sum = outcome.hidden_sum
        for member in chunk.members:
            member.num_computed = chunk.end if member.table is not None else 0
        if not chunk.samples:
            return []
        if sequence.request.search is not None:
            [sequence.sampled] = outcome.samples
            self._sampled[sequence.request.request_id] = None
            return []
        if chunk.drafts is not None:
            self._note_drafts(sequence, len(chunk.drafts), outcome)
        return list(map(self._append, chunk.members, outcome.samples))

    def _continue_search(self, sequences: list[Sequence]) -> list[SequenceUpdate]:
        """Let a search choose what goes on, once all of its sequences have their samples.

        Returns:
            Those that ended, and the first that goes on.
        """
        search, request_id = sequences[0].request.search, sequences[0].request.request_id
        samples = [s.sampled for s in sequences if s.sampled is not None]
        if search is None or len(samples) < len(sequences):
            return []
        error = next((sample for sample in samples if sample.error), None)
        chosen = [] if error is not None else search.choose(samples)
        rows, sequences = {row for row, _ in chosen}, sequences[:]
        ended = [s for row, s in enumerate(sequences) if row not in rows]
        for sequence in sequences:
            sequence.sampled = None
        for sequence in ended:
            reason = FinishReason.STOP if error is None else FinishReason.ERROR
            self.requests.finish(sequence, reason)
        branches = self._branches(sequences, chosen)
        if branches:
            self.requests.live[request_id] = [branch.sequence for branch in branches]
        self.requests.branches += sorted(
            branches, key=lambda branch: branch.sequence is branch.parent
        )
        return [
            *(SequenceUpdate(sequence, error) for sequence in ended),
            *(SequenceUpdate(branch.sequence) for branch in branches[:1]),
        ]

    def _branches(self, sequences: list[Sequence], chosen: list[tuple[int, int]]) -> list[Branch]:
        """Return how the rows of a search go on, in its order: the best of a row is itself."""
        used = {sequences[row].index for row, _ in chosen}
        free = (index for index in count() if index not in used)
        branches, seen = [], set[int]()
        for row, token in chosen:
            parent = sequences[row]
            sequence = parent.twin(next(free), parent.seed) if row in seen else parent
            branches.append(Branch(parent, sequence, token))
            if row not in seen and parent.table is None:
                self.requests.wait(parent)
            seen.add(row)
        return branches

    def _note_drafts(self, sequence: Sequence, count: int, outcome: SequenceResult) -> None:
        """Count a sequence's drafts, and keep the tokens that follow right ones."""
        _, *more = outcome.samples
        sequence.num_drafted_tokens += count
        sequence.num_accepted_tokens += len(more)
        self.drafts.note(sequence, count, len(more))
        if more:
            self._accepted.append((sequence, more))

    def _append(self, sequence: Sequence, token: SampledToken) -> SequenceUpdate:
        """Append a sampled token, and end or requeue the sequence if need be."""
        if token.error:
            self.requests.finish(sequence, FinishReason.ERROR)
            return SequenceUpdate(sequence, token)
        sequence.key.append(token.token_id)
        if sequence.constraint is not None:
            sequence.constraint.advance(token.token_id)
        reason = self._finish_reason(sequence)
        if reason is not None:
            self.requests.finish(sequence, reason)
        elif sequence.table is None:  # a fork that found no room
            self.requests.wait(sequence)
        return SequenceUpdate(sequence, token)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return why a sequence ends with the token that it just got; None if it goes on."""
        request, params, token = sequence.request, sequence.request.params, sequence.key.tokens[-1]
        if token in params.stop_token_ids:
            sequence.stop_reason = token
            return FinishReason.STOP
        is_end = not params.ignore_eos and token in request.eos_token_ids
        if is_end or (sequence.constraint is not None and sequence.constraint.is_complete):
            return FinishReason.STOP
        end = self.longest_tokens
        if params.max_tokens is not None:
            end = min(end, sequence.num_prompt_tokens + params.max_tokens)
        return FinishReason.LENGTH if len(sequence.key.tokens) >= end else None

    def _end_step(self) -> list[ScheduledChunk]:
        """Close the step; return its chunks, in the order of the plan."""
        self.stats.num_steps += bool(self._chunks)
        chunks, self._chunks, self._plan = self._chunks, [], StepPlan(())
        return chunks


def max_sequence_tokens(scheduler: SchedulerConfig, cache: CacheConfig) -> int:
    """Return the longest sequence, in tokens: the last token of all needs no slot."""
    return min(scheduler.max_model_len, cache.num_slots + 1)

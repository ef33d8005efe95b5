"""Replays a load in time: TTFT, queues, and occupancy.

The trace's requests arrive at their times at the real scheduler and cache; a clock that a cost
model advances, step by step, replaces the model::

    arrivals ──► scheduler.plan ──► clock += cost ──► scheduler.commit ──► first tokens, samples

Each block id stands for as many equal tokens as a block of the trace has, so prefixes are shared
by whole blocks, as in the trace. Tokens of answers are unique unless the trace has their blocks.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import PromptTooLong
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, ScheduledSequence, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.lab.replay.tier_model import DiskModel, SimulatedDisk, SimulatedLoads
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.work.cost_model import StepCost
from ostinato.sched.sequence import SequenceUpdate
from ostinato.scheduling.held_requests import HeldRequests
from ostinato.settings import PrefixCacheConfig

NUM_SAMPLES = 400
"""Number of samples of the occupancy: as many as a plot can show."""

UTILISATION = 0.8
"""Share of its time that an engine without a cache is busy, with arrivals slowed down to fit."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Occupancy at one time.

    Attributes:
        at_s: Seconds since the first arrival.
        held_blocks: Blocks of running requests.
        evictable_blocks: Cached and held by no request.
        num_running: Sequences that hold blocks.
        num_waiting: Sequences that do not.
    """

    at_s: float
    held_blocks: int
    evictable_blocks: int
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class TimedResult:
    """What a timed replay found.

    Attributes:
        num_blocks: Number of blocks of the cache.
        first_token_s: From arrival to the first token, per request that got one.
        hit_tokens: Prompt tokens that hit, over all requests.
        input_tokens: Prompt tokens of all requests that were served.
        num_refused: Requests whose prompt the pool cannot hold.
        num_preemptions: Preemptions of running sequences.
        num_steps: Steps that ran.
        busy_s: Seconds in which a step ran.
        ended_s: When the last request ended.
        moments: Occupancy over time.
    """

    num_blocks: int
    first_token_s: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    input_tokens: int = 0
    num_refused: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    ended_s: float = 0.0
    moments: list[Moment] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that hit, 0 to 1."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def percentile(self, share: float) -> float:
        """Return a percentile of the time to first token; ``share`` is in percent."""
        return float(np.percentile(self.first_token_s, share)) if self.first_token_s else 0.0


def slowed_to_fit(trace: BlockTrace, cost: StepCost) -> float:
    """Return the factor by which arrivals are slowed down so that one engine can serve them.

    Public traces are of whole clusters. Without a cache, the engine is then busy for
    ``UTILISATION`` of the time; 1 if it is less busy than that already.
    """
    n, m = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    work_s = cost.prefill_s(n, np.zeros(len(n))) + cost.decode_s(n, m)
    needed_s = float(work_s.sum()) / UTILISATION
    return max(1.0, needed_s / trace.duration_s) if trace.duration_s else 1.0


def replay_timed(
    trace: BlockTrace,
    cache: PrefixCacheConfig,
    scheduling: SchedulerConfig,
    cost: StepCost,
    *,
    slowdown: float = 1.0,
    progress: Callable[[int], None] = lambda _num_ended: None,
    disk: DiskModel | None = None,
) -> TimedResult:
    """Serve a trace at its times.

    Args:
        trace: The traffic.
        cache: Cache settings; blocks have as many tokens as the trace's.
        scheduling: Scheduler settings.
        cost: Cost of a step.
        slowdown: Factor on the gaps between arrivals.
        progress: Called with 1 for each request that ended.
        disk: The disk behind the cache; None for none.
    """
    replica = TimedReplica(trace, cache, scheduling, cost, disk)
    return _TimedReplay(replica, (trace.arrival_s * slowdown).tolist(), progress).run()


class TimedReplica:
    """One simulated engine: the real scheduler and cache, and steps that take time."""

    def __init__(
        self,
        trace: BlockTrace,
        cache: PrefixCacheConfig,
        scheduling: SchedulerConfig,
        cost: StepCost,
        disk: DiskModel | None = None,
    ) -> None:
        """Start idle, with an empty cache; requests of ``trace`` are added by number."""
        assert cache.block_size == trace.block_tokens, "blocks are those of the trace"
        self._trace, self._cost = trace, cost
        self.now_s = 0.0
        held: HeldRequests = set()
        written = (
            None
            if disk is None
            else SimulatedDisk(disk, cache.block_size, cache.windows, lambda: self.now_s)
        )
        more = () if written is None else (written,)
        self.cache = build_cache(cache, lambda: self.now_s, more_observers=more)
        self.scheduler = build_scheduler(scheduling, self.cache, lambda: self.now_s, [held])
        self._loads: SimulatedLoads | None = None
        if disk is not None and written is not None:
            written.open(self.cache.manager)
            self._loads = SimulatedLoads(disk, written, held)
        self._paths: dict[RequestId, npt.NDArray[np.uint32]] = {}
        self._by_sequence: dict[int, RequestId] = {}
        self._num_added = 0
        self._running: StepPlan | None = None
        self.num_steps = 0
        self.busy_s = 0.0

    @property
    def is_stepping(self) -> bool:
        """Whether a step runs, which ends at ``now_s``."""
        return self._running is not None

    def add(self, number: int) -> int | None:
        """Add a request; returns its prompt's tokens, or None if it can never fit."""
        trace, name = self._trace, RequestId(str(number))
        prompt = spell(trace, number)
        params = SamplingParams(max_tokens=max(1, int(trace.output_tokens[number])))
        try:
            self.scheduler.add(Request(name, prompt, params), (0,))
        except PromptTooLong:
            return None
        self._paths[name] = trace.path(number)
        self._by_sequence[self._num_added] = name
        self._num_added += 1
        if self._loads is not None:
            n = np.array([float(len(prompt))])
            compute_s = float(self._cost.prefill_s(n, np.zeros(1))[0]) / len(prompt)
            (sequence,) = self.scheduler.requests.live[name]
            self._loads.begin(sequence, trace.block_tokens, self.now_s, compute_s)
        return len(prompt)

    @property
    def next_load_s(self) -> float:
        """When the next load from the disk ends; infinite without one."""
        return float("inf") if self._loads is None else self._loads.next_ready_s

    def begin(self, now_s: float) -> bool:
        """Begin a step, if there is anything to run; ``now_s`` becomes its end."""
        self.now_s = max(self.now_s, now_s)
        if self._loads is not None:
            self._loads.release(self.cache.manager)
            self._loads.land(self.scheduler, self.now_s)
        plan = self.scheduler.plan()
        if not plan.sequences:
            return False
        took_s = self._cost.step_s(plan)
        self.now_s += took_s
        self.busy_s += took_s
        self.num_steps += 1
        self._running = plan
        return True

    def end(self) -> list[SequenceUpdate]:
        """End the step; returns the updates of its sequences."""
        assert self._running is not None, "no step runs"
        answer, self._running = self._answer(self._running), None
        updates = self.scheduler.commit(answer)
        for update in updates:
            if update.sequence.finish_reason is not None:
                del self._paths[update.sequence.request.request_id]
                del self._by_sequence[update.sequence.sequence_id]
        return updates

    def _answer(self, plan: StepPlan) -> StepResult:
        return StepResult(
            tuple(
                SequenceResult((SampledToken(self._token(s)),)) if s.sample else _NOTHING
                for s in plan.sequences
            )
        )

    def _token(self, scheduled: ScheduledSequence) -> int:
        """Return the token that follows: of the trace's next block, if it knows the answer."""
        name = self._by_sequence[scheduled.sequence_id]
        path, place = self._paths[name], scheduled.end // self._trace.block_tokens
        return int(path[place]) if place < len(path) else _own_token(int(name))


class _TimedReplay:
    """One run."""

    def __init__(
        self,
        replica: TimedReplica,
        arrivals: list[float],
        progress: Callable[[int], None],
    ) -> None:
        self._replica, self._arrivals, self._progress = replica, arrivals, progress
        self._next = 0
        self._result = TimedResult(replica.cache.config.num_blocks)
        self._sample_gap_s = max(arrivals[-1] / NUM_SAMPLES if arrivals else 0.0, 1e-9)
        self._next_sample_s = 0.0

    def run(self) -> TimedResult:
        """Serve all requests."""
        replica, result = self._replica, self._result
        while self._next < len(self._arrivals) or replica.scheduler.has_work:
            self._take_arrivals()
            if replica.begin(replica.now_s):
                for update in replica.end():
                    self._take(update)
            else:
                due_s = min([replica.next_load_s, *self._arrivals[self._next : self._next + 1]])
                replica.now_s = max(replica.now_s, due_s)
            self._sample()
        result.ended_s, result.busy_s = replica.now_s, replica.busy_s
        result.num_steps = replica.num_steps
        result.num_preemptions = replica.scheduler.stats.num_preemptions
        return result

    def _take_arrivals(self) -> None:
        while (
            self._next < len(self._arrivals) and self._arrivals[self._next] <= self._replica.now_s
        ):
            num_tokens = self._replica.add(self._next)
            if num_tokens is None:
                self._result.num_refused += 1
                self._progress(1)
            else:
                self._result.input_tokens += num_tokens
            self._next += 1

    def _take(self, update: SequenceUpdate) -> None:
        sequence, number = update.sequence, int(update.sequence.request.request_id)
        if sequence.num_output_tokens == 1:
            self._result.first_token_s.append(self._replica.now_s - self._arrivals[number])
            self._result.hit_tokens += sequence.num_shared_tokens + sequence.num_copied_tokens
        if sequence.finish_reason is not None:
            self._progress(1)

    def _sample(self) -> None:
        replica, now_s = self._replica, self._replica.now_s
        if now_s < self._next_sample_s:
            return
        pool, scheduler = replica.cache.manager.pool, replica.scheduler
        held = pool.num_blocks - pool.num_free
        queue = scheduler.num_running, scheduler.num_waiting
        self._result.moments.append(Moment(now_s, held, pool.num_evictable, *queue))
        self._next_sample_s = now_s + self._sample_gap_s


_NOTHING = SequenceResult()


def spell(trace: BlockTrace, number: int) -> "array[int]":
    """Write a prompt's blocks out as tokens; what is in none of them is the request's own."""
    num_tokens = int(trace.input_tokens[number])
    tokens = np.repeat(trace.path(number), trace.block_tokens)[:num_tokens]
    prompt = array("I", tokens.tobytes())
    prompt.extend([_own_token(number)] * (num_tokens - len(prompt)))
    return prompt


def _own_token(number: int) -> int:
    """Return a token that no block and no other request has."""
    return 2**32 - 1 - number

"""Runs the same requests under the built-in index, policy and order, and counts their hits.

A plug-in serves, and its hits are counted as those of any other. Beside it the same requests, in
the order in which they came and with the same answers, go through Ostinato's own scheduler and
cache, without a tensor: a step is planned, and the tokens that were really sampled are committed.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.ids import RequestId
from ostinato.core.plan import (
    SampledToken,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
)
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.plugins.arrivals import Arrival
from ostinato.sched.sequence import Sequence as SchedSequence
from ostinato.settings import PrefixCacheConfig


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Hits of the same requests.

    Attributes:
        num_requests: How many.
        prompt_tokens: All their tokens.
        own_tokens: Those of them that hit with the plug-in.
        built_in_tokens: Those that hit with the built-in parts.
    """

    num_requests: int
    prompt_tokens: int
    own_tokens: int
    built_in_tokens: int


def served_requests(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return those that have ended; call it between steps."""
    return [arrival for arrival in arrivals if arrival.sequence.finish_reason is not None]


def compare(
    served: Sequence[Arrival], cache: PrefixCacheConfig, scheduling: SchedulerConfig
) -> SideBySide:
    """Replay ended requests under the built-in parts.

    Args:
        served: The requests, in the order in which they came.
        cache: Sizes of the cache; the index and the policy are Ostinato's defaults.
        scheduling: Limits of steps; the order is the default.

    Cost: about as much as the scheduler and the cache spent on them.
    """
    return SideBySide(
        len(served),
        sum(one.sequence.num_prompt_tokens for one in served),
        sum(_num_hit(one.sequence) for one in served),
        _replay(served, cache, scheduling),
    )


def _num_hit(sequence: SchedSequence) -> int:
    """Return the tokens that hit when a sequence was first admitted."""
    return sequence.num_shared_tokens + sequence.num_copied_tokens


def _replay(
    served: Sequence[Arrival], cache: PrefixCacheConfig, scheduling: SchedulerConfig
) -> int:
    """Return the tokens that hit."""
    step, num_hit = 0, 0
    caching = replace(
        cache, index="radix", eviction_policy="reuse_hazard", ghost_blocks=0, keep_explanations=0,
        keep_event_batches=0,
    )  # fmt: skip
    order = replace(scheduling, order="shortest_first", max_step_ms=None)
    scheduler = build_scheduler(
        order, build_cache(caching, lambda: float(step)), lambda: float(step)
    )
    outputs = [one.sequence.output for one in served]  # sequences are numbered in order
    left = deque(enumerate(served))
    while left or scheduler.has_work:
        if not scheduler.has_work:
            step = max(step, left[0][1].step)
        while left and left[0][1].step <= step:
            scheduler.add(_request(*left.popleft()), (0,))
        for update in scheduler.commit(_answer(scheduler.plan(), outputs)):
            if update.sequence.finish_reason is not None:
                num_hit += _num_hit(update.sequence)
        step += 1
    return num_hit


def _request(place: int, one: Arrival) -> Request:
    """Return a request that ends with its answer's last token."""
    request, num_tokens = one.sequence.request, one.sequence.num_output_tokens
    return replace(
        request, request_id=RequestId(str(place)),
        params=SamplingParams(max_tokens=max(1, num_tokens), ignore_eos=True),
        identity=request.identity.renewed(request.identity.weights, 0), constraint=None,
    )  # fmt: skip


def _answer(plan: StepPlan, outputs: "Sequence[array[int]]") -> StepResult:
    """Return the step's result: the tokens that were sampled when it was served."""

    def sampled(planned: ScheduledSequence) -> tuple[SampledToken, ...]:
        if planned.sample is None:
            return ()
        output, place = outputs[planned.sequence_id], len(planned.sample.output)
        return (SampledToken(output[place] if place < len(output) else 0),)

    return StepResult(tuple(SequenceResult(sampled(planned)) for planned in plan.sequences))

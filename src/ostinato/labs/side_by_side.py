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
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.plugins.arrivals import Arrival
from ostinato.sched.scheduler import Scheduler
from ostinato.settings import PrefixCacheConfig


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that has ended.

    Attributes:
        request: As it was.
        step: The step in which it was first seen.
        output: Its answer, shape (num_output_tokens,).
        num_hit_tokens: What hit when it was first admitted.
    """

    request: Request
    step: int
    output: "array[int]"
    num_hit_tokens: int


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


def served_requests(arrivals: Sequence[Arrival]) -> list[ServedRequest]:
    """Return those that have ended; call it between steps."""
    return [
        ServedRequest(
            arrival.sequence.request,
            arrival.step,
            arrival.sequence.output,
            arrival.sequence.num_shared_tokens + arrival.sequence.num_copied_tokens,
        )
        for arrival in arrivals
        if arrival.sequence.finish_reason is not None
    ]


def compare(
    served: Sequence[ServedRequest], cache: PrefixCacheConfig, scheduling: SchedulerConfig
) -> SideBySide:
    """Replay requests under the built-in parts.

    Args:
        served: The requests, in the order in which they came.
        cache: Sizes of the cache; the index and the policy are Ostinato's defaults.
        scheduling: Limits of steps; the order is the default.

    Cost: about as much as the scheduler and the cache spent on them.
    """
    replayed = _replay(served, cache, scheduling)
    return SideBySide(
        len(served),
        sum(len(one.request.prompt_token_ids) for one in served),
        sum(one.num_hit_tokens for one in served),
        replayed,
    )


def _replay(
    served: Sequence[ServedRequest], cache: PrefixCacheConfig, scheduling: SchedulerConfig
) -> int:
    """Return the tokens that hit."""
    step = 0
    caching = replace(
        cache, index="radix", eviction_policy="reuse_hazard", ghost_blocks=0, keep_explanations=0,
        keep_event_batches=0,
    )  # fmt: skip
    order = replace(scheduling, order="shortest_first", max_step_ms=None)
    scheduler = build_scheduler(
        order, build_cache(caching, lambda: float(step)), lambda: float(step)
    )
    outputs: dict[SequenceId, array[int]] = {}
    left, num_hit, number = deque(enumerate(served)), 0, 0
    while left or scheduler.has_work:
        if not scheduler.has_work:
            step = max(step, left[0][1].step)
        while left and left[0][1].step <= step:
            place, one = left.popleft()
            scheduler.add(_request(place, one), (0,))
            outputs[SequenceId(number)] = one.output
            number += 1
        plan = scheduler.plan()
        updates = scheduler.commit(_run(scheduler, plan, outputs))
        for update in updates:
            if update.sequence.finish_reason is not None:
                num_hit += update.sequence.num_shared_tokens + update.sequence.num_copied_tokens
        step += 1
    return num_hit


def _request(place: int, one: ServedRequest) -> Request:
    """Return a request that ends with its answer's last token."""
    params = SamplingParams(max_tokens=max(1, len(one.output)), ignore_eos=True)
    identity = one.request.identity.renewed(one.request.identity.weights, 0)
    return replace(
        one.request, request_id=RequestId(str(place)), params=params, identity=identity,
        constraint=None,
    )  # fmt: skip


def _run(
    scheduler: Scheduler, plan: StepPlan, outputs: dict[SequenceId, "array[int]"]
) -> StepResult:
    """Return the step's result: the tokens that were sampled when it was served."""
    sequences = {one.sequence_id: one for one in scheduler.requests.running}
    results = []
    for planned in plan.sequences:
        if planned.sample is None:
            results.append(SequenceResult())
            continue
        output = outputs[planned.sequence_id]
        place = sequences[planned.sequence_id].num_output_tokens
        token = output[place] if place < len(output) else 0
        results.append(SequenceResult((SampledToken(token),)))
    return StepResult(tuple(results))

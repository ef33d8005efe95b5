"""A scheduler called in a wrong order says so, and changes nothing; the step can still end."""

from dataclasses import replace

import pytest

from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepResult
from ostinato.core.request import FinishReason
from tests.support.cache.tiny_scheduler import TinyScheduler, make_request
from tests.support.cache.whole_state import whole_state

TOKEN = SampledToken(ord("x"))


def refused(tiny: TinyScheduler, call, match: str) -> None:
    """A call fails an assertion, and neither the scheduler nor the cache has changed."""

    def state() -> tuple[object, ...]:
        sequences = [repr(sequence) for sequence in tiny.checks.live()]
        cache, stats = whole_state(tiny.cache.manager), replace(tiny.scheduler.stats)
        return tiny.state, sequences, cache, stats, len(tiny.scheduler.requests.waiting)

    before = state()
    with pytest.raises(AssertionError, match=match):
        call()
    assert state() == before


def test_while_a_step_is_under_way_nothing_is_planned_ended_or_preempted(tiny):
    tiny.add("one", "ABCDEFGH", max_tokens=2)
    tiny.step()
    scheduler, [sequence] = tiny.scheduler, tiny.checks.live()
    plan = scheduler.plan()
    for call in (
        scheduler.plan,
        scheduler.preempt_all,
        lambda: scheduler.cancel(RequestId("one")),
        lambda: scheduler.finish(sequence, FinishReason.STOP),
    ):
        refused(tiny, call, "step")
    assert len(plan.sequences) == 1
    scheduler.commit(StepResult((SequenceResult((TOKEN,)),)))
    assert not scheduler.has_work


def test_a_request_that_comes_while_a_step_runs_waits_for_the_next_one(tiny):
    tiny.add("one", "ABCDEFGH")
    tiny.scheduler.plan()
    tiny.scheduler.add(make_request("two", "ABCDEFGHI"), (0,))
    tiny.scheduler.commit(StepResult((SequenceResult((TOKEN,)),)))
    [two] = tiny.scheduler.plan().sequences
    assert two.start == 8


@pytest.mark.parametrize(
    "outcomes",
    [
        (),
        (SequenceResult((TOKEN, TOKEN)),),
        (SequenceResult((TOKEN, TOKEN)), SequenceResult()),
        (SequenceResult((TOKEN,)), SequenceResult((TOKEN,))),
        (SequenceResult((TOKEN, TOKEN)), SequenceResult((TOKEN,)), SequenceResult((TOKEN,))),
    ],
    ids=["none", "one too few", "no sample", "a fork's missing", "one too many"],
)
def test_a_result_of_the_wrong_length_commits_nothing(tiny, outcomes):
    """The first sequence, with two continuations, would have its tokens before the second fails."""
    tiny.add("one", "ABCDEFGH", n=2, max_tokens=3)
    tiny.add("two", "QRST", max_tokens=3)
    tiny.scheduler.plan()
    refused(tiny, lambda: tiny.scheduler.commit(StepResult(outcomes)), "a (result|sample) per")
    ended = tiny.scheduler.fail()
    assert len(ended) == 3
    assert not tiny.scheduler.has_work


def test_a_result_without_a_plan_is_refused(tiny):
    tiny.add("one", "ABCDEFGH")
    result = StepResult((SequenceResult((TOKEN,)),))
    refused(tiny, lambda: tiny.scheduler.commit(result), "a result per planned sequence")
    tiny.run()


def test_a_sequence_ends_once(tiny):
    """Also where a sibling lives on, and where another request has its id."""
    tiny.add("one", "ABCDEFGH", n=2, max_tokens=5)
    tiny.step()
    first, second = tiny.checks.live()
    tiny.stop("one", "a stop string")
    refused(tiny, lambda: tiny.scheduler.finish(first, FinishReason.ABORT), "it has ended")
    tiny.cancel("one")
    for sequence in (first, second):
        refused(
            tiny, lambda s=sequence: tiny.scheduler.finish(s, FinishReason.ABORT), "it has ended"
        )
    assert first.stop_reason == "a stop string"
    tiny.add("one", "ABCD")
    refused(tiny, lambda: tiny.scheduler.finish(first, FinishReason.ABORT), "it has ended")
    assert tiny.scheduler.cancel(RequestId("unknown")) == []

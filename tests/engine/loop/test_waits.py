"""A request's wait is told apart: its own work, its tenant's, and that of others."""

from array import array

import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.identity import Identity
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.engine.tiers.waits import WaitBook
from ostinato.observe.explanation import Wait
from ostinato.scheduling.learned_prices import LearnedPrices
from tests.support.cache.tiny_scheduler import make_sequence


def plan_of(*shares: tuple[int, str, int]) -> StepPlan:
    """Return a step; each share is a sequence's number, its tenant, and its tokens."""
    return StepPlan(
        tuple(
            ScheduledSequence(
                SequenceId(number), array("I", [1] * size), 0, (), identity=Identity(tenant=tenant)
            )
            for number, name, size in shares
            for tenant in [name.encode()]
        )
    )


def test_the_time_of_steps_is_split_by_their_work():
    """Three seconds before its first step, four beside others, and one without any step."""
    waits = WaitBook(LearnedPrices(), num_kept=2)
    mine = make_sequence(7, tenant="ann")
    waits.add_step(plan_of((1, "bob", 1)), 100.0)  # before it came
    waits.begin(mine, 1000.0)
    waits.add_step(plan_of((1, "bob", 2), (2, "ann", 1)), 3.0)
    waits.add_step(plan_of((1, "bob", 2), (7, "ann", 2)), 4.0)
    waits.end(mine, 1008.0)
    wait = waits.wait_of("request 7")
    assert wait == Wait(8.0, own_s=2.0, tenant_s=1.0, others_s=4.0)
    assert wait.sentence.endswith(
        "2 s its own work, 1 s other work of its tenant, 4 s the work of others."
    )


def test_only_the_last_waits_are_remembered():
    waits = WaitBook(LearnedPrices(), num_kept=2)
    for number in range(4):
        sequence = make_sequence(number)
        waits.begin(sequence, 0.0)
        waits.end(sequence, 1.0)
    kept = [waits.wait_of(f"request {number}") is not None for number in range(4)]
    assert kept == [False, False, True, True]


@pytest.mark.parametrize("ends", ["served", "cancelled"])
def test_an_explanation_has_the_wait(llm: LLM, ends: str):
    engine = llm.engine
    if ends == "served":
        [output] = llm.generate("Speak", SamplingParams(max_tokens=2), use_tqdm=False)
        wait = llm.explain(output).wait
        assert wait is not None and 0 < wait.own_s <= wait.seconds and wait.others_s == 0
        assert type(llm.explain(output)).from_dict(llm.explain(output).as_dict()).wait == wait
    else:
        from ostinato.engine.requests.prompts import parse_prompt

        made = engine.make_request(parse_prompt("Speak"), SamplingParams(max_tokens=2))
        engine.add(made)
        engine.cancel(made.request.request_id)
        assert engine.waits.wait_of(made.request.request_id) is not None

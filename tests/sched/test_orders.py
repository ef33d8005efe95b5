"""Cache-aware and fair orders: prefixes that are cached go first, and shares by tenant."""

from collections import Counter, defaultdict
from typing import get_args

import pytest

from ostinato.core.config import SchedulerConfig, WaitingOrder
from ostinato.core.errors import ConfigError
from ostinato.scheduling import fair_share
from ostinato.scheduling.fair_share import FairShare
from tests.support.cache.tiny_scheduler import (
    TinyScheduler,
    make_request,
    make_sequence,
    tiny_scheduler,
)
from tests.support.servers.memory_search import search

ORDERS = get_args(WaitingOrder)


def test_an_unknown_order_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'lifo'.*fcfs, shortest_first, longest_prefix"):
        SchedulerConfig(order="lifo")
    with pytest.raises(ConfigError, match=r"'depth_first': must be one of fcfs.*experiments.md"):
        SchedulerConfig(order="depth_first")


# --- cached prefixes first ------------------------------------------------------------------


def names_of(steps: list[str]) -> list[str]:
    """Return who was served, one per step."""
    return [step.split(":")[0] for step in steps]


@pytest.mark.parametrize("order", ORDERS)
def test_a_pool_of_one_document_computes_it_once_or_for_every_question(order):
    """Three documents, asked in turn, eight tokens each; two blocks of four hold one of them."""
    tiny = tiny_scheduler(num_blocks=3, max_num_seqs=1, order=order)
    for question in "xyz":
        for document in "ABC":
            tiny.add(document + question, document * 8 + question)
    tiny.run()
    in_all = 9 * 9
    saved = 3 * 2 * 8  # two of three questions find their document
    grouped = order in ("shortest_first", "longest_prefix")
    expected = in_all - saved if grouped else in_all
    assert tiny.scheduler.stats.computed_prompt_tokens == expected


def test_no_sequence_is_overtaken_more_often_than_the_bound():
    """Two questions on the cached document pass the stranger; then it goes first."""
    tiny = tiny_scheduler(max_num_seqs=1, order="longest_prefix", max_overtakes=2)
    tiny.serve("warm", "AAAA")
    tiny.add("patient", "xyz")
    for number in "1234":
        tiny.add(number, f"AAAA{number}")
    assert names_of(tiny.run()) == ["1", "2", "patient", "3", "4"]


def test_the_bound_of_overtaking_holds_within_one_step():
    tiny = tiny_scheduler(max_num_seqs=4, order="longest_prefix", max_overtakes=2)
    tiny.serve("warm", "AAAA")
    tiny.add("patient", "xyz")
    for number in "1234":
        tiny.add(number, f"AAAA{number}")
    assert tiny.step() == "1:....1 2:....2 patient:xyz 3:....3"


@pytest.mark.parametrize("order", ORDERS)
def test_a_bound_of_zero_is_first_come_first_served_in_every_order(order):
    tiny = tiny_scheduler(max_num_seqs=1, order=order, max_overtakes=0)
    tiny.serve("warm", "AAAA", tenant="a")
    prompts = ["xyz", "AAAAx", "uvw", "AAAAy", "BBBB"]
    for number, prompt in enumerate(prompts):
        tiny.add(str(number), prompt, tenant="ab"[number % 2])
    assert names_of(tiny.run()) == list("01234")


@pytest.mark.parametrize("order", ["longest_prefix", "shortest_first"])
def test_no_prompt_is_looked_up_while_every_seat_is_taken(order, monkeypatch):
    """Ranking a long queue costs, and most steps admit no request."""
    tiny = tiny_scheduler(max_num_seqs=1, order=order)
    tiny.add("runs", "ABCD", max_tokens=5)
    tiny.step()
    tiny.add("waits", "EFGH")
    match = tiny.cache.manager.match
    asked = []
    monkeypatch.setattr(
        tiny.cache.manager, "match", lambda *args: asked.append(args) or match(*args)
    )
    for _ in range(4):
        tiny.step()
    assert not asked
    tiny.step()
    assert asked


# --- fair share -----------------------------------------------------------------------------


def drive(tiny: TinyScheduler, num_steps: int) -> Counter[str]:
    """Run steps without the watch; return the tokens that were computed, by tenant.

    With a thousand requests the watch would look at each of them in every step.
    """
    computed: Counter[str] = Counter()
    for _ in range(num_steps):
        plan = tiny.scheduler.plan()
        for scheduled in plan.sequences:
            request = tiny.runner.truth(scheduled.sequence_id).request
            computed[request.identity.tenant.decode()] += len(scheduled.tokens)
        tiny.scheduler.commit(tiny.runner.execute(plan))
    return computed


def fair(max_num_seqs: int = 1, **how) -> TinyScheduler:
    return tiny_scheduler(max_num_seqs=max_num_seqs, order="fair_share", **how)


def test_the_tenant_that_was_served_least_is_next():
    """The first of each; b, which got 2 tokens and a 4; at 4 each, the earlier; and so on."""
    tiny = fair()
    for number in "123":
        tiny.add(f"a{number}", number + "ABC", tenant="a")
    for number in "123":
        tiny.add(f"b{number}", number + "D", tenant="b")
    assert names_of(tiny.run()) == ["a1", "b1", "b2", "a2", "b3", "a3"]


def test_requests_without_a_salt_are_one_tenant():
    tiny = fair()
    for number in "12":
        tiny.add(f"nobody {number}", "ABC" + number)
    tiny.add("somebody", "ABC", tenant="b")
    assert names_of(tiny.run()) == ["nobody 1", "somebody", "nobody 2"]


def test_priority_goes_before_fairness():
    tiny = fair()
    for number in "12":
        tiny.add(f"urgent {number}", "ABC" + number, tenant="a", priority=-1)
    tiny.add("normal", "x", tenant="b")
    assert names_of(tiny.run()) == ["urgent 1", "urgent 2", "normal"]


def test_a_flood_of_one_tenant_keeps_another_waiting_for_two_steps_at_most():
    """A thousand requests stand before each one of b; first come, first served shows the flood."""
    waits: dict[str, list[int]] = defaultdict(list)
    for order in ("fair_share", "fcfs"):
        tiny = tiny_scheduler(num_blocks=64, max_num_seqs=1, order=order)
        for number in range(1000):
            tiny.add_request(make_request(f"a{number}", "ABC" + chr(1000 + number), tenant="a"))
        for number in range(100):
            tiny.add_request(make_request(f"b{number}", "xyz" + chr(1000 + number), tenant="b"))
            live = tiny.scheduler.requests.live
            steps = 0
            while f"b{number}" in live and steps < 20:
                drive(tiny, 1)
                steps += 1
            waits[order].append(steps)
    assert max(waits["fair_share"]) <= 2
    assert min(waits["fcfs"][:40]) == 20


def test_shares_converge_in_tokens_whatever_the_prompts_lengths():
    """a's prompts are six times as long as b's, so b has about six times as many served."""
    tiny = fair(num_blocks=64)
    for number in range(100):
        tiny.add_request(make_request(f"a{number}", chr(1000 + number) + "A" * 17, tenant="a"))
    for number in range(600):
        tiny.add_request(make_request(f"b{number}", chr(1000 + number) + "BB", tenant="b"))
    computed = drive(tiny, 350)
    assert min(computed.values()) > 500
    assert abs(computed["a"] - computed["b"]) <= 18


def test_what_is_cached_costs_a_tenant_nothing():
    """Both send eight tokens at a time; all but one of a's are cached, so a has more served."""
    tiny = fair(num_blocks=64)
    for number in range(200):
        tiny.add_request(make_request(f"a{number}", "AAAAAAA" + chr(1000 + number), tenant="a"))
        unlike = chr(1000 + number) * 8
        tiny.add_request(make_request(f"b{number}", unlike, tenant="b"))
    computed = drive(tiny, 150)
    assert abs(computed["a"] - computed["b"]) <= 8
    ended = 200 - Counter(name[0] for name in tiny.scheduler.requests.live)["a"]
    assert ended > 120


def test_answers_count_as_prompts_do():
    """a's requests are short and their answers long: four decodes each."""
    tiny = fair(num_blocks=64)
    for number in range(100):
        tiny.add_request(make_request(f"a{number}", chr(1000 + number), tenant="a", max_tokens=5))
        tiny.add_request(make_request(f"b{number}", chr(1000 + number) * 5, tenant="b"))
    computed = drive(tiny, 180)
    assert abs(computed["a"] - computed["b"]) <= 5


def test_an_idle_tenant_saves_nothing_up():
    """b comes after a hundred steps without it, and gets half of what follows, not all."""
    tiny = fair(num_blocks=64)
    for number in range(200):
        tiny.add_request(make_request(f"a{number}", "A" + chr(1000 + number), tenant="a"))
    drive(tiny, 100)
    for number in range(100):
        tiny.add_request(make_request(f"b{number}", "B" + chr(1000 + number), tenant="b"))
    computed = drive(tiny, 40)
    assert abs(computed["a"] - computed["b"]) <= 2


def test_an_idle_tenant_saves_nothing_up_while_every_seat_is_taken():
    """a runs for long with more waiting; when b comes, it is lifted to where a is by then."""
    tiny = fair(num_blocks=64)
    tiny.add_request(make_request("a", "A", tenant="a", max_tokens=50))
    for number in range(60):
        tiny.add_request(make_request(f"a{number}", "A" + chr(1000 + number), tenant="a"))
    drive(tiny, 49)
    for number in range(60):
        tiny.add_request(make_request(f"b{number}", "B" + chr(1000 + number), tenant="b"))
    drive(tiny, 1)
    computed = drive(tiny, 40)
    assert abs(computed["a"] - computed["b"]) <= 3


def test_debts_end_with_an_empty_queue():
    """a was served alone for long; when both come, it has no less than b."""
    tiny = fair()
    tiny.serve("long", "A", tenant="a", max_tokens=30)
    for number in "12":
        tiny.add(f"a{number}", "A" + number, tenant="a")
        tiny.add(f"b{number}", "B" + number, tenant="b")
    assert names_of(tiny.run()) == ["a1", "b1", "a2", "b2"]


def test_the_first_of_a_tenant_is_overtaken_no_more_often_than_the_bound():
    """a owes a long prompt; b's short ones pass its next request three times, and then it goes."""
    tiny = fair(num_blocks=32, max_overtakes=3)
    tiny.add("a1", "A" * 30, tenant="a")
    tiny.add("a2", "x", tenant="a")
    for number in "123456":
        tiny.add(f"b{number}", number, tenant="b")
    assert names_of(tiny.run()) == ["a1", "b1", "b2", "b3", "a2", "b4", "b5", "b6"]


def test_a_flood_is_not_overdue_as_a_whole():
    """The bound is its first one's: the second starts to count when it has become the first."""
    tiny = fair(num_blocks=32, max_overtakes=2)
    for number in "123":
        tiny.add(f"a{number}", number + "A" * 9, tenant="a")
    for number in "1234567":
        tiny.add(f"b{number}", number, tenant="b")
    expected = ["a1", "b1", "b2", "a2", "b3", "b4", "a3", "b5", "b6", "b7"]
    assert names_of(tiny.run()) == expected


def test_the_bound_of_fair_share_holds_within_one_step():
    tiny = fair(max_num_seqs=8, budget=64, max_overtakes=2)
    tiny.add("a1", "A" * 9, tenant="a")
    tiny.add("a2", "x", tenant="a")
    for number in "1234":
        tiny.add(f"b{number}", number, tenant="b")
    assert tiny.step() == "a1:AAAAAAAAA b1:1 b2:2 a2:x b3:3 b4:4"


def test_counters_of_tenants_that_are_gone_are_forgotten(monkeypatch):
    """Salts are made by clients: a parade of them under a queue that is never empty stays small."""
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 10)
    order = FairShare(max_overtakes=3)
    patient = make_sequence(0, "A", tenant="patient")
    order.planned(patient, 100)
    order.planned(make_sequence(1, "A", tenant="debtor"), 10**6)
    for number in range(2, 200):
        passing = make_sequence(number, "A", tenant=f"tenant {number}")
        assert len(list(order.candidates([patient, passing]))) == 2
        order.planned(passing, number)
    assert search(order, b"tenant ").salts <= 11
    assert order.num_served_tokens(b"debtor") == 10**6, "the lowest are forgotten first"
    assert not list(order.candidates([]))
    assert not search(order, b"tenant ").salts

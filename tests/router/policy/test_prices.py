"""Workers that publish what their steps cost are weighed by it; the others by tokens."""

import pytest

from ostinato.router import Router
from ostinato.router.policy import WorkerPrices
from tests.router.fleets import batch, fleet, prompt, stored

LONG = "".join(chr(200 + number) for number in range(400))
HIT = "ABCDEFGH"


def with_hit_behind_long(prices: WorkerPrices | None) -> Router:
    """Return a router whose worker a has the prompt's prefix, and a long prompt to compute."""
    router = fleet("ab")
    router.apply("a", batch(0, stored(HIT * 8)))
    for name in "ab":
        router.set_prices(name, prices)
    assert router.route(prompt(LONG), 1.0, exclude="b") is not None
    return router


def test_a_hit_goes_to_its_worker_past_a_long_prompt_where_the_shortest_is_first():
    """Eight tokens wait for a step there, and not for the 400; 64 are to compute at the other."""
    request = prompt(HIT * 8 + "ijklmnop")
    decision = with_hit_behind_long(WorkerPrices(0.01, is_shortest_first=True)).route(request, 1.0)
    assert decision is not None and decision.worker == "a"
    for prices in (WorkerPrices(0.01, is_shortest_first=False), None):
        decision = with_hit_behind_long(prices).route(request, 1.0)
        assert decision is not None and decision.worker == "b", "it would wait for all of it"


def test_prompts_of_about_its_length_are_waited_for_and_of_longer_ones_a_share():
    router = with_hit_behind_long(WorkerPrices(0.01, is_shortest_first=True))
    assert router.route(prompt("0123456789"), 1.0, exclude="b") is not None
    [a, b] = router.look_up(prompt("abcdefghijklmnopqrstuvwxyz####"), 1.0)
    assert a.load_tokens == 410 and b.load_tokens == 0
    assert a.queued == pytest.approx(10 + 30 / 3) and b.queued == 0
    [a, _] = router.look_up(prompt("#" * 600), 1.0)
    assert a.queued == 410, "none is longer"


def test_a_slow_worker_gets_fewer_requests():
    """A token costs thrice as much at b: it gets a quarter of what comes."""
    router = fleet("ab")
    router.set_prices("a", WorkerPrices(0.01))
    router.set_prices("b", WorkerPrices(0.03))
    chosen = []
    for number in range(40):
        text = "".join(chr(1_000 + 100 * number + place) for place in range(80))
        decision = router.route(prompt(text), 1.0)
        assert decision is not None
        chosen.append(decision.worker)
    assert 6 <= chosen.count("b") <= 14


def test_attention_is_priced_where_the_tokens_are():
    router = fleet("ab")
    router.apply("a", batch(0, stored(HIT * 50)))
    for name in "ab":
        router.set_prices(name, WorkerPrices(0.01, 0.0001))
    [a, b] = router.look_up(prompt(HIT * 50 + "ijklmnop"), 1.0)
    assert a.work == pytest.approx(8 * (0.01 + 0.0001 * 404) / 0.01)
    assert b.work == pytest.approx(408 * (0.01 + 0.0001 * 204) / 0.01)


def test_a_worker_without_prices_has_the_mean_of_the_others():
    router = fleet("abc")
    router.set_prices("a", WorkerPrices(0.01))
    router.set_prices("b", WorkerPrices(0.03))
    works = [each.work for each in router.look_up(prompt("0123456789"), 1.0)]
    assert works == pytest.approx([5.0, 15.0, 10.0])
    router.set_prices("a", None)
    router.set_prices("b", None)
    assert [each.work for each in router.look_up(prompt("0123456789"), 1.0)] == [10.0] * 3

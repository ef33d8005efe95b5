"""The router asks workers for the prices of their steps; those that publish none, once."""

from typing import Any

import pytest

from ostinato.router import RouteRequest
from ostinato.router.policy import WorkerPrices
from ostinato.router.process.worker import prices_in
from tests.router.stub_workers import names, routed
from tests.support.waiting import until

PRICES = {"fixed_s": 0.03, "token_s": 0.004, "pair_s": 8e-5, "key_s": 0.0, "free_tokens": 8}


async def test_prices_are_taken_from_the_workers_that_publish_them():
    ours, other = names("a", "b")
    ours.prices = {"order": "shortest_first", "prices": PRICES}
    async with routed(ours, other) as router:
        fleet = router.app.fleet

        def works() -> list[float]:
            return [each.work for each in fleet.router.look_up(RouteRequest(range(100)), 0.0)]

        await until(lambda: works() == pytest.approx([200.0, 100.0]))
        prices = await fleet.workers["a"].prices()
        assert prices == WorkerPrices(0.004, 8e-5, is_shortest_first=True)
        await until(lambda: not fleet.workers["b"].has_prices)
        ours.prices = {"order": "fcfs", "prices": None}
        await until(lambda: works() == [100.0, 100.0])


@pytest.mark.parametrize(
    "prices",
    [None, {**PRICES, "token_s": 0.0}, {**PRICES, "token_s": "nan"}, {**PRICES, "pair_s": "inf"}],
)
def test_prices_that_cannot_be_are_none(prices: Any):
    assert prices_in({"order": "fcfs", "prices": prices}) is None

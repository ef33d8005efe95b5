"""A long prompt is routed in slices, between which the event loop does other work."""

import asyncio
from array import array

import pytest

from ostinato.router import Decision, Router, RouteRequest
from tests.router.fleets import batch, cleared, fleet
from tests.router.stub_workers import names, routed

LONG = RouteRequest(array("I", range(16_000)))


def slices(router: Router, between=lambda number: None) -> tuple[int, Decision]:
    """Route the long prompt; returns the number of pauses, in which ``between`` is called."""
    steps, number = router.route_in_slices(LONG, 0.0), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return number, end.value
        between(number)
        number += 1


def test_a_decision_in_slices_is_the_decision():
    """Four thousand blocks: new, and then expected where the first decision sent them."""
    whole, sliced = fleet(), fleet()
    for _ in range(2):
        decision = whole.route(LONG, 0.0)
        num_pauses, in_slices = slices(sliced)
        assert in_slices == decision and num_pauses >= 12
    assert whole.look_up(LONG, 1.0) == sliced.look_up(LONG, 1.0)
    sliced.check()


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_whatever_happens_between_two_slices_leaves_a_sound_tree(moment: int):
    """A worker clears its blocks, another leaves, a third comes, and others have short prompts."""
    router = fleet("abc", max_tracked_tokens=40_000)
    router.finished(router.route(LONG, 0.0), 0.0)

    def disturb(number: int) -> None:
        if number == moment:
            for name in "ab":
                router.apply(name, batch(0, cleared()))
            router.remove("a")
            router.add_worker("d", block_size=4)
            router.failed(router.route(RouteRequest([7] * 400), 0.0))
            router.check()

    _, decision = slices(router, disturb)
    router.check()
    router.finished(decision, 1.0)
    router.check()


def test_a_decision_that_is_given_up_between_two_slices_assigns_nothing():
    router = fleet()
    for num_slices in range(1, 20):
        steps = router.route_in_slices(LONG, 0.0)
        for _ in range(num_slices):
            next(steps, None)
        steps.close()
        if sum(status.num_requests for status in router.workers()):
            break  # it was complete
        router.check()
    assert num_slices >= 12


async def test_the_router_process_does_other_work_during_a_long_decision():
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async with routed(*names("a", "b")) as router:
        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        first = await router.app.fleet.choose(LONG, "", set())
        both = [router.app.fleet.choose(LONG, "", set()) for _ in range(2)]
        assert num_turns >= 3
        counting.cancel()
        assert {each.worker for each in await asyncio.gather(*both)} == {first.worker}

"""Tenants are served round robin, whatever the number of their requests."""

import asyncio
import threading
from functools import partial

import pytest

from ostinato.engine.requests.tenant_queue import TenantQueue
from tests.support.waiting import other_tasks_have_started


async def test_a_tenant_waits_for_one_piece_of_each_other_tenant():
    """Ann sends four pieces, then Bob one: his is the second to be done."""
    done: list[str] = []
    gate = threading.Event()

    queue = TenantQueue("test")
    first = asyncio.create_task(queue.run("ann", lambda: (gate.wait(), done.append("a1"))))
    rest = [
        asyncio.create_task(queue.run(tenant, partial(done.append, name)))
        for tenant, name in (("ann", "a2"), ("ann", "a3"), ("ann", "a4"), ("bob", "b1"))
    ]
    await other_tasks_have_started()  # all of them are in the queue
    gate.set()
    await asyncio.gather(first, *rest)
    assert done == ["a1", "b1", "a2", "a3", "a4"]


async def test_a_tenant_has_one_piece_under_way_whatever_the_number_of_threads():
    """Two threads, and still Ann's second piece waits for her first."""
    under_way, most = 0, 0

    def work() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        under_way -= 1

    queue = TenantQueue("test", num_threads=2)
    await asyncio.gather(*(queue.run("ann", work) for _ in range(50)))
    assert most == 1


async def test_what_is_raised_reaches_its_sender_and_the_next_piece_is_done():
    """A piece that fails is its sender's affair alone."""
    queue = TenantQueue("test")
    with pytest.raises(ZeroDivisionError):
        await queue.run("ann", lambda: 1 // 0)
    assert await queue.run("ann", lambda: 7) == 7


async def test_a_sender_that_goes_away_gives_up_its_place():
    """Its piece is not done; what waits behind it is."""
    done: list[str] = []
    gate = threading.Event()

    queue = TenantQueue("test")
    first = asyncio.create_task(queue.run("ann", gate.wait))
    gone = asyncio.create_task(queue.run("ann", lambda: done.append("gone")))
    last = asyncio.create_task(queue.run("ann", lambda: done.append("last")))
    await other_tasks_have_started()
    gone.cancel()
    await other_tasks_have_started()
    gate.set()
    await asyncio.gather(first, last)
    assert done == ["last"]

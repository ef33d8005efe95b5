"""Events of vLLM and SGLang over real sockets: what is known of a worker, and how well."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest

from ostinato.router import Router, RouteRequest, WorkerState
from ostinato.router.process.kv_feed import Endpoints, KVFeed, KVFeeds
from tests.router.publishers import FakePublisher, of_sglang, of_vllm
from tests.support.waiting import until

TEXT = "To be, or not to be: that is the question"


class Listened:
    """A router that listens to one publisher."""

    def __init__(self, publisher: FakePublisher, has_replay: bool = True) -> None:
        self.publisher = publisher
        self.router = Router()
        self.router.add_worker("w", block_size=4, sends_events=True)
        replay = publisher.replay if has_replay else None
        endpoints = Endpoints(publisher.events, replay, "kv")
        self.feed = KVFeed("w", endpoints, self.router, self._no_snapshot)

    async def _no_snapshot(self) -> None:
        return None

    @property
    def state(self) -> WorkerState:
        return self.router.workers()[0].state

    def cached(self, text: str) -> int:
        decision = self.router.route(RouteRequest([ord(letter) for letter in text + "?"]), 0.0)
        assert decision is not None
        self.router.failed(decision)
        return decision.candidates[0].cached_tokens

    async def meet(self) -> None:
        """Wait until the feed has received a first batch."""
        await self.publisher.wait_for_subscriber()
        await self.publisher.publish(["AllBlocksCleared"])
        await until(lambda: self.feed.num_batches)


@asynccontextmanager
async def listening(has_replay: bool = True) -> AsyncIterator[Listened]:
    publisher = FakePublisher()
    listened = Listened(publisher, has_replay)
    tasks = [
        asyncio.create_task(publisher.answer_replays()),
        asyncio.create_task(listened.feed.run()),
    ]
    try:
        await listened.meet()
        yield listened
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.close()


@pytest.mark.parametrize("write", [of_vllm, of_sglang])
async def test_both_formats_tell_exactly_what_is_cached(write: Callable[[str], Any]):
    async with listening() as heard:
        await heard.publisher.publish(write(TEXT))
        await until(lambda: heard.cached(TEXT) == 40)
        assert heard.state is WorkerState.EXACT
        assert heard.cached("To be, or what") == 8


async def test_who_joins_late_or_misses_batches_is_exact_again_after_a_replay():
    async with listening() as heard:
        await heard.publisher.publish(of_vllm(TEXT[:8]), is_lost=True)
        await heard.publisher.publish(of_vllm(TEXT, first=2))
        await until(lambda: heard.cached(TEXT) == 40)
        assert heard.state is WorkerState.EXACT and heard.feed.num_replays >= 2
        late = Listened(heard.publisher)
        await late.feed.begin()
        assert (late.cached(TEXT), late.state) == (40, WorkerState.EXACT)


async def test_batches_that_nothing_brings_back_leave_the_worker_degraded_until_it_is_cleared():
    async with listening(has_replay=False) as heard:
        await heard.publisher.publish(of_vllm(TEXT))
        await until(lambda: heard.cached(TEXT) == 40)
        await heard.publisher.publish(
            ["BlockRemoved", [TEXT[:40].encode()], "GPU", 0], is_lost=True
        )
        await heard.publisher.publish(of_vllm("Alas, poor Yorick"))
        await until(lambda: heard.state is WorkerState.DEGRADED)
        assert heard.cached(TEXT) == 0, "it may be gone, and is not counted on"
        await heard.publisher.publish(["AllBlocksCleared"], of_vllm("Words"))
        await until(lambda: heard.state is WorkerState.EXACT)
        assert heard.cached("Words") == 4


def test_a_worker_whose_events_make_no_sense_is_not_believed():
    """Garbage, or a block size that does not fit: guessed from then on, and nothing breaks."""

    async def scene(message: bytes | None) -> None:
        async with listening() as heard:
            await heard.publisher.publish(of_vllm(TEXT))
            await until(lambda: heard.cached(TEXT) == 40)
            if message is not None:
                await heard.publisher.send(heard.publisher.next, message)
            else:
                lie = of_vllm(TEXT)
                await heard.publisher.publish([*lie[:4], 16, *lie[5:]])
            await until(lambda: heard.state is WorkerState.GUESSED)
            assert heard.cached(TEXT) == 0

    for message in (b"\xc1garbage", None):
        asyncio.run(scene(message))


async def test_one_event_that_makes_no_sense_is_made_up_for_by_a_replay():
    """The worker is guessed until the next round of the poll, not until it restarts."""
    async with listening() as heard:
        await heard.publisher.publish(of_vllm(TEXT))
        await until(lambda: heard.cached(TEXT) == 40)
        await heard.publisher.send(heard.publisher.next, b"\xc1garbage")
        await until(lambda: heard.state is WorkerState.GUESSED)
        [missing] = heard.router.overdue(0.0)
        assert missing.begins and "not a batch of KV events" in missing.reason
        await heard.feed.fill(missing)
        assert (heard.cached(TEXT), heard.state) == (40, WorkerState.EXACT)


async def test_a_subscription_that_fails_is_made_again(caplog: pytest.LogCaptureFixture):
    """In the process and on Ray alike: what is known counts as broken until then."""
    publisher, router = FakePublisher(), Router()
    feeds = KVFeeds(router)
    run, num_runs = KVFeed.run, 0

    async def fail_once(feed: KVFeed) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            raise OSError("no socket is left")
        await run(feed)

    async def no_snapshot() -> None:
        return None

    with (
        mock.patch.object(KVFeed, "run", fail_once),
        mock.patch("ostinato.router.process.kv_feed.RESUBSCRIBE_S", 0.01),
    ):
        feed = feeds.listen("w", Endpoints(publisher.events, None, "kv"), no_snapshot, 4)
        await until(lambda: num_runs == 2)
        assert router.workers()[0].state is WorkerState.GUESSED
        await publisher.wait_for_subscriber()
        await publisher.publish(of_vllm(TEXT))
        await until(lambda: feed.num_batches == 1)
    assert "no socket is left" in caplog.text
    feeds.drop("w")
    assert not feeds.by_name
    await feeds.stop()
    publisher.close()

"""Steps are bounded by time, hits go before misses, and long prompts keep a share."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.sched.scheduler import Scheduler
from ostinato.scheduling.shortest_first import ELDER_SHARE
from ostinato.scheduling.step_prices import LearnedPrices, StepPrices, Work, plan_work
from ostinato.scheduling.step_timer import FIRST_TOKENS
from ostinato.settings import PrefixCacheConfig
from tests.support.tiny_scheduler import make_request, tiny_scheduler

PRICES = StepPrices(0.040, 0.004, 1e-7, free_tokens=4)
"""A step of 4 tokens takes 40 ms, and each further token 4 ms."""


class TimedScheduler:
    """A scheduler whose steps take what a price list says."""

    def __init__(self, knows_prices: bool = True, **config: Any) -> None:
        self.now_s, self.took_s, self.plan = 0.0, 0.0, StepPlan(())
        cache = build_cache(PrefixCacheConfig(4_000, 4), lambda: self.now_s)
        chosen = {"max_step_ms": 250, "order": "shortest_first"} | config
        self.prices = LearnedPrices(PRICES if knows_prices else None)
        self.scheduler: Scheduler = build_scheduler(
            SchedulerConfig(**chosen), cache, lambda: self.now_s, prices=self.prices
        )

    def add(self, name: str, num_tokens: int, max_tokens: int = 1, first: str = "") -> None:
        """Add a prompt whose tokens no other one has, behind those that it shares."""
        prompt = first + chr(1_000 + len(self.scheduler.requests.live)) * num_tokens
        self.scheduler.add(make_request(name, prompt, max_tokens=max_tokens), (0,))

    def step(self, slowdown: float = 1.0) -> dict[str, int]:
        """Run a step; return how many tokens of each request it computed."""
        self.plan = self.scheduler.plan()
        names = {
            s.sequence_id: str(name)
            for name, live in self.scheduler.requests.live.items()
            for s in live
        }
        self.took_s = PRICES.seconds(plan_work(self.plan)) * slowdown
        self.now_s += self.took_s
        results = (
            SequenceResult((SampledToken(7),)) if s.sample else SequenceResult()
            for s in self.plan.sequences
        )
        computed = {names[s.sequence_id]: len(s.tokens) for s in self.plan.sequences}
        self.scheduler.commit(StepResult(tuple(results)))
        return computed


def test_beside_a_stream_a_step_takes_the_limit_and_alone_what_is_fastest():
    timed = TimedScheduler()
    timed.add("stream", 1, max_tokens=100)
    timed.step()
    timed.add("long", 4_000)
    assert timed.step() == {"stream": 1, "long": 55}
    assert 0.240 < timed.took_s <= 0.250
    timed.scheduler.cancel(RequestId("stream"))
    assert timed.step() == {"long": PRICES.tokens_for_rate(0.97, 55, 2048)}


@pytest.mark.parametrize("max_step_ms", [1, 20, 100])
def test_a_step_is_no_shorter_than_what_keeps_nine_tenths_of_the_prompt_rate(max_step_ms):
    """Forty tokens a step, of which four are free: 0.04 / (0.04 + 36 * 0.004) is overhead."""
    timed = TimedScheduler(max_step_ms=max_step_ms)
    timed.add("stream", 1, max_tokens=100)
    timed.step()
    timed.add("long", 1_000)
    num_tokens = timed.step()["long"]
    rate = num_tokens / timed.took_s
    assert rate >= 0.85 / PRICES.token_s
    assert timed.took_s <= max(max_step_ms / 1000, 8 * 0.040)


def test_settings_of_tokens_stay_upper_limits():
    timed = TimedScheduler(max_num_batched_tokens=24, max_num_seqs=8, max_chunk_tokens=16)
    timed.add("stream", 1, max_tokens=100)
    timed.step()
    timed.add("long", 1_000)
    timed.add("other", 1_000)
    assert timed.step() == {"stream": 1, "long": 16, "other": 7}


def test_an_engine_that_has_measured_nothing_takes_small_steps_and_then_the_right_ones():
    timed = TimedScheduler(knows_prices=False)
    timed.add("stream", 1, max_tokens=1_000)
    timed.add("long", 4_000)
    sizes = [timed.step().get("long", 0) for _ in range(30)]
    assert max(sizes[:2]) <= FIRST_TOKENS
    assert all(after <= 2 * max(sizes[:place]) + 2 for place, after in enumerate(sizes) if place)
    assert all(0.200 < 0.040 + size * 0.004 < 0.290 for size in sizes[-5:])


def test_a_busy_minute_does_not_spoil_the_prices():
    """Steps take thrice as long for a while; sixty steps later all is as before."""
    timed = TimedScheduler(knows_prices=False)
    timed.add("stream", 1, max_tokens=4_000)
    timed.add("long", 12_000)
    before = [timed.step() for _ in range(40)][-1]["long"]
    for _ in range(3):  # single slow steps change nothing
        timed.step(slowdown=20.0)
        assert timed.step()["long"] == pytest.approx(before, rel=0.1)
    for _ in range(40):
        timed.step(slowdown=3.0)
    assert timed.took_s < 0.550, "while the machine is slow, steps are smaller"
    for _ in range(60):
        timed.step()
    assert timed.prices.prompt_s(0, 100) == pytest.approx(PRICES.seconds(Work(1, 104, 5_050)), 0.1)


def test_a_hit_is_served_in_the_next_step_and_a_long_miss_goes_on_beside_it():
    timed = TimedScheduler()
    timed.add("warm", 0, first="W" * 400)
    while timed.scheduler.has_work:
        timed.step()
    timed.add("long", 4_000)
    timed.step()
    timed.add("hit", 30, first="W" * 400)
    computed = timed.step()
    assert computed["hit"] == 30 and computed["long"] >= 10


def test_with_fcfs_a_later_hit_waits():
    timed = TimedScheduler(order="fcfs")
    timed.add("long", 1_000)
    timed.step()
    timed.add("short", 8)
    assert set(timed.step()) == {"long"}


def test_priority_goes_before_what_is_left():
    tiny = tiny_scheduler(num_blocks=64, budget=8, order="shortest_first")
    tiny.add("short", "abc", priority=1)
    tiny.add("urgent", "ABCDEFGHIJKLMNOPQRSTUVWX", priority=-1)
    assert tiny.step() == "urgent:ABCDEFGH"


def test_followers_of_a_prompt_take_nothing_from_it_while_they_wait():
    """The twin waits for the first one, so its share is not kept free."""
    tiny = tiny_scheduler(num_blocks=64, budget=8, order="shortest_first")
    tiny.add("first", "ABCDEFGHIJKLMNOPQRSTUVWX")
    assert tiny.step() == "first:ABCDEFGH"
    tiny.add("twin", "ABCDEFGHIJKLMNOPxy")
    assert tiny.step() == "first:IJKLMNOP twin:................xy"[: len("first:IJKLMNOP")]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 90), st.integers(1, 6)),
        min_size=2,
        max_size=24,
    ),
    st.integers(4, 24),
    st.sampled_from([None, 200]),
)
def test_law_the_eldest_prompt_has_its_share_of_every_step(arrivals, budget, max_step_ms):
    """Requests arrive at random; the first in rank of those that prefill computes a share.

    So a prompt is computed in as many steps as its tokens, and those of its elders, take at that
    share, whatever arrives later.
    """
    timed = TimedScheduler(
        max_num_batched_tokens=budget, max_num_seqs=4, max_step_ms=max_step_ms, max_overtakes=3
    )
    pending = sorted(arrivals)
    for number in range(400):
        while pending and pending[0][0] <= number:
            _, num_tokens, max_tokens = pending.pop(0)
            timed.add(f"{len(pending)}", num_tokens, max_tokens)
        if not timed.scheduler.has_work:
            continue
        running = [s for s in timed.scheduler.requests.running if s.num_uncomputed > 1]
        elder = min(running, key=lambda s: s.rank, default=None)
        left = 0 if elder is None else elder.num_uncomputed
        others = [s for s in timed.scheduler.requests.waiting if elder and s.rank < elder.rank]
        num_decodes = sum(s.num_uncomputed == 1 for s in timed.scheduler.requests.running)
        computed = timed.step()
        assert timed.took_s <= (8 * 0.2 if max_step_ms else 10), "steps are bounded"
        if elder is not None and not others:
            share = int((budget - num_decodes) * ELDER_SHARE)
            if max_step_ms:
                share = min(share, 1)
            assert computed.get(elder.request.request_id, 0) >= min(left, max(1, share))
    assert not timed.scheduler.has_work and not pending, "nobody waits for ever"

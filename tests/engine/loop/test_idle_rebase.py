"""Prompts that follow an answer, computed in idle steps by the real scheduler and cache.

Drawn with ``TinyScheduler``: letters as tokens, blocks of four. ``Q`` and ``A`` are a question and
an answer, ``r`` is reasoning that the template drops at the next user message.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine.loop import idle_rebase
from ostinato.engine.loop.idle_rebase import IdleRebase
from ostinato.engine.loop.recorder import TraceRecorder
from ostinato.scheduling.step_prices import StepPrices
from ostinato.settings import TenantShare
from tests.support.cache.timed_scheduler import TimedScheduler
from tests.support.cache.tiny_scheduler import TinyScheduler, make_request, tiny_scheduler

ANSWERED = "SYS:QQQQ" + "rrrrrrrrAAAAAAAA"
HEAD = "SYS:QQQQ" + "AAAAAAAA"
"""What the template makes of it before another question."""


class Idle:
    """A tiny scheduler and its idle work."""

    def __init__(self, row_bytes: int = 1, piece: int = 128, **settings: Any) -> None:
        self.tiny: TinyScheduler = tiny_scheduler(**{"num_blocks": 64, **settings})
        self.fails = False
        recorder = TraceRecorder(lambda: 0.0)
        parts = self.tiny.cache, self.tiny.scheduler, self.execute
        self.rebase = IdleRebase(True, *parts, row_bytes, recorder, piece)

    def execute(self, plan: StepPlan) -> StepResult:
        tiny = self.tiny
        tiny.adopt()
        tiny.checks.oracle.learn(tiny.checks.running())
        if self.fails:
            tiny.runner.fail_next()
        result = tiny.runner.execute(plan)
        tiny.checks.count(plan)
        return result

    def ask(self, name: str, prompt: str, tenant: str = "", **how: Any) -> None:
        """Run a request to its end, as the engine does, and note its answer."""
        self.tiny.add(name, prompt, tenant=tenant, **how)
        request = make_request(name, prompt, tenant=tenant, **how)
        self.rebase.note_request(request)
        self.tiny.run()
        self.rebase.note_answer(SimpleNamespace(request=request, error=None))

    def offer(self, name: str, tokens: str, tenant: str = "", in_loop: bool = False) -> bool:
        identity = Identity(tenant=tenant.encode())
        return self.rebase.offer(name, identity, array("I", map(ord, tokens)), in_loop)

    def rest(self) -> int:
        """Be idle; returns the number of steps."""
        steps = 1
        while self.rebase.run_idle_work():
            self.tiny.cache.manager.check()
            steps += 1
        self.tiny.cache.manager.check()
        return steps

    def hit(self, prompt: str, tenant: str = "") -> int:
        request = make_request("x", prompt, tenant=tenant)
        key = PrefixKey(request.identity, request.prompt_token_ids)
        return self.tiny.cache.manager.match(key).num_tokens

    @property
    def numbers(self) -> tuple[int, int, int]:
        counts = self.rebase.counts
        return counts.computed, counts.used, counts.wasted


def test_the_next_prompt_hits_up_to_the_users_words():
    """Without the idle steps only ``SYS:QQQQ`` is cached; with them all but the words are."""
    idle = Idle()
    idle.ask("one", ANSWERED)
    assert idle.hit(HEAD + "next") == 8
    assert idle.offer("one", HEAD)
    idle.rest()
    assert idle.hit(HEAD + "next") == len(HEAD)
    idle.ask("two", HEAD + "next")
    assert idle.numbers == (8, 8, 0)
    assert idle.rebase.rows_used_by("two") == 8
    assert idle.rebase.counts.pending == 0


def test_nothing_is_live_between_two_idle_steps():
    """One step per call, of a piece at most: what arrives in between finds the engine idle."""
    idle = Idle(piece=4)
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD + "BBBBCCCC")
    steps = 0
    while idle.rebase.run_idle_work():
        assert not idle.tiny.scheduler.has_work
        assert idle.tiny.cache.manager.num_live_tables == 0
        steps += 1
    assert steps == 3, "four pieces of one block"
    assert idle.rebase.counts.computed == 16


def test_live_requests_go_first():
    idle = Idle()
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD)
    idle.tiny.add("two", "something else", max_tokens=2)
    assert not idle.rebase.run_idle_work()
    assert idle.rebase.counts.computed == 0
    idle.tiny.run()
    idle.rest()
    assert idle.rebase.counts.computed == 8


def test_a_request_that_comes_first_makes_a_head_late_not_wasted():
    idle = Idle()
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD)
    idle.ask("two", HEAD + "next")
    assert idle.numbers == (0, 0, 0)
    assert idle.rebase.counts.late == 1
    assert idle.rest() == 1 and idle.rebase.counts.computed == 0


def test_another_turn_than_expected_wastes_what_it_does_not_hit():
    """The client edits its last answer: four of eight rows are used."""
    idle = Idle()
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD)
    idle.rest()
    idle.ask("two", "SYS:QQQQ" + "AAAAbbbb" + "next")
    assert idle.numbers == (8, 4, 4)


def test_a_beginning_that_is_copied_within_a_block_is_no_prepared_row():
    """``Q`` of a block of four is cached and copied; a retry of the answer settles nothing."""
    idle = Idle()
    idle.ask("one", "SYS:Q" + "rrrrrrrAAAA")
    assert idle.offer("one", "SYS:Q" + "AAAAAAA")
    idle.rest()
    assert idle.numbers == (7, 0, 0)
    idle.ask("retry", "SYS:Q" + "rrrrrrrBBBB")
    assert idle.numbers == (7, 0, 0)
    idle.ask("two", "SYS:Q" + "AAAAAAA" + "next")
    assert idle.numbers == (7, 7, 0)


LOOP = ["SYS:QQQQrrrrCCCC", "SYS:QQQQrrrrCCCCRRRRssssDDDD", "SYS:QQQQrrrrCCCCRRRRssssDDDDTTTTAAAA"]
LOOP_HEADS = ["SYS:QQQQCCCC", "SYS:QQQQCCCCRRRRDDDD", "SYS:QQQQCCCCRRRRDDDDTTTTAAAA"]
"""A loop of two calls, C and D, with reasoning and results; and without the reasoning."""


def test_inside_a_loop_each_head_takes_over_the_rows_of_the_one_before():
    """Requests with results settle nothing; the question then hits all but its words."""
    idle = Idle()
    for number, (prompt, head) in enumerate(zip(LOOP, LOOP_HEADS, strict=True)):
        idle.ask(f"{number}", prompt)
        assert idle.offer(f"{number}", head, in_loop=number < 2)
        idle.rest()
        assert idle.numbers == (len(head) - 8, 0, 0)
        assert len(idle.rebase.heads) == 1
    idle.ask("question", LOOP_HEADS[-1] + "next")
    assert idle.numbers == (20, 20, 0)


def test_a_question_before_the_end_of_a_loop_uses_what_was_prepared():
    """A user interrupts it after the second call."""
    idle = Idle()
    idle.ask("one", LOOP[1])
    assert idle.offer("one", LOOP_HEADS[1], in_loop=True)
    idle.rest()
    idle.ask("question", LOOP_HEADS[1] + "TTTTnext")
    assert idle.numbers == (12, 12, 0)


def test_a_head_of_another_course_is_taken_over_as_far_as_it_goes():
    """The client edits the second call: of eight prepared rows six are those of its head."""
    idle = Idle()
    idle.ask("one", LOOP[1])
    assert idle.offer("one", LOOP_HEADS[1], in_loop=True)
    idle.rest()
    assert idle.numbers == (12, 0, 0)
    idle.ask("two", "SYS:QQQQrrrrCCCCRRRRssssEEEETTTTAAAA")
    assert idle.offer("two", "SYS:QQQQCCCCRRRREEEETTTTAAAA")
    idle.rest()
    idle.ask("question", "SYS:QQQQCCCCRRRREEEETTTTAAAAnext")
    assert idle.numbers == (24, 20, 4)


def test_pieces_are_smaller_inside_a_loop():
    idle = Idle(num_blocks=256)
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD + "B" * 88, in_loop=True)
    assert idle.rest() == 3, "96 rows in pieces of 32"


def test_other_conversations_settle_nothing():
    idle = Idle()
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD)
    idle.rest()
    idle.ask("other", "SYS:ZZZZZZZZ")
    idle.ask("stranger", HEAD + "next", tenant="b")
    assert idle.numbers == (8, 0, 0)
    assert idle.rebase.counts.pending == 8


def test_no_offer_is_taken_without_an_answer_twice_or_under_another_identity():
    """A forged or late offer publishes nothing, under no salt."""
    idle = Idle()
    idle.ask("one", ANSWERED, tenant="a")
    assert not idle.offer("forged", HEAD, tenant="a")
    assert not idle.offer("one", HEAD, tenant="b")
    assert not idle.offer("one", HEAD, tenant="a"), "the wrong offer has used it up"
    idle.ask("two", ANSWERED, tenant="a")
    assert idle.offer("two", HEAD, tenant="a")
    assert not idle.offer("two", HEAD, tenant="a")
    idle.rest()
    assert idle.hit(HEAD + "next", tenant="b") == 0
    assert idle.hit(HEAD + "next", tenant="a") == len(HEAD)


@pytest.mark.parametrize("how", [{"n": 2}, {"cache_write": False}, {"cache_read": False}])
def test_requests_that_keep_nothing_are_offered_nothing(how: dict[str, Any]):
    idle = Idle()
    idle.ask("one", ANSWERED, **how)
    assert not idle.rebase.is_prepared("one")
    assert not idle.offer("one", HEAD)


def test_a_failed_answer_is_offered_nothing():
    idle = Idle()
    request = make_request("one", ANSWERED)
    idle.rebase.note_answer(SimpleNamespace(request=request, error="failed"))
    assert not idle.offer("one", HEAD)


def test_an_erased_tenant_leaves_nothing_and_late_offers_are_refused():
    idle = Idle()
    for tenant in "ab":
        idle.ask(f"one {tenant}", ANSWERED, tenant=tenant)
        idle.ask(f"two {tenant}", ANSWERED, tenant=tenant)
        idle.offer(f"one {tenant}", HEAD, tenant=tenant)
    idle.tiny.cache.admin.erase(b"a")
    idle.rebase.erase(b"a")
    assert not idle.offer("two a", HEAD, tenant="a"), "it was rendered before the tenant's end"
    idle.rest()
    assert idle.hit(HEAD + "next", tenant="a") == 0
    assert idle.hit(HEAD + "next", tenant="b") == len(HEAD)
    idle.rebase.erase()
    assert not idle.offer("two b", HEAD, tenant="b")
    assert idle.rebase.counts.pending == 0


def test_new_weights_end_what_was_offered():
    idle = Idle()
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD)
    idle.tiny.cache.admin.new_epoch(b"w" * 32)
    idle.rest()
    assert idle.rebase.counts.computed == 0


def test_blocks_that_are_held_are_never_taken():
    """A lease holds six of eight blocks: only the other two are taken."""
    idle = Idle(num_blocks=8)
    idle.ask("one", ANSWERED)
    idle.ask("two", "other")  # the other two
    before = idle.tiny.cache.stats.evicted_blocks
    whole = PrefixKey(Identity(), array("I", map(ord, ANSWERED)))
    lease = idle.tiny.cache.manager.pin(whole, 24)  # six of eight blocks
    assert idle.offer("one", "SYS:QQQQ" + "AAAA")
    idle.rest()
    assert idle.hit(ANSWERED + "x") == 24
    assert idle.tiny.cache.stats.evicted_blocks - before <= 2
    idle.tiny.cache.manager.unpin(lease)


def test_a_tenants_unused_rows_are_bounded_and_the_oldest_head_goes_first():
    """An eighth of 64 blocks of four are 32 rows; the third head of 12 replaces the first."""
    idle = Idle()
    for number in range(3):
        turn = f"SYS:{number:04}"
        idle.ask(f"ask {number}", turn + "rrrrrrrrAAAAAAAAAAAA")
        assert idle.offer(f"ask {number}", turn + "AAAAAAAAAAAA")
        idle.rest()
    assert idle.numbers == (36, 0, 12)
    assert idle.hit("SYS:0000AAAAAAAAAAAAnext") == 8, "its blocks are free again"
    assert idle.hit("SYS:0002AAAAAAAAAAAAnext") == 20


@pytest.mark.parametrize(("row_bytes", "num_rows"), [(1, 32), (idle_rebase.MAX_BYTES // 8, 8)])
def test_a_head_above_the_budget_is_prepared_as_far_as_that_goes(row_bytes: int, num_rows: int):
    """By an eighth of the pool, 32 rows, or by their bytes; the rest is for the next request."""
    idle = Idle(row_bytes=row_bytes)
    idle.ask("one", ANSWERED)
    assert idle.offer("one", HEAD + "B" * 40)
    idle.rest()
    assert idle.hit(HEAD + "B" * 40) == 8 + num_rows
    idle.ask("two", HEAD + "B" * 40 + "next")
    assert idle.numbers == (num_rows, num_rows, 0)


def test_a_tenant_that_uses_less_than_a_third_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(idle_rebase, "TRIAL_ROWS", 32)
    idle = Idle()
    for number in range(4):
        turn = f"SYS:{number:04}"
        idle.ask(f"ask {number}", turn + "rrrrrrrrAAAAAAAA", tenant="a")
        assert idle.offer(f"ask {number}", turn + "AAAAAAAA", tenant="a")
        idle.rest()
        idle.ask(f"then {number}", turn + "bbbbbbbb", tenant="a")  # nothing of it
        idle.ask(f"edit {number}", turn + "Abbbbbbb", tenant="a")
    assert idle.rebase.counts.stopped == 1
    idle.ask("last", ANSWERED, tenant="a")
    assert not idle.rebase.is_prepared("last")
    assert not idle.offer("last", HEAD, tenant="a")
    idle.ask("other", ANSWERED, tenant="b")
    assert idle.offer("other", HEAD, tenant="b"), "others go on"


def test_a_step_that_fails_ends_its_head_alone():
    idle = Idle()
    idle.ask("one", ANSWERED)
    idle.offer("one", HEAD)
    idle.fails = True
    idle.rest()
    idle.fails = False
    assert idle.rebase.counts.computed == 0
    assert idle.hit(HEAD + "next") == 8
    idle.ask("two", HEAD + "next")
    assert idle.tiny.outputs["two"]


def test_idle_work_is_no_request_of_the_callers_counters():
    idle = Idle()
    idle.ask("one", ANSWERED)
    before = idle.tiny.cache.stats.first.num_requests
    idle.offer("one", HEAD)
    idle.rest()
    assert idle.tiny.cache.stats.first.num_requests == before


def test_quotas_of_a_tenant_hold_for_its_idle_work():
    """A quota of six blocks: the head evicts the tenant's own blocks, and nobody else's."""
    idle = Idle(tenant_shares={b"a": TenantShare(quota=6)})
    idle.ask("other", "0123456789abcdef", tenant="b")
    idle.ask("one", ANSWERED, tenant="a")
    assert idle.offer("one", HEAD + "BBBB", tenant="a")
    idle.rest()
    assert idle.hit("0123456789abcdefx", tenant="b") == 16
    assert idle.hit(HEAD + "BBBBnext", tenant="a") >= 16
    of_a = [e for e in idle.tiny.cache.manager.pool.entries() if e.identity.owner == b"a"]
    assert sum(entry.num_blocks for entry in of_a) <= 6


@pytest.mark.parametrize(
    ("token_s", "piece_tokens"),
    [(0.001, 128), (0.010, 25), (0.100, 2)],
    ids=["fast", "mid", "slow"],
)
def test_a_piece_takes_no_longer_than_a_step_while_others_wait(token_s, piece_tokens):
    """A slow machine computes little at a time, and a hit waits for that alone."""
    prices = StepPrices(0.0, token_s, 0.0, free_tokens=0)
    timed = TimedScheduler(true_prices=prices, max_step_ms=250)
    computed: list[int] = []

    def execute(plan: StepPlan) -> StepResult:
        computed.append(plan.num_tokens)
        raise RuntimeError("one piece is enough")

    clock = TraceRecorder(lambda: timed.now_s)
    rebase = IdleRebase(True, timed.cache, timed.scheduler, execute, 1, clock)
    rebase.note_answer(SimpleNamespace(request=make_request("one", ANSWERED), error=None))
    identity, tokens = make_request("one", "").identity, array("I", range(400))
    assert rebase.offer("one", identity, tokens)
    rebase.run_idle_work()
    assert computed == [piece_tokens]

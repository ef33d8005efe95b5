"""Where requests go, and why."""

from collections import Counter
from collections.abc import Iterable

import pytest

from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.router import POLICIES, Decision, Router, RouterConfig, RouteRequest
from ostinato.router.policy.load import Assigned, WorkerLoad
from ostinato.router.policy.policies import Candidates
from tests.router.fleets import batch, fleet, picture, prompt, removed, stored

LONG = "ABCD" * 100


def serve(router: Router, request: RouteRequest, now: float = 0.0) -> Decision:
    """Route a request that is finished at once."""
    decision = router.route(request, now)
    router.first_token(decision)
    router.finished(decision, now)
    return decision


def spread(router: Router, requests: Iterable[RouteRequest], gap_s: float) -> Counter[str]:
    """Serve requests one after another; returns how many each worker got."""
    homes = Counter(serve(router, each, at * gap_s).worker for at, each in enumerate(requests))
    router.check()
    return homes


def test_a_request_goes_where_its_prefix_is():
    router = fleet("abc")
    router.apply("b", batch(0, stored("ABCDEFGH")))
    decision = router.route(prompt("ABCDEFGHIJ"), 0)
    assert (decision.worker, decision.state.value) == ("b", "exact")
    assert (decision.expected_cached_tokens, decision.tokens_to_compute) == (8, 2)


def test_it_goes_elsewhere_once_waiting_there_costs_more_than_computing_anew():
    """b holds the prefix and has 4,000 tokens queued; computing 400 costs less."""
    router = fleet("ab")
    router.apply("b", batch(0, stored(LONG)))
    router.apply("a", batch(0, stored("WXYZ" * 1000)))
    router.route(prompt("Q" * 4000), 0, exclude=["a"])
    assert router.route(prompt(LONG + "E"), 0).worker == "a"


def test_a_short_request_does_not_wait_behind_a_long_prompt_for_a_small_hit():
    """b has 400 of its tokens and a queue of ten times the usual wait; a has neither."""
    router = fleet("ab")
    router.apply("b", batch(0, stored(LONG)))
    for number in range(9):
        router.finished(router.route(prompt(chr(1000 + number) * 200), 0, exclude=["b"]), 0)
    router.route(prompt("Q" * 2000), 0, exclude=["a"])
    decision = router.route(prompt(LONG + "E"), 0)
    assert (decision.worker, decision.candidates[1].cached_tokens) == ("a", 400)


def test_the_longest_prompts_are_still_sent_where_part_of_them_is_cached():
    """A prompt hundreds of times the usual one: the cost of its wait is large, and still exact."""
    router = fleet("abc")
    router.apply("b", batch(0, stored("WXYZ" * 250)))
    for number in range(9):
        serve(router, prompt(chr(1000 + number) * 20))
    assert router.route(prompt("WXYZ" * 250 + "Q" * 9000), 0).worker == "b"


def test_the_second_request_of_a_cold_prefix_follows_the_first():
    """Nothing is cached anywhere; the first is still being computed, and the second says so."""
    router = fleet("abcd")
    first = router.route(prompt(LONG + "one"), 0)
    second = router.route(prompt(LONG + "two"), 0)
    assert second.worker == first.worker
    assert second.follows == first.number
    assert second.tokens_to_compute == 3
    router.first_token(first)
    assert router.route(prompt(LONG + "three"), 1).follows is None


def test_what_waits_behind_a_long_prompt_shrinks_as_its_blocks_are_stored():
    """By events, block by block; the last token is done when the answer begins."""
    router = fleet("a")
    long = router.route(prompt(LONG), 0)
    router.route(prompt("WXYZ" * 5), 0)
    left = []
    for number, (start, end) in enumerate([(0, 100), (100, 200), (200, 400)]):
        router.apply("a", batch(number, stored(LONG[start:end], LONG[:start])))
        left.append(router.workers()[0].load_tokens)
        router.check()
    assert left == [320, 220, 21]
    router.first_token(long)
    assert router.workers()[0].load_tokens == 20


def test_a_burst_of_one_new_prefix_is_computed_where_there_is_room_and_not_everywhere():
    router = fleet("abcdefgh")
    requests = [prompt(LONG + chr(500 + i) * 20) for i in range(64)]
    counts = Counter(router.route(request, 0.0).worker for request in requests)
    router.check()
    assert 2 <= len(counts) <= 4
    assert max(counts.values()) <= 64 / 2


def test_what_failed_is_not_taken_to_be_cached():
    router = fleet("ab")
    first = router.route(prompt(LONG), 0)
    router.failed(first)
    assert router.look_up(prompt(LONG), 1)[0].expected_tokens == 0
    router.check()


def test_what_failed_counts_neither_as_work_nor_as_hits():
    """Four attempts fail, one of them with hits, and the next choice is as if they were not."""
    router = fleet("ab")
    first = router.route(prompt(LONG), 0)
    router.finished(first, 1)
    computed = len(LONG) - first.expected_cached_tokens
    for number in range(4):
        router.failed(router.route(prompt(LONG + "again" * number), 2))
    statuses = {status.name: status for status in router.workers()}
    assert statuses[first.worker].computed_tokens == computed
    assert sum(status.computed_tokens for status in statuses.values()) == computed
    assert sum(status.hit_tokens for status in statuses.values()) == 0
    assert router.route(prompt("a new prompt"), 2).worker != first.worker
    router.check()


def test_a_retry_leaves_out_the_worker_that_failed():
    router = fleet("ab")
    first = router.route(prompt(LONG), 0)
    router.failed(first)
    assert router.route(prompt(LONG), 0, exclude=[first.worker]).worker != first.worker
    assert router.route(prompt(LONG), 0, exclude=["a", "b"]) is None


def test_a_guess_is_forgotten_after_its_time():
    router = fleet("a", guess_ttl_s=60)
    router.finished(router.route(prompt(LONG), 0), 1)
    found = [router.look_up(prompt(LONG + "E"), now)[0] for now in (59, 61)]
    assert [(each.cached_tokens, each.expected_tokens) for each in found] == [(0, 400), (0, 0)]


def test_events_take_the_place_of_what_was_expected():
    """Once stored and then removed, the block is not expected any more."""
    router = fleet("a")
    router.route(prompt("ABCDEFGH"), 0)
    router.apply("a", batch(0, stored("ABCDEFGH"), removed("ABCDEFGH")))
    only = router.look_up(prompt("ABCDEFGHI"), 1)[0]
    assert (only.cached_tokens, only.expected_tokens) == (4, 0)


def test_texts_without_a_tokenizer_are_matched_by_their_characters():
    """Also at a worker whose events are exact: they do not speak of characters."""
    router = fleet("ab")
    router.apply("a", batch(0, stored("ABCD")))
    first = router.route(RouteRequest.of_text(LONG), 0)
    second = router.route(RouteRequest.of_text(LONG + "!"), 0)
    assert (second.worker, second.state.value) == (first.worker, "guessed")
    assert second.expected_cached_tokens == 400


def test_images_are_part_of_the_key_as_our_engine_names_them():
    router = fleet("a")
    cat, dog = (ImageSpan(name, 1, 2) for name in (b"cat", b"dog"))
    extra = PrefixKey(Identity(), [9] * 4, [cat]).block_key(0, 4).extra
    router.apply("a", batch(0, stored("AIID", extras=(extra,))))
    found = [
        router.look_up(prompt("AIIDX", images=images), 0)[0].cached_tokens
        for images in ((cat,), (dog,), ())
    ]
    assert found == [4, 0, 0]


def test_workers_join_drain_and_leave_while_requests_run():
    router = fleet("ab")
    running = [router.route(prompt(LONG + str(i)), 0) for i in range(3)]
    router.drain("a")
    assert {router.route(prompt(f"{i}" * 40), 0).worker for i in range(4)} == {"b"}
    router.remove("a")
    router.add_worker("c", block_size=4)
    for decision in running:
        router.first_token(decision)
        router.finished(decision, 1)
    router.check()
    assert [status.name for status in router.workers()] == ["b", "c"]
    assert picture(router, LONG, 1) == "b:guessed 0 c:guessed 0"


def test_workers_of_different_block_sizes_are_compared_in_tokens():
    router = fleet("a")
    router.add_worker("b", block_size=16)
    router.apply("a", batch(0, stored("ABCDEFGHIJKLMNOP")))
    found = router.look_up(prompt("ABCDEFGHIJKLMNOPQ"), 0)
    assert [each.cached_tokens for each in found] == [16, 0]


def test_paced_agents_are_spread_although_no_worker_is_ever_busy():
    """100 agents with a common prompt, one at a time: no load is ever seen, and both serve."""
    router = fleet("ab")
    requests = [
        prompt("SYSTEM__" * 8 + f"{agent:>4}" * 30 + "turn" * turn, session=str(agent))
        for turn in range(3)
        for agent in range(100)
    ]
    counts = spread(router, requests, gap_s=0.05)
    assert min(counts.values()) >= 0.4 * len(requests)


def test_paced_agents_stay_where_they_are():
    """Each agent has one home: its later turns hit all of its earlier ones."""
    router = fleet("ab")
    homes: dict[str, set[str]] = {}
    for turn in range(4):
        for agent in range(40):
            text = f"{agent:>4}" * 30 + "turn" * 4 * turn
            decision = serve(router, prompt(text, session=str(agent)), turn * 10 + agent / 4)
            homes.setdefault(str(agent), set()).add(decision.worker)
    assert sum(len(home) == 1 for home in homes.values()) >= 38


def test_a_hot_prefix_gets_a_second_worker_before_the_first_is_full():
    """One tenant's prompts, never two at a time: the prefix is computed on more than one worker."""
    router = fleet("abcd")
    requests = [prompt(LONG + chr(500 + i) * 200) for i in range(60)]
    assert len(spread(router, requests, gap_s=0.1)) >= 2


def test_a_hot_tenant_is_spread_and_leaves_the_others_their_hits():
    """Half of the traffic is one tenant's, behind one prefix; sixteen others go on with theirs."""
    router, turns, hits, possible = fleet("abcd"), [""] * 16, 0, 0
    for number in range(320):
        other = number // 2 % 16
        if number % 2:
            turns[other] += f"{number:>4}" * 10
        salt = str(other) if number % 2 else "hot"
        text = turns[other] if number % 2 else LONG + f"{number:>4}" * 50
        decision = serve(router, prompt(text, salt=salt, session=salt), number / 4)
        if salt != "hot":
            hits += decision.expected_cached_tokens
            possible += len(text) - 40
    work = [status.computed_tokens for status in router.workers()]
    assert hits > 0.9 * possible
    assert max(work) < sum(work) / 2


def test_a_public_prefix_reaches_as_many_workers_as_asked_for():
    router = fleet("abcd")
    router.apply("c", batch(0, stored(LONG)))
    placed = router.place(prompt(LONG), 3, 0)
    assert len({each.worker for each in placed} | {"c"}) == 3
    assert placed[0].reason == "copy 2 of 3"
    assert router.place(prompt(LONG), 3, 0) == []
    assert len(router.place(prompt(LONG), 9, 0)) == 1, "no more than there are workers"


def test_a_decision_is_explained_in_words_and_numbers():
    router = fleet("ab")
    router.apply("b", batch(0, stored(LONG)))
    decision = router.route(prompt(LONG + "EFGH"), 0)
    assert router.explain(decision).splitlines() == [
        "b by cache_state: 11 for 0 tokens queued + 2.0 * (4 to compute + 0 above its share "
        "recently)",
        "404 prompt tokens, 400 expected to be cached (exact), 4 to compute",
        "worker     cached      sent   compute    queued       score",
        "b             400         0         4         0       18.87  exact",
        "a               0         0       404         0   4.275e+13  guessed",
    ]


@pytest.mark.parametrize("policy", ["prefix_hash", "session"])
def test_affinity_is_bounded_by_load(policy):
    """One prefix and one session: no worker has more than its share and a quarter."""
    router = fleet("abcd", policy=policy)
    for number in range(1, 41):
        router.route(prompt(LONG, session="one"), 0)
        most = max(status.num_requests for status in router.workers())
        assert most <= -(-1.25 * number // 4)


def test_a_prefix_keeps_its_worker_when_others_join_and_leave():
    """Rendezvous hashing: of 100 prefixes, those of the worker that left move, no others."""
    requests = [prompt(f"{i:>4}" * 20) for i in range(100)]
    router = fleet("abcd", policy="prefix_hash")
    before = [serve(router, request).worker for request in requests]
    router.remove("d")
    after = [serve(router, request).worker for request in requests]
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "d")
    assert 10 < before.count("d") < 40


def test_a_session_stays_and_others_go_where_least_is_to_do():
    router = fleet("ab", policy="session")
    one = router.route(prompt(LONG, session="one"), 0)
    two = router.route(prompt(LONG, session="two"), 0)
    assert one.worker != two.worker
    router.finished(two, 0)
    router.finished(one, 0)
    assert router.route(prompt("other", session="one"), 0).worker == one.worker


def test_simple_policies():
    turns = fleet("abc", policy="round_robin")
    assert [turns.route(prompt(LONG), 0).worker for _ in range(4)] == ["a", "b", "c", "a"]
    least = fleet("abc", policy="least_loaded")
    assert len({least.route(prompt(LONG), 0).worker for _ in range(3)}) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_any_prompt(policy):
    """Also an empty one, and with one worker."""
    router = fleet("a", policy=policy)
    assert {router.route(prompt(text), 0).worker for text in ("", "A", LONG)} == {"a"}
    router.check()


@pytest.mark.parametrize(
    "setting", [{"policy": "best"}, {"max_tracked_tokens": 0}, {"guess_ttl_s": -1}, {"silent_s": 0}]
)
def test_settings_that_cannot_be_are_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        RouterConfig(**setting)


def test_recent_work_fades_with_the_time_that_sessions_take_to_return():
    load = WorkerLoad()
    load.assign(Assigned(1, 0, "", 1000, 1000, 0.0))
    load.decay(30.0, 30.0)
    assert round(load.recent_tokens) == 368
    load.decay(20.0, 30.0)
    assert round(load.recent_tokens) == 368, "a clock that steps back changes nothing"


def test_the_bound_always_leaves_room_somewhere():
    work = Assigned(1, 0, "", 0, 0, 0.0)
    for running in ([0], [3, 3, 3], [9, 0], [1, 2, 3, 4, 5]):
        loads = [WorkerLoad(running={n: work for n in range(each)}) for each in running]
        fleet_ = Candidates([], loads)
        assert any(fleet_.has_room(place) for place in range(len(loads)))


def test_memory_is_bounded_and_what_did_not_fit_is_said():
    router = fleet("ab", max_tracked_tokens=400)
    router.apply("a", batch(0, stored(LONG[:200])))
    assert picture(router, "ABCD" * 60, names="a") == "a:exact 200"
    for number in range(200):
        serve(router, prompt(f"{number:>4}" * 20), number)
        router.check()
    assert "raise max_tracked_tokens" in router.workers()[0].reason
    assert picture(router, "ABCD" * 60, names="a") == "a:degraded 0"
    assert router.num_tokens <= 400


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_requests", [500, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_memory_stays_flat_over_many_requests(num_requests):
    """Sessions, prefixes and marks come and go; what is kept does not grow with them."""
    router = fleet("abcd", max_tracked_tokens=4_000)
    for number in range(num_requests):
        request = prompt(f"{number % 977:>4}" * 8 + f"{number:>8}", session=str(number % 5_000))
        decision = router.route(request, number / 10)
        router.first_token(decision)
        if number % 7:
            router.finished(decision, number / 10)
        else:
            router.failed(decision)
    assert router.num_tokens <= 4_000
    assert sum(status.num_requests for status in router.workers()) == 0
    router.check()


def test_a_worker_that_broke_answers_off_may_have_lost_what_it_was_guessed_to_have():
    router = fleet("ab")
    decision = serve(router, prompt(LONG))
    assert router.interrupted(decision.worker) is None
    assert all(each.expected_tokens == 0 for each in router.look_up(prompt(LONG), 2))
    router.check()


def test_events_of_a_worker_that_broke_answers_off_are_doubted_until_a_replay():
    router = fleet("a")
    router.apply("a", batch(0, stored("ABCD")))
    missing = router.interrupted("a")
    assert picture(router, "ABCDE") == "a:degraded 4"
    assert router.replayed("a", [batch(missing.replay_from, stored("ABCD"))]) is None
    assert picture(router, "ABCDE") == "a:exact 4"

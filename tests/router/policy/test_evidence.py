"""A worker counts as known exactly only as long as its requests find what its events say."""

from ostinato.router import Router
from tests.router.fleets import batch, fleet, picture, prompt, removed, stored

BLOCKS = "".join(letter * 4 for letter in "abcdefghijklmnopqrst")
"""A prompt of twenty blocks."""


def told(text: str = BLOCKS) -> Router:
    """Return a router to whose only worker a prompt's blocks are known exactly."""
    router = fleet("a", silent_s=5)
    router.apply("a", batch(0, stored(text)))
    return router


def serve(router: Router, text: str, reported: int | None, now: float = 0.0) -> None:
    """Route a request, and report its hits at once."""
    decision = router.route(prompt(text), now)
    router.first_token(decision)
    router.finished(decision, now, reported)


def state(router: Router) -> str:
    return router.workers()[0].state.value


def test_hits_that_events_promise_and_requests_do_not_find_end_the_belief_in_events():
    """After four requests of which none found its eighty tokens; one says nothing yet."""
    router = told()
    for number in range(4):
        assert state(router) == "exact"
        serve(router, BLOCKS + f"{number:>4}", reported=0)
    assert state(router) == "guessed" and picture(router, BLOCKS + "?") == "a:guessed 0"
    assert "80 of 84 prompt tokens were expected" in router.workers()[0].reason
    router.check()


def test_hits_that_no_event_told_of_end_it_as_well():
    """Another tokenizer than the worker's: what it stores is none of what was sent there."""
    router = told("WXYZ" * 10)
    for number in range(4):
        serve(router, f"{number:>4}" + BLOCKS, reported=64)
    assert state(router) == "guessed"
    assert "--tokenizer" in router.workers()[0].reason


def test_small_differences_misses_and_rare_ones_are_no_reason():
    """Two blocks or a fifth of the prompt; requests without hits; one disagreement of four."""
    router = told()
    for number in range(32):
        serve(router, BLOCKS + f"{number:>4}", reported=0 if number % 4 == 3 else 68)
        serve(router, f"new {number:>4}", reported=0)
    assert state(router) == "exact"


def test_public_prefixes_of_which_events_tell_under_another_salt_are_no_disagreement():
    router = told()
    for number in range(8):
        request = prompt(f"{number:>4}" * 20, salt="ann", held={"a": 40})
        router.finished(router.route(request, number), number, 40)
        router.apply("a", batch(number + 1, stored(f"{number:>4}", behind=BLOCKS)))
    assert router.overdue(60) == [] and state(router) == "exact"


def test_what_is_evicted_while_a_request_waits_is_no_disagreement():
    router, text = fleet("a"), BLOCKS
    for number in range(8):
        router.apply("a", batch(2 * number, stored(BLOCKS)))
        decision = router.route(prompt(text + "?"), 0)
        ends = range(len(text), 0, -4)
        router.apply("a", batch(2 * number + 1, removed(*(text[:end] for end in ends))))
        router.finished(decision, 0, 0)
    assert state(router) == "exact"


def test_prompts_of_which_no_event_tells_end_the_belief_although_hits_agree():
    """Events come, of other blocks: after twice the time of a silence, or once, if others came."""
    router = told()
    for number in range(4):
        serve(router, f"{number:>4}" * 10, reported=None, now=number)
        router.apply("a", batch(number + 1, stored(f"{number:>4}", behind=BLOCKS)))
    assert router.overdue(4) == [] and state(router) == "exact"
    [missing] = router.overdue(20)
    assert state(router) == "guessed" and missing.begins
    assert "do not tell of the blocks" in missing.reason


def test_one_prompt_again_and_again_is_evidence_each_time():
    """The hits agree, since they are those of what was sent there; no event told of it."""
    router = told()
    for number in range(5):
        serve(router, "wxyz" * 10 + str(number), reported=40 if number else 0, now=number)
    assert router.overdue(4) == [] and state(router) == "exact"
    router.apply("a", batch(1, stored("zzzz", behind=BLOCKS)))
    [missing] = router.overdue(9.5)
    assert state(router) == "guessed" and "do not tell of the blocks" in missing.reason


def test_live_events_that_never_come_end_it_although_replays_fill_the_gaps():
    router, now, known = told(), 0.0, [batch(0, stored(BLOCKS))]
    for number in range(3):
        now += 10
        text = f"{number:>4}" * 10
        serve(router, text, reported=None, now=now)
        assert router.overdue(now + 1) == []
        [missing] = router.overdue(now + 6)
        if not missing.begins:
            known.append(batch(number + 1, stored(text)))
            router.replayed("a", known[missing.replay_from :])
    assert state(router) == "guessed"
    assert "no event came within 5 s of 3 requests" in missing.reason


def test_a_guessed_worker_is_asked_again_at_growing_intervals_and_the_reason_is_told_once():
    router = told()
    for number in range(4):
        serve(router, BLOCKS + f"{number:>4}", reported=0)
    asked = [(now, each) for now in range(0, 400, 2) for each in router.overdue(now)]
    assert [now for now, _ in asked] == [0, 30, 90, 210]
    assert all(each.begins for _, each in asked)
    assert [bool(each.reason) for _, each in asked] == [True, False, False, False]


def test_a_worker_that_began_as_guessed_is_asked_for_its_replay():
    router = fleet("a")
    assert router.overdue(0) == [], "it was never said to have events"
    router.add_worker("a", sends_events=True)
    [missing] = router.overdue(0)
    assert missing.begins and not missing.reason
    assert router.begin("a", [batch(0, stored("ABCD")), batch(1, stored("WXYZ"))]) is None
    assert picture(router, "WXYZ?") == "a:exact 4" and router.overdue(1000) == []


def test_events_on_trial_are_used_and_believed_once_four_checks_agree_and_one_is_live():
    router = told()
    for number in range(4):
        serve(router, BLOCKS + f"{number:>4}", reported=0)
    assert router.begin("a", [batch(0, stored(BLOCKS))]) is None
    assert picture(router, BLOCKS + "?") == "a:guessed 80"
    for number in range(4):
        assert "on trial" in router.workers()[0].reason
        serve(router, BLOCKS + f"{number:>4}", reported=80)
    router.apply("a", batch(1, stored("WXYZ")))
    serve(router, BLOCKS + "once", reported=80)
    assert state(router) == "exact" and not router.workers()[0].reason
    router.check()

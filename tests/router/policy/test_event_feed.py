"""What a worker's events say it has, and how far the router believes them."""

import pytest

from ostinato.router import Router
from tests.router.fleets import batch, cleared, fleet, picture, prompt, removed, stored

ABC = stored("ABCDEFGHIJKL")
"""Three blocks: ABCD, EFGH, IJKL."""


@pytest.fixture
def router() -> Router:
    """Return a router with one worker, a."""
    return fleet("a")


def test_events_from_the_first_batch_on_are_exact():
    router = fleet("ab")
    assert picture(router, "ABCDEFGHXXXX") == "a:guessed 0 b:guessed 0"
    assert router.apply("a", batch(0, ABC)) is None
    assert picture(router, "ABCDEFGHXXXX") == "a:exact 8 b:guessed 0"
    router.check()


def test_the_last_token_of_a_prompt_is_always_computed(router):
    router.apply("a", batch(0, ABC))
    assert router.look_up(prompt("ABCDEFGH"), 0)[0].cached_tokens == 7


def test_a_prefix_ends_at_the_first_block_that_was_removed(router):
    """EFGH is gone: what stands behind it cannot be used, and ABCD can."""
    router.apply("a", batch(0, ABC))
    router.apply("a", batch(1, removed("ABCDEFGH")))
    assert picture(router, "ABCDEFGHIJKLM") == "a:exact 4"
    router.apply("a", batch(2, stored("EFGH", behind="ABCD")))
    assert picture(router, "ABCDEFGHIJKLM") == "a:exact 12"
    router.check()


def test_a_gap_degrades_until_its_replay_fills_it(router):
    """Batch 1 is missing: 2 waits. The replay begins one early, to notice a restart."""
    router.apply("a", batch(0, stored("ABCD")))
    resync = router.apply("a", batch(2, stored("IJKL", behind="ABCDEFGH")))
    assert (resync.replay_from, resync.snapshot) == (0, False)
    assert picture(router, "ABCDEFGHIJKLM") == "a:degraded 4"
    assert "batches from 1 on are missing" in router.workers()[0].reason

    replay = [batch(0, stored("ABCD")), batch(1, stored("EFGH", behind="ABCD"))]
    assert router.replayed("a", replay) is None
    assert picture(router, "ABCDEFGHIJKLM") == "a:exact 12"
    router.check()


def test_a_gap_that_no_replay_fills_asks_for_a_snapshot(router):
    resync = router.apply("a", batch(7, stored("IJKL", behind="ABCDEFGH")))
    assert not resync.snapshot
    assert router.replayed("a", [batch(6)]).snapshot
    snapshot = batch(7, stored("ABCDEFGH"))
    assert router.restore("a", 7, snapshot) is None
    assert picture(router, "ABCDEFGHIJKLM") == "a:exact 12"
    assert router.replayed("a", [batch(6, time_s=6.5)]) is None, "not the snapshot's batch"
    assert picture(router, "ABCDEFGHIJKLM") == "a:exact 12"


def test_without_replay_and_snapshot_the_worker_is_learned_anew(router):
    """What was stored before stays unknown until all is cleared: that is no lie, and not exact."""
    router.apply("a", batch(0, ABC))
    router.apply("a", batch(5, stored("WXYZ")))
    router.forget("a")
    assert picture(router, "ABCDX") == "a:degraded 0"
    assert picture(router, "WXYZX") == "a:degraded 4"
    assert router.workers()[0].lost_batches == 4
    assert router.apply("a", batch(6, stored("MNOP", behind="ABCDEFGHIJKL"))) is None
    router.apply("a", batch(7, cleared(), stored("ABCD")))
    assert picture(router, "ABCDX") == "a:exact 4"
    router.check()


def test_a_duplicate_changes_nothing(router):
    first = batch(0, ABC)
    router.apply("a", first)
    router.apply("a", batch(1, removed("ABCDEFGHIJKL")))
    assert router.apply("a", first) is None
    assert picture(router, "ABCDEFGHIJKLM") == "a:exact 8"


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_worker_that_restarts_has_nothing_of_what_it_had(router, sequence):
    """Its numbers begin anew; those it took before had other times."""
    for number in range(3):
        router.apply("a", batch(number, ABC))
    again = batch(sequence, stored("WXYZ"), time_s=10.0)
    resync = router.apply("a", again)
    assert picture(router, "ABCDX").endswith(" 0")
    if sequence:
        assert resync.replay_from == 0
        router.replayed("a", [batch(0, time_s=9.0), again])
    assert picture(router, "WXYZX") == "a:exact 4"


def test_a_restart_hidden_in_a_gap_shows_in_the_replay(router):
    """Ten batches later, no one saw the numbers fall: the batch before the gap is another one."""
    router.apply("a", batch(0, ABC))
    assert router.apply("a", batch(9, time_s=99.0)).replay_from == 0
    resync = router.replayed("a", [batch(0, time_s=50.0), batch(1, time_s=51.0)])
    assert resync.replay_from == 0
    assert picture(router, "ABCDX") == "a:degraded 0"
    assert "restarted" in router.workers()[0].reason


def test_a_block_behind_one_that_is_not_known_shows_that_events_were_missed(router):
    router.apply("a", batch(0, stored("ABCD")))
    resync = router.apply("a", batch(1, stored("IJKL", behind="ABCDEFGH")))
    assert resync.replay_from == 0
    assert picture(router, "ABCDX") == "a:degraded 0"
    replay = [batch(0, stored("ABCDEFGH")), batch(1, stored("IJKL", behind="ABCDEFGH"))]
    assert router.replayed("a", replay) is None
    assert picture(router, "ABCDEFGHIJKLX") == "a:exact 12"


def test_a_block_that_even_a_replay_does_not_explain_leaves_the_worker_degraded(router):
    orphan = batch(0, stored("EFGH", behind="ABCD"))
    assert router.apply("a", orphan).replay_from == 0
    assert router.replayed("a", [orphan]) is None
    assert picture(router, "ABCDX") == "a:degraded 0"


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (stored("ABCD").__class__((b"x", b"y"), None, (1, 2, 3), 4), "2 blocks of 4 tokens"),
        (stored("ABCD").__class__((b"x",), None, (1, 2, 3), 3), "blocks of 4 tokens became"),
        (stored("ABCD").__class__((b"ABCD",), None, (1, 2, 3, 4), 4), "two contents"),
        (stored("WXYZ", extras=(b"", b"")), "1 blocks came with 2 extra keys"),
    ],
)
def test_events_that_contradict_themselves_are_not_believed_until_a_restart(router, lie, reason):
    """The worker becomes a guessed one, and what it said before is forgotten with it."""
    router.apply("a", batch(0, ABC))
    assert router.apply("a", batch(1, lie)) is None
    assert picture(router, "ABCDX") == "a:guessed 0"
    assert reason in router.workers()[0].reason
    router.apply("a", batch(2, stored("WXYZ")))
    assert picture(router, "WXYZX") == "a:guessed 0"
    router.apply("a", batch(0, stored("WXYZ"), time_s=9.0))
    assert picture(router, "WXYZX") == "a:exact 4"
    router.check()


def test_a_worker_that_owes_events_and_sends_none_is_noticed():
    router = fleet("a", silent_s=5)
    router.apply("a", batch(0, stored("ABCD")))
    router.finished(router.route(prompt("WXYZWXYZ"), 1), 2)
    assert router.overdue(6) == []
    assert router.overdue(8)[0].replay_from == 0
    assert picture(router, "ABCDX") == "a:degraded 4"
    router.replayed("a", [batch(0, stored("ABCD"))])
    assert picture(router, "ABCDX") == "a:exact 4"


def test_a_full_hit_owes_no_events():
    router = fleet("a", silent_s=5)
    router.apply("a", batch(0, ABC))
    router.finished(router.route(prompt("ABCDEFGHIJK"), 1), 2)
    assert router.overdue(60) == []


def test_slower_tiers_count_and_cost_a_part_of_computing(router):
    """Offloaded without its tokens, then removed from the device: it is still there."""
    router.apply("a", batch(0, stored("ABCDEFGH", medium="GPU")))
    offloaded = stored("ABCD").__class__((b"ABCD", b"ABCDEFGH"), None, (), 0, medium="CPU")
    router.apply("a", batch(1, offloaded))
    router.apply("a", batch(2, removed("ABCD", "ABCDEFGH")))
    only = router.look_up(prompt("ABCDEFGHI"), 0)[0]
    assert (only.cached_tokens, only.tokens_to_compute) == (8, 1 + 2)
    router.check()


def test_an_engine_on_a_processor_computes_from_its_memory(router):
    """Its only medium is named CPU, and costs no loading."""
    router.apply("a", batch(0, stored("ABCDEFGH", medium="CPU")))
    assert router.look_up(prompt("ABCDEFGHI"), 0)[0].tokens_to_compute == 1


def test_tenants_and_adapters_share_nothing(router):
    router.apply("a", batch(0, stored("ABCD", adapter="law")))
    found = {
        adapter: router.look_up(prompt("ABCDX", adapter=adapter, salt=salt), 0)[0].cached_tokens
        for adapter, salt in (("law", ""), ("", ""))
    }
    assert found == {"law": 4, "": 0}
    assert router.look_up(prompt("ABCDX", adapter="law", salt="acme"), 0)[0].cached_tokens == 0


def test_windows_of_a_hybrid_model_are_left_out(router):
    window = stored("WXYZ", group=1, is_window=True)
    router.apply("a", batch(0, stored("ABCD"), window))
    assert picture(router, "WXYZX") == "a:exact 0"
    assert picture(router, "ABCDX") == "a:exact 4"

"""Who is next: priority, then arrival or the longest cached prefix."""

import pytest

from ostinato.cache.manager import CacheManager
from ostinato.core.request import FinishReason
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import FirstComeFirstServed, RequestTable
from ostinato.scheduling.ranked_orders import MAX_RANKED, LongestPrefixFirst
from tests.support.cache.tiny_cache import tiny_cache
from tests.support.cache.tiny_scheduler import (
    TinyScheduler,
    make_request,
    make_sequence,
    tiny_scheduler,
)

# --- first come, first served ---------------------------------------------------------------


def test_first_come_is_first_served():
    tiny = tiny_scheduler(max_num_seqs=1)
    for name in ("one", "two", "three"):
        tiny.add(name, name[0].upper())
    assert tiny.run() == ["one:O", "two:T", "three:T"]


def test_who_does_not_fit_is_not_overtaken():
    """There is room for the small one, but the big one came first."""
    tiny = tiny_scheduler(num_blocks=4)
    tiny.add("running", "ABCDEFGH", max_tokens=2)
    tiny.add("big", "123456789")
    tiny.add("small", "x")
    assert tiny.step() == "running:ABCDEFGH"
    assert tiny.state == "running | big small"
    assert tiny.step() == "running:a"
    assert tiny.step() == "big:123456789 small:x"


def test_lower_priority_numbers_go_first():
    """As in nice(1); among equals it is first come, first served."""
    tiny = tiny_scheduler(max_num_seqs=1)
    tiny.add("late", "A", priority=7)
    tiny.add("normal", "B")
    tiny.add("urgent", "C", priority=-1)
    tiny.add("normal too", "D")
    assert tiny.run() == ["urgent:C", "normal:B", "normal too:D", "late:A"]


def test_priority_takes_no_seat_away():
    """Who runs goes on; only a shortage of blocks makes it pay."""
    tiny = tiny_scheduler(max_num_seqs=1)
    tiny.add("late", "A", priority=7, max_tokens=3)
    tiny.step()
    tiny.add("urgent", "B", priority=0)
    assert tiny.run() == ["late:a", "late:b", "urgent:B"]


# --- longest prefix first -------------------------------------------------------------------


def warm(*prompts: str, **settings) -> TinyScheduler:
    """Return a scheduler with one seat that prefers cached prefixes, some of which it has."""
    tiny = tiny_scheduler(max_num_seqs=1, order="longest_prefix", **settings)
    for prompt in prompts:
        tiny.add(f"served {prompt}", prompt)
    tiny.run()
    return tiny


def test_the_longest_cached_prefix_goes_first():
    """In tokens, copied ones included; nothing cached goes last."""
    tiny = warm("ABCDEFGH")
    tiny.add("none", "xyz")
    tiny.add("one block", "ABCDxyz")
    tiny.add("six tokens", "ABCDEFxyz")
    tiny.add("two blocks", "ABCDEFGHxyz")
    order = [step.split(":")[0] for step in tiny.run()]
    assert order == ["two blocks", "six tokens", "one block", "none"]


def test_equal_prefixes_go_by_arrival():
    tiny = warm("ABCD")
    tiny.add("one", "ABCDx")
    tiny.add("two", "ABCDy")
    tiny.add("three", "ABCDz")
    assert tiny.run() == ["one:....x", "two:....y", "three:....z"]


def test_priority_goes_before_the_longest_prefix():
    tiny = warm("ABCD")
    tiny.add("cached", "ABCDx", priority=1)
    tiny.add("urgent", "xyz", priority=0)
    assert tiny.run() == ["urgent:xyz", "cached:....x"]


def test_who_does_not_read_the_cache_has_no_prefix_in_it():
    tiny = warm("ABCD")
    tiny.add("blind", "ABCDx", cache_read=False)
    tiny.add("reader", "ABCDy")
    assert tiny.run() == ["reader:....y", "blind:ABCDx"]


def test_the_prefix_is_looked_up_anew_in_every_step():
    """What the first one computes makes the third one the next."""
    tiny = warm()
    tiny.add("first", "ABCDEFGH")
    tiny.add("second", "xyz")
    tiny.add("third", "ABCDEFGHxyz")
    assert tiny.run() == ["first:ABCDEFGH", "third:........xyz", "second:xyz"]


def test_an_overdue_request_that_does_not_fit_is_overtaken_no_more():
    """It needs three of the four blocks, and one is in use."""
    tiny = tiny_scheduler(num_blocks=4, order="longest_prefix", max_overtakes=1)
    tiny.add("running", "ABCDE", max_tokens=4)
    tiny.step()
    tiny.add("big", "123456789")
    tiny.add("one", "ABCDx")
    tiny.add("two", "ABCDy")
    assert tiny.step() == "running:a one:....x"
    assert tiny.step() == "running:b"
    assert tiny.step() == "running:c"
    assert tiny.step() == "big:123456789"


def test_longest_prefix_first_looks_at_the_first_that_came_only():
    """Each look-up costs; the end of a long queue is seen when it has moved up."""
    tiny = warm("ABCD")
    for number in range(MAX_RANKED):
        tiny.scheduler.add(make_request(f"{number}", "xyz"), (0,))
    tiny.scheduler.add(make_request("too far back", "ABCDx"), (0,))
    plan = tiny.scheduler.plan()
    assert [list(map(chr, s.tokens)) for s in plan.sequences] == [["x", "y", "z"]]


# --- the table of live sequences ------------------------------------------------------------


def admit(requests: RequestTable, cache: CacheManager, sequence: Sequence) -> None:
    """Give a waiting sequence blocks."""
    admitted = cache.admit(sequence.key, cache.match(sequence.key))
    assert admitted is not None
    requests.admit(sequence, admitted[0])


def test_a_sequence_that_comes_back_has_its_old_place():
    """Whatever came in between; the waiting stand by priority and number."""
    cache = tiny_cache(num_blocks=4).manager
    requests = RequestTable(cache, FirstComeFirstServed())
    one, two, three, urgent = (
        make_sequence(n, priority=p) for n, p in ((1, 0), (2, 0), (3, 0), (9, -1))
    )
    for sequence in (three, one, urgent, two):
        requests.enter(sequence)
    assert requests.waiting == [urgent, one, two, three]
    admit(requests, cache, one)
    assert (requests.waiting, requests.running) == ([urgent, two, three], [one])
    requests.preempt(one)
    assert (requests.waiting, requests.running) == ([urgent, one, two, three], [])


def test_a_sequence_that_ends_unadmitted_has_overtaken_none():
    cache = tiny_cache(num_blocks=4).manager
    order = LongestPrefixFirst(64, lambda sequence: 0)
    requests = RequestTable(cache, order)
    early, late, later = (make_sequence(number) for number in (1, 2, 3))
    for sequence in (early, late, later):
        requests.enter(sequence)
    requests.finish(late, FinishReason.ABORT)
    assert early.num_overtakes == 0
    admit(requests, cache, later)
    assert early.num_overtakes == 1


def test_to_admit_a_sequence_that_does_not_wait_is_a_mistake():
    cache = tiny_cache(num_blocks=4).manager
    requests = RequestTable(cache, FirstComeFirstServed())
    requests.enter(make_sequence(1))
    with pytest.raises(AssertionError, match="does not wait"):
        admit(requests, cache, make_sequence(1))

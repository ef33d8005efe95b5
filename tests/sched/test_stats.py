"""What the scheduler and the cache count, and that it is the truth."""

from ostinato.sched.waiting_queue import SchedulerStats
from tests.support.cache.tiny_scheduler import tiny_scheduler


def test_computed_tokens_are_split_into_prompt_and_answer():
    """Positions 0..5 of a prompt of 3, 3..5 of it, and 1..2 of it."""
    stats = SchedulerStats()
    stats.count_computed(0, 5, num_prompt_tokens=3)
    assert (stats.computed_prompt_tokens, stats.computed_output_tokens) == (3, 2)
    stats.count_computed(3, 5, num_prompt_tokens=3)
    assert (stats.computed_prompt_tokens, stats.computed_output_tokens) == (3, 4)
    stats.count_computed(1, 2, num_prompt_tokens=3)
    assert (stats.computed_prompt_tokens, stats.computed_output_tokens) == (4, 4)


def test_tokens_that_hit_are_not_computed(tiny):
    """Eight of ten hit, six in whole blocks and copied; the answer's last is never computed."""
    tiny.serve("one", "ABCDEFGHIJ", max_tokens=3)
    stats = tiny.scheduler.stats
    assert (stats.computed_prompt_tokens, stats.computed_output_tokens) == (10, 2)
    tiny.serve("two", "ABCDEFGHxy", max_tokens=3)
    assert (stats.computed_prompt_tokens, stats.computed_output_tokens) == (12, 4)
    assert stats.num_steps == 6


def test_queries_and_hits_are_counted_once_per_request_and_returns_apart(tiny):
    """A busy engine cannot make its hit ratio look better than it is."""
    tiny.add("one", "ABCDEF", max_tokens=3)
    tiny.add("two", "ABCDEx", max_tokens=3)
    tiny.step()
    tiny.preempt_all()
    tiny.run()
    first, again = tiny.cache.stats.first, tiny.cache.stats.preempted
    assert (first.num_requests, first.query_tokens, first.hit_tokens) == (2, 12, 4)
    assert (again.num_requests, again.query_tokens, again.hit_tokens) == (2, 14, 12)
    assert tiny.scheduler.stats.num_preemptions == 2


def test_a_sibling_that_waited_is_no_new_request(index):
    """Its prompt was looked up when the request came, and it was never preempted."""
    tiny = tiny_scheduler(index=index, max_num_seqs=1)
    tiny.serve("one", "ABCDE", n=3, max_tokens=2)
    assert tiny.cache.stats.first.num_requests == 1
    assert tiny.cache.stats.preempted.num_requests == 0
    assert tiny.scheduler.stats.num_preemptions == 0
    assert tiny.sequences["one/2"].num_preemptions == 0


def test_what_a_request_found_is_told_by_the_token(tiny):
    """Four tokens in a whole block, two copied; its sibling says the same."""
    tiny.serve("before", "ABCDEFGH")
    tiny.serve("one", "ABCDEFx", n=2, max_tokens=2)
    assert tiny.hits("before") == (0, 0)
    assert tiny.hits("one") == tiny.hits("one/1") == (4, 2)


def test_tokens_that_another_computed_meanwhile_are_told_from_those_that_were_there(tiny):
    """The second came with the first and found ABCDEFGH in its step; the third came later."""
    tiny.add("first", "ABCDEFGHvw", max_tokens=2)
    tiny.add("second", "ABCDEFGHxy", max_tokens=2)
    tiny.run()
    assert tiny.scheduler.stats.waited_prompt_tokens == 8
    tiny.serve("third", "ABCDEFGHz", max_tokens=2)
    assert tiny.scheduler.stats.waited_prompt_tokens == 8
    assert tiny.cache.stats.first.shared_tokens == 16


def test_a_follower_that_waited_for_chunks_counts_all_that_they_brought(index):
    """ABCD was there; EFGH and IJKL were computed by the leader while the follower waited."""
    tiny = tiny_scheduler(index=index, budget=16, max_chunk_tokens=4)
    tiny.serve("early", "ABCD", max_tokens=1)
    tiny.add("leader", "ABCDEFGHIJKLMNOP", max_tokens=1)
    tiny.add("follower", "ABCDEFGHIJKLxy", max_tokens=1)
    tiny.run()
    assert tiny.scheduler.stats.waited_prompt_tokens == 8

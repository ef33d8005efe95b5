"""Requests that do not get to their end, without an effect on others (laws 5 and 9)."""

import pytest

from tests.support.cache.tiny_scheduler import tiny_scheduler

# --- cancel ---------------------------------------------------------------------------------


def test_a_request_can_be_cancelled_while_it_waits(index):
    tiny = tiny_scheduler(max_num_seqs=1, index=index)
    tiny.add("one", "ABC", max_tokens=2)
    tiny.add("two", "DEF")
    tiny.step()
    assert tiny.cancel("two") == ["two"]
    assert tiny.run() == ["one:a"]
    assert tiny.reasons == {"two": "abort", "one": "length"}


def test_cancelling_in_the_middle_of_a_prompt_leaves_what_was_computed(index):
    """To the token: the partial block is sealed."""
    tiny = tiny_scheduler(budget=6, index=index)
    tiny.add("one", "ABCDEFGHIJ")
    tiny.step()
    tiny.cancel("one")
    tiny.checks.nothing_runs()
    tiny.add("two", "ABCDEFGHIJ")
    assert tiny.step() == "two:....,,GHIJ"


def test_the_seat_and_the_blocks_of_a_cancelled_request_are_free_at_once(index):
    tiny = tiny_scheduler(num_blocks=2, max_num_seqs=1, index=index)
    tiny.add("one", "ABCDEFGH", max_tokens=9)
    tiny.step()
    tiny.add("two", "QRSTUVWX")
    tiny.cancel("one")
    assert tiny.step() == "two:QRSTUVWX"


# --- a step that raises -----------------------------------------------------------------------


def test_a_failing_step_ends_its_requests_and_no_other(index):
    """The third had no seat, so it took no part."""
    tiny = tiny_scheduler(max_num_seqs=2, index=index)
    for name in ("one", "two", "three"):
        tiny.add(name, name.upper(), max_tokens=2)
    assert tiny.failing_step() == "one:ONE two:TWO"
    assert tiny.reasons == {"one": "error", "two": "error"}
    assert tiny.run() == ["three:THREE", "three:a"]


def test_nothing_of_a_failed_step_can_be_found(index):
    """Its slots hold anything; what was computed before it is as good as ever."""
    tiny = tiny_scheduler(budget=8, index=index)
    tiny.add("one", "ABCDEFGHIJKLMNOP")
    tiny.step()
    tiny.failing_step()
    tiny.add("two", "ABCDEFGHIJKLMNOP")
    assert tiny.step() == "two:........IJKLMNOP"


def test_a_prefill_that_got_nothing_of_a_failed_step_goes_on(index):
    """It held blocks all the time, and what it has computed is as good as before."""
    tiny = tiny_scheduler(budget=5, max_chunk_tokens=2, index=index)
    tiny.add("one", "ABCDEF")
    tiny.add("two", "GHIJKL")
    tiny.add("many", "Q", n=3, max_tokens=3)
    assert tiny.step() == "one:AB two:GH many:Q"
    assert tiny.failing_step() == "many:a many/1:k many/2:u one:CD"
    assert tiny.run() == ["two:IJ", "two:KL"]


@pytest.mark.parametrize("step", range(4))
def test_after_a_failure_the_same_request_can_be_sent_again(index, step):
    """In whichever step it fails, the answer is right the second time."""
    tiny = tiny_scheduler(budget=4, index=index)
    tiny.add("first", "ABCDEF", n=2, max_tokens=3)
    for _ in range(step):
        tiny.step()
    tiny.failing_step()
    tiny.cancel("first")
    tiny.serve("again", "ABCDEF", n=2, max_tokens=3)
    assert (tiny.outputs["again"], tiny.outputs["again/1"]) == ("abc", "klm")


def test_failed_steps_are_counted_as_steps_that_computed_nothing(tiny):
    """Their tokens went through the model, if at all, for nothing."""
    tiny.add("one", "ABC")
    tiny.failing_step()
    stats = tiny.scheduler.stats
    assert (stats.num_steps, stats.num_failed_steps) == (1, 1)
    assert stats.computed_prompt_tokens == 0


# --- a row that raises nothing, and brings nothing ------------------------------------------------


def test_a_row_from_which_nothing_can_be_sampled_ends_its_own_sequence_alone(tiny):
    """Its logits were no numbers; the others of the batch have got their tokens."""
    tiny.add("one", "ABC", max_tokens=3)
    tiny.add("two", "DEF", max_tokens=3)
    tiny.step()
    tiny.fail_to_sample("one")
    assert tiny.step() == "one:a two:a"
    assert tiny.reasons == {"one": "error"}
    tiny.run()
    assert tiny.outputs == {"one": "a", "two": "abc"}


def test_a_prompt_from_which_nothing_can_be_sampled_ends_all_its_continuations(index):
    """One runs, one waits for a seat, and neither has a first token."""
    tiny = tiny_scheduler(index=index, max_num_seqs=2)
    tiny.add("one", "ABC", n=3, max_tokens=3)
    tiny.fail_to_sample("one")
    tiny.step()
    assert tiny.reasons == {"one": "error", "one/1": "error", "one/2": "error"}
    tiny.checks.nothing_runs()

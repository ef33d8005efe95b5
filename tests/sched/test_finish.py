"""When an answer has gone far enough."""

import pytest

from tests.support.cache.tiny_scheduler import tiny_scheduler


def test_an_answer_ends_with_the_end_of_sequence_which_is_part_of_it():
    """No stop reason: the model itself had nothing more to say."""
    tiny = tiny_scheduler()
    tiny.serve("one", "ABC", max_tokens=9, eos="c")
    assert (tiny.outputs, tiny.reasons) == ({"one": "abc"}, {"one": "stop"})
    assert tiny.sequences["one"].stop_reason is None


def test_an_answer_ends_with_a_stop_id_which_is_named():
    tiny = tiny_scheduler()
    tiny.serve("one", "ABC", max_tokens=9, stop="bc")
    assert (tiny.outputs, tiny.reasons) == ({"one": "ab"}, {"one": "stop"})
    assert tiny.sequences["one"].stop_reason == ord("b")


def test_an_id_that_stops_and_ends_the_sequence_is_named():
    tiny = tiny_scheduler()
    tiny.serve("one", "ABC", max_tokens=9, eos="b", stop="b")
    assert tiny.sequences["one"].stop_reason == ord("b")


def test_to_stop_is_a_better_reason_than_length():
    """The last token that was allowed happens to be the end of sequence."""
    tiny = tiny_scheduler()
    tiny.serve("one", "ABC", max_tokens=3, eos="c")
    assert tiny.reasons == {"one": "stop"}


def test_below_min_tokens_the_sampler_is_told_what_may_not_come():
    """Ends of sequence are banned for the first two tokens; stop ids it knows by ``min_tokens``."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABC", max_tokens=4, min_tokens=2, eos="x", stop="yz")
    banned = []
    while tiny.scheduler.has_work:
        tiny.step()
        banned.append("".join(map(chr, tiny.plan.sequences[0].sample.banned)))
    assert banned == ["x", "x", "", ""]


@pytest.mark.parametrize("num_blocks, answer", [(1, "ab"), (2, "abcdef")])
def test_an_answer_ends_where_the_pool_does(num_blocks, answer):
    """Its last token needs no slot, since it is never read."""
    tiny = tiny_scheduler(num_blocks=num_blocks)
    tiny.serve("one", "ABC", max_tokens=None)
    assert (tiny.outputs, tiny.reasons) == ({"one": answer}, {"one": "length"})


def test_a_stop_string_ends_an_answer_between_steps():
    """The detokenizer says so; its computed blocks stay findable."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABCD", max_tokens=9)
    tiny.step()
    tiny.step()
    tiny.stop("one", "b")
    assert (tiny.outputs, tiny.reasons) == ({"one": "ab"}, {"one": "stop"})
    assert tiny.sequences["one"].stop_reason == "b"
    tiny.add("two", "ABCDabx")
    assert tiny.step() == "two:....,bx"


def test_a_stop_string_may_end_an_answer_that_waits():
    """It was preempted in the same step that brought its last token."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABCD", max_tokens=9)
    tiny.step()
    tiny.preempt_all()
    tiny.stop("one", "a")
    assert tiny.state == "|"
    tiny.checks.nothing_runs()


def test_the_next_turn_of_a_chat_finds_prompt_and_answer():
    """All that was computed, to the token: the last of the answer was not (law 1)."""
    tiny = tiny_scheduler()
    tiny.serve("turn 1", "ABCDEF", max_tokens=5)
    tiny.add("turn 2", "ABCDEFabcdeGHI")
    assert tiny.step() == "turn 2:........,,eGHI"

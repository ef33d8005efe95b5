"""Layers with a sliding window have a pool of their own, which may run out on its own.

Blocks of four, a window of five: a sequence needs the block that its next token goes to, and
the one before it. The pool of group 0 is large in all of these.
"""

from ostinato.settings import StateConfig, WindowConfig
from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler


def windowed(index, window_blocks: int, **settings) -> TinyScheduler:
    """Return a scheduler over a window of five with so many blocks."""
    windows = (WindowConfig(window=5, num_blocks=window_blocks),)
    return tiny_scheduler(index=index, windows=windows, **settings)


def test_a_prompt_longer_than_the_windows_pool_is_computed_as_far_as_it_has_room(index):
    """Two blocks hold the first eight tokens; then ABCD has left the window."""
    tiny = windowed(index, window_blocks=2)
    tiny.add("one", "ABCDEFGHIJKL")
    assert tiny.run() == ["one:ABCDEFGH", "one:IJKL"]


def test_an_answer_goes_on_as_long_as_full_attention_has_room(index):
    """Sixteen blocks of it hold 64 tokens; the window's two slide along."""
    tiny = windowed(index, window_blocks=2)
    tiny.serve("one", "ABC", max_tokens=None)
    assert len(tiny.outputs["one"]) == 62


def test_who_is_short_of_window_blocks_preempts_the_last_in_rank(index):
    """Each has one of the two, and needs another for its fifth token."""
    tiny = windowed(index, window_blocks=2)
    tiny.add("one", "ABCD", max_tokens=4)
    tiny.add("two", "QRST", max_tokens=4)
    assert tiny.step() == "one:ABCD two:QRST"
    assert tiny.step() == "one:a"
    assert tiny.state == "one | two"
    tiny.run()
    assert tiny.outputs == {"one": "abcd", "two": "abcd"}


def test_the_tokens_of_a_victim_that_was_planned_go_to_others(index):
    """The decode goes first and takes one of six tokens, then pays for the prompt's second block.

    So its token is left for the other prompt, which gets two instead of one.
    """
    tiny = windowed(index, window_blocks=3, budget=6, max_chunk_tokens=4)
    tiny.add("decode", "Q", max_tokens=9, priority=1)
    assert tiny.step() == "decode:Q"
    tiny.add("one", "ABCDEFGHIJKL")
    tiny.add("two", "123456789")
    assert tiny.step() == "decode:a one:ABCD two:1"
    assert tiny.step() == "one:EFGH two:23"
    assert tiny.state == "one two | decode"


def test_what_a_window_has_lost_does_not_hit_and_what_comes_after_it_does(index):
    """Of twelve tokens the window has the last eight: enough for the next turn alone."""
    tiny = windowed(index, window_blocks=2)
    tiny.serve("first", "ABCDEFGHIJKL")
    tiny.add("next turn", "ABCDEFGHIJKLxy")
    assert tiny.step() == "next turn:............xy"
    tiny.add("another", "ABCDxy")
    assert tiny.step() == "another:ABCDxy"


def test_no_request_waits_for_what_left_the_leader_s_window(index):
    """The stranger took the window's block of ABCD: the leader will not compute it again."""
    tiny = windowed(index, window_blocks=4, budget=16, max_chunk_tokens=4)
    tiny.add("leader", "ABCDEFGHIJKLMNOPQRST")
    assert [tiny.step(), tiny.step()] == ["leader:ABCD", "leader:EFGH"]
    tiny.add("stranger", "12345", max_tokens=1)
    assert [tiny.step(), tiny.step()] == ["leader:IJKL stranger:1234", "stranger:5 leader:MNOP"]
    tiny.add("follower", "ABCDxy")
    assert tiny.step() == "leader:QRST follower:ABCD"


def test_a_window_with_room_for_less_than_a_chunk_of_states_computes_as_far_as_it_goes(index):
    """Chunks of a model with states end at multiples of 16, but here at 8."""
    tiny = windowed(index, window_blocks=2, states=StateConfig(4, 16, 0))
    tiny.add("one", "ABCDEFGHIJKLMNOPQRST")
    assert tiny.run() == ["one:ABCDEFGH", "one:IJKL", "one:MNOP", "one:QRST"]

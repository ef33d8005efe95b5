"""When blocks run out, the last in rank gives its own back, and comes back itself."""

from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler


def crowded(index, **settings) -> TinyScheduler:
    """Return a pool of four blocks, two of them for each of two requests of seven tokens.

    When both have eight tokens, each needs a third block for the ninth.
    """
    tiny = tiny_scheduler(num_blocks=4, index=index, **settings)
    tiny.add("one", "ABCDEFG", max_tokens=4)
    tiny.add("two", "QRSTUVW", max_tokens=4)
    assert tiny.step() == "one:ABCDEFG two:QRSTUVW"
    assert tiny.step() == "one:a two:a"
    return tiny


def test_the_last_in_rank_gives_its_blocks_back(index):
    """Who asked first for the block goes on in the same step."""
    tiny = crowded(index)
    assert tiny.step() == "one:b"
    assert tiny.state == "one | two"
    assert tiny.scheduler.stats.num_preemptions == 1


def test_a_preempted_sequence_finds_what_is_still_cached(index):
    """Of its eight computed tokens one block was taken; its answer goes on where it was."""
    tiny = crowded(index)
    assert tiny.step() == "one:b"
    assert tiny.step() == "one:c"
    assert tiny.step() == "two:....UVWab"
    assert tiny.run() == ["two:c"]
    assert tiny.outputs == {"one": "abcd", "two": "abcd"}


def test_a_preempted_sequence_computes_anew_what_was_evicted_meanwhile(index):
    """Its tail first, so that what is left can still be used (law 8)."""
    tiny = tiny_scheduler(num_blocks=4, index=index, max_num_seqs=1)
    tiny.add("late", "ABCDEFGHIJK", max_tokens=2, priority=1)
    tiny.step()
    tiny.preempt_all()
    tiny.add("urgent", "123456789")
    assert tiny.step() == "urgent:123456789"
    assert tiny.step() == "late:....EFGHIJKa"
    assert tiny.outputs == {"urgent": "a", "late": "ab"}


def test_with_prefix_caching_off_everything_is_computed_anew(index):
    tiny = crowded(index, enable_prefix_caching=False)
    assert tiny.run() == ["one:b", "one:c", "two:QRSTUVWab", "two:c"]
    assert tiny.outputs == {"one": "abcd", "two": "abcd"}


def test_who_is_preempted_keeps_its_place_before_later_arrivals(index):
    """The new one would fit in its stead, but came later."""
    tiny = crowded(index)
    tiny.add("new", "xyz")
    assert tiny.step() == "one:b"
    assert tiny.state == "one | two new"
    assert tiny.step() == "one:c"
    assert tiny.step() == "two:....UVWab new:xyz"


def test_no_request_is_admitted_in_a_step_that_preempts(index):
    """Who has just given way would be the first to come back, and be sent away again."""
    tiny = tiny_scheduler(num_blocks=4, index=index)
    tiny.add("one", "ABCDEFGH", max_tokens=6)
    tiny.add("two", "QRSTUVWX", max_tokens=6)
    tiny.step()
    tiny.add("three", "x")
    assert tiny.step() == "one:a"
    assert tiny.state == "one | two three"


def test_a_prefill_under_way_can_be_preempted(index):
    """What is computed of it is found again, to the token; the rest was never published."""
    tiny = tiny_scheduler(num_blocks=4, index=index, budget=7)
    tiny.add("one", "ABCD", max_tokens=2)
    tiny.add("two", "QRSTUVWXYZ", max_tokens=1)
    assert tiny.step() == "one:ABCD two:QRS"
    assert tiny.step() == "one:a"
    assert tiny.state == "| two"
    assert tiny.step() == "two:,,,TUVWXYZ"


def test_several_give_way_where_one_has_nothing_of_its_own(index):
    """The sibling shares both blocks of the second, so that to preempt it frees none."""
    tiny = tiny_scheduler(num_blocks=4, index=index)
    tiny.add("one", "ABCD", max_tokens=3)
    tiny.add("two", "QRSTUVWX", max_tokens=3, n=2)
    assert tiny.step() == "one:ABCD two:QRSTUVWX"
    assert tiny.state == "one two two/1 |"
    assert tiny.step() == "one:a"
    assert tiny.state == "one | two two/1"
    assert tiny.scheduler.stats.num_preemptions == 2


def test_what_hit_at_first_admission_is_kept_when_a_sequence_comes_back(index):
    """The caller is told what the request found, not what it found of itself."""
    tiny = tiny_scheduler(num_blocks=8, index=index)
    tiny.serve("before", "ABCD")
    tiny.add("one", "ABCDEFG", max_tokens=2)
    tiny.step()
    tiny.preempt_all()
    tiny.run()
    assert tiny.hits("one") == (4, 0)


# --- preempt all, and reset -----------------------------------------------------------------


def test_after_preempt_all_everybody_comes_back_in_order(tiny):
    """Blocks that are still there are found; the output is the same."""
    tiny.add("one", "ABCD", max_tokens=3)
    tiny.add("two", "QRST", max_tokens=3, n=2)
    tiny.step()
    tiny.preempt_all()
    assert tiny.state == "| one two two/1"
    assert tiny.step() == "one:....a two:....a two/1:....k"
    tiny.run()
    assert tiny.outputs == {"one": "abc", "two": "abc", "two/1": "klm"}


def test_after_a_reset_everything_is_computed_anew(tiny):
    """Nothing that was cached before may be found, also not by who was running."""
    tiny.add("one", "ABCDE", max_tokens=3)
    tiny.step()
    tiny.reset()
    tiny.add("two", "ABCDx")
    assert tiny.step() == "one:ABCDEa two:....x"
    tiny.run()
    assert tiny.outputs == {"one": "abc", "two": "a"}


def test_after_a_reset_in_the_middle_of_a_prompt_it_begins_again(index):
    tiny = tiny_scheduler(index=index, budget=6)
    tiny.add("one", "ABCDEFGHIJ")
    assert tiny.step() == "one:ABCDEF"
    tiny.reset()
    assert tiny.run() == ["one:ABCDEF", "one:GHIJ"]

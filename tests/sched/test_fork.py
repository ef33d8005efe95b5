"""Several continuations of one prompt (``n > 1``)."""

from tests.support.cache.tiny_scheduler import tiny_scheduler


def test_a_prompt_is_computed_once_for_all_its_continuations(tiny):
    """Each samples its first token from the same logits, with a seed of its own."""
    tiny.add("one", "ABCDEF", n=3, max_tokens=3)
    assert tiny.step() == "one:ABCDEF"
    assert tiny.outputs == {"one": "a", "one/1": "k", "one/2": "u"}
    assert tiny.step() == "one:a one/1:k one/2:u"
    tiny.run()
    assert tiny.outputs == {"one": "abc", "one/1": "klm", "one/2": "uvw"}
    assert tiny.scheduler.stats.computed_prompt_tokens == 6


def test_siblings_share_full_blocks_and_copy_the_last_one(tiny):
    """Two slots each, of the block that EF are in; in the step that computes them."""
    tiny.add("one", "ABCDEF", n=3, max_tokens=2)
    tiny.step()
    assert [run.num_tokens for run in tiny.plan.copies] == [2, 2]
    tables = [tiny.sequences[name].table for name in ("one", "one/1", "one/2")]
    assert len({table.blocks[0] for table in tables}) == 1
    assert len({table.blocks[1] for table in tables}) == 3


def test_siblings_of_a_prompt_of_whole_blocks_copy_nothing(tiny):
    tiny.add("one", "ABCDEFGH", n=2, max_tokens=2)
    tiny.step()
    assert tiny.plan.copies == ()
    assert tiny.run() == ["one:a one/1:k"]


def test_a_prompt_that_copies_and_forks_in_one_step_copies_from_the_source(tiny):
    """Its siblings cannot read slots that are copied in the same step."""
    tiny.serve("before", "ABCDEFGH")
    tiny.add("one", "ABCDEFx", n=2, max_tokens=2)
    assert tiny.step() == "one:....,,x"
    assert tiny.run() == ["one:a one/1:k"]


def test_a_sibling_without_room_waits_first_token_in_hand(index):
    """Two of the three blocks are the prompt's, and one sibling's copy takes the third."""
    tiny = tiny_scheduler(num_blocks=3, index=index)
    tiny.add("one", "ABCDEF", n=3, max_tokens=2)
    assert tiny.step() == "one:ABCDEF"
    assert tiny.outputs == {"one": "a", "one/1": "k", "one/2": "u"}
    assert tiny.state == "one one/1 | one/2"
    assert tiny.step() == "one:a one/1:k"
    assert tiny.run() == ["one/2:....,,u"]


def test_a_sibling_without_room_stands_before_later_arrivals(index):
    """Its number was reserved when its request came."""
    tiny = tiny_scheduler(max_num_seqs=1, index=index)
    tiny.add("one", "AB", n=2, max_tokens=2)
    tiny.add("two", "QR")
    assert tiny.run() == ["one:AB", "one:a", "one/1:,,k", "two:QR"]


def test_siblings_take_the_free_seats_before_later_arrivals(index):
    """They came with the first request, and have blocks to share; the others have to wait."""
    tiny = tiny_scheduler(max_num_seqs=3, index=index)
    tiny.add("one", "AB", n=3, max_tokens=2)
    tiny.add("two", "QR")
    assert tiny.step() == "one:AB"
    assert tiny.state == "one one/1 one/2 | two"


def test_siblings_of_a_chunked_prompt_take_the_free_seats_as_well(index):
    tiny = tiny_scheduler(max_num_seqs=2, budget=6, max_chunk_tokens=3, index=index)
    tiny.add("one", "ABCD", n=2, max_tokens=2)
    tiny.step()
    tiny.add("two", "QR")
    assert tiny.step() == "one:D"
    assert tiny.state == "one one/1 | two"


def test_siblings_take_the_free_blocks_before_later_arrivals(index):
    """The prompt has two blocks, its sibling's copy takes the third."""
    tiny = tiny_scheduler(num_blocks=3, index=index)
    tiny.add("one", "ABCDEF", n=2, max_tokens=2)
    tiny.add("two", "QR")
    assert tiny.step() == "one:ABCDEF"
    assert tiny.state == "one one/1 | two"


def test_a_sibling_that_does_not_fit_is_not_overtaken(index):
    """It would need copies of both blocks; the small one, which needs the one left, came later."""
    tiny = tiny_scheduler(num_blocks=3, index=index)
    tiny.add("one", "ABCDEF", n=2, max_tokens=2, cache_write=False)
    tiny.add("two", "x")
    assert tiny.step() == "one:ABCDEF"
    assert tiny.state == "one | one/1 two"


def test_continuations_of_one_token_need_no_room(index):
    """A pool of one block, one seat, four answers in one step."""
    tiny = tiny_scheduler(num_blocks=1, max_num_seqs=1, index=index)
    tiny.add("one", "ABC", n=4, max_tokens=1, seeds=(0, 1, 2, 0))
    assert tiny.step() == "one:ABC"
    assert tiny.plan.copies == ()
    assert tiny.outputs == {"one": "a", "one/1": "k", "one/2": "u", "one/3": "a"}
    tiny.checks.nothing_runs()


def test_continuations_of_one_token_are_not_forked_at_all(tiny):
    """There would be room; but why copy what is never read?"""
    tiny.add("one", "ABC", n=4, max_tokens=1, seeds=(0, 1, 2, 0))
    tiny.step()
    assert tiny.plan.copies == ()


def test_continuations_that_fill_the_pool_end_with_their_first_token(index):
    """The sibling finds no room, and needs none: nothing longer would ever fit."""
    tiny = tiny_scheduler(num_blocks=1, index=index)
    tiny.add("one", "ABCD", n=2, max_tokens=9)
    assert tiny.run() == ["one:ABCD"]
    assert tiny.outputs == {"one": "a", "one/1": "k"}
    assert set(tiny.reasons.values()) == {"length"}


def test_siblings_with_the_same_seed_share_what_they_generate(index):
    """Twins compute each token twice, but their full blocks become one on the radix index."""
    tiny = tiny_scheduler(index=index)
    tiny.add("one", "ABC", n=2, seeds=(0, 0), max_tokens=4)
    tiny.step()
    tiny.step()
    blocks = [tiny.sequences[name].table.blocks[0] for name in ("one", "one/1")]
    assert (blocks[0] == blocks[1]) == (index == "radix")
    tiny.run()
    assert tiny.outputs == {"one": "abcd", "one/1": "abcd"}


def test_a_request_that_does_not_write_the_cache_forks_as_well(tiny):
    """All its blocks are private, so all are copied."""
    tiny.add("one", "ABCDEF", n=2, max_tokens=2, cache_write=False)
    tiny.step()
    assert [run.num_tokens for run in tiny.plan.copies] == [4, 2]
    tiny.run()
    tiny.add("two", "ABCDEF")
    assert tiny.step() == "two:ABCDEF"


def test_who_is_preempted_before_its_prompt_is_complete_forks_when_it_is(index):
    tiny = tiny_scheduler(index=index, budget=4)
    tiny.add("one", "ABCDEF", n=2, max_tokens=2)
    tiny.step()
    tiny.preempt_all()
    assert tiny.step() == "one:....EF"
    assert tiny.state == "one one/1 |"
    tiny.run()
    assert tiny.outputs == {"one": "ab", "one/1": "kl"}


def test_preempted_siblings_compute_their_common_prompt_once(tiny):
    """After a reset each would have to compute all: one leads, the others follow."""
    tiny.add("one", "ABCDEFGH", n=3, max_tokens=3)
    tiny.step()
    tiny.reset()
    assert tiny.step() == "one:ABCDEFGHa one/1:........k one/2:........u"


# --- ends ---------------------------------------------------------------------------------------


def test_cancelling_a_request_ends_every_continuation(index):
    """Running ones, and one that waits for a seat."""
    tiny = tiny_scheduler(max_num_seqs=2, index=index)
    tiny.add("one", "ABC", n=3, max_tokens=9)
    tiny.add("two", "QRS", max_tokens=2)
    tiny.step()
    assert tiny.state == "one one/1 | one/2 two"
    assert tiny.cancel("one") == ["one", "one/1", "one/2"]
    assert tiny.run() == ["two:QRS", "two:a"]


def test_cancelling_before_the_fork_ends_the_request_as_one(tiny):
    tiny.add("one", "ABC", n=3)
    assert tiny.cancel("one") == ["one"]
    assert not tiny.scheduler.has_work


def test_stopping_one_continuation_leaves_its_siblings_alone(tiny):
    tiny.add("one", "ABC", n=3, max_tokens=3)
    tiny.step()
    tiny.stop("one/1", "a stop string")
    assert tiny.sequences["one/1"].stop_reason == "a stop string"
    tiny.run()
    assert tiny.outputs == {"one": "abc", "one/1": "k", "one/2": "uvw"}
    assert tiny.reasons == {"one/1": "stop", "one": "length", "one/2": "length"}


def test_a_failing_step_ends_the_siblings_that_it_was_to_fork(index):
    """Those with room and those without; nothing of the prompt can be found."""
    tiny = tiny_scheduler(num_blocks=3, index=index)
    tiny.add("one", "ABCDEF", n=3, max_tokens=2)
    assert tiny.failing_step() == "one:ABCDEF"
    assert tiny.reasons == {"one": "error", "one/1": "error", "one/2": "error"}
    tiny.checks.nothing_runs()
    tiny.add("two", "ABCDEF")
    assert tiny.step() == "two:ABCDEF"


def test_the_siblings_that_waited_outlive_a_failing_step_of_the_others(index):
    """It took no part in the step. The block that it would find was lost with the others."""
    tiny = tiny_scheduler(max_num_seqs=1, index=index)
    tiny.add("one", "ABC", n=2, max_tokens=3)
    tiny.step()
    assert tiny.failing_step() == "one:a"
    assert tiny.reasons == {"one": "error"}
    assert tiny.run() == ["one/1:ABCk", "one/1:l"]

"""Requests that share an uncomputed prefix never compute it twice (law 1).

The watch of ``tiny_scheduler`` compares every admission with all running sequences; here the steps
are drawn.
"""

import pytest

from ostinato.core.identity import ImageSpan
from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler


def chunked(index, **settings) -> TinyScheduler:
    """Return a scheduler that computes four tokens of a prompt in a step, and has room for more."""
    return tiny_scheduler(index=index, budget=16, max_chunk_tokens=4, **settings)


@pytest.fixture
def tiny(index) -> TinyScheduler:
    return chunked(index)


# --- in one step ------------------------------------------------------------------------------


def test_requests_that_arrive_together_share_the_step(index):
    """The blocks of the first can be found as soon as they are planned."""
    tiny = tiny_scheduler(index=index)
    tiny.add("first", "ABCDEFGHvw")
    tiny.add("second", "ABCDEFGHxy")
    assert tiny.step() == "first:ABCDEFGHvw second:........xy"


def test_the_middle_of_a_block_is_copied_in_the_step_that_computes_it(index):
    """EF are written for the first, copied for the second, and read by both, in one step."""
    tiny = tiny_scheduler(index=index)
    tiny.add("first", "ABCDEFGH")
    tiny.add("second", "ABCDEFxy")
    assert tiny.step() == "first:ABCDEFGH second:....,,xy"


def test_copies_of_copies_come_from_where_it_was_computed(index):
    """Each finds one letter more of the block in which the one before it went its own way."""
    tiny = tiny_scheduler(index=index)
    for prompt in ("ABCD", "AxCD", "AxyD", "Axyz"):
        tiny.add(prompt, prompt)
    assert tiny.step() == "ABCD:ABCD AxCD:,xCD AxyD:,,yD Axyz:,,,z"


def test_an_identical_prompt_computes_its_last_token_alone(index):
    """Law 4: one query at least is needed."""
    tiny = tiny_scheduler(index=index)
    tiny.add("first", "ABCDEFGH")
    tiny.add("second", "ABCDEFGH")
    assert tiny.step() == "first:ABCDEFGH second:....,,,H"


def test_a_last_block_that_is_not_full_is_not_shared_while_its_request_runs(index):
    """EF could only be found if ABCDEF had ended: it may still grow."""
    tiny = tiny_scheduler(index=index)
    tiny.add("first", "ABCDEF")
    tiny.add("second", "ABCDEF")
    assert tiny.step() == "first:ABCDEF second:....EF"
    tiny.add("third", "ABCDEF")
    assert tiny.step() == "third:....,F"


# --- across chunks ----------------------------------------------------------------------------


def test_without_a_limit_on_chunks_no_request_is_admitted_beside_a_prefill(index):
    """It takes the whole budget until its last chunk, whose step the follower shares."""
    tiny = tiny_scheduler(index=index, budget=6)
    tiny.add("leader", "ABCDEFGHvw")
    tiny.add("follower", "ABCDEFGHxy")
    assert tiny.step() == "leader:ABCDEF"
    assert tiny.step() == "leader:GHvw follower:........xy"


def test_a_follower_waits_until_their_prefix_is_computed(tiny):
    """There would be room and budget, but EFGH is being computed."""
    tiny.add("leader", "ABCDEFGHIJKLMN")
    tiny.add("follower", "ABCDEFGHxy")
    assert tiny.step() == "leader:ABCD"
    assert tiny.step() == "leader:EFGH follower:........xy"
    assert tiny.step() == "leader:IJKL"


def test_a_follower_that_comes_late_waits_as_well(tiny):
    tiny.add("leader", "ABCDEFGHIJKLMN")
    assert tiny.step() == "leader:ABCD"
    tiny.add("follower", "ABCDEFGHIJKLxy")
    assert tiny.step() == "leader:EFGH"
    assert tiny.step() == "leader:IJKL follower:............xy"


def test_each_follower_leaves_where_its_own_way_begins(tiny):
    """They wait no longer than for what they share."""
    tiny.add("leader", "ABCDEFGHIJKLMN")
    tiny.add("far", "ABCDEFGHIJKLxy")
    tiny.add("near", "ABCDxy")
    tiny.add("middle", "ABCDEFGHxy")
    assert tiny.step() == "leader:ABCD near:....xy"
    assert tiny.step() == "leader:EFGH middle:........xy"
    assert tiny.step() == "leader:IJKL far:............xy"
    assert tiny.step() == "leader:MN"


def test_a_follower_waits_for_the_tokens_that_it_can_copy(tiny):
    """EF are worth a step: they are copied out of the leader's second block."""
    tiny.add("leader", "ABCDEFGHIJ")
    tiny.add("follower", "ABCDEFxy")
    assert tiny.step() == "leader:ABCD"
    assert tiny.step() == "leader:EFGH follower:....,,xy"


def test_a_follower_does_not_wait_for_what_will_not_be_findable(tiny):
    """IJ are in the leader's last block, which is not full, so it cannot hit while that runs."""
    tiny.add("leader", "ABCDEFGHIJ")
    tiny.add("follower", "ABCDEFGHIJxy")
    assert tiny.step() == "leader:ABCD"
    assert tiny.step() == "leader:EFGH follower:........IJxy"


def test_a_follower_leads_those_who_share_more_with_it(tiny):
    """Three ways part one after the other; each token is computed once."""
    tiny.add("one", "ABCDEFGHIJKL")
    tiny.add("two", "ABCDEFGH12345678")
    tiny.add("three", "ABCDEFGH1234xxxx")
    assert tiny.step() == "one:ABCD"
    assert tiny.step() == "one:EFGH two:........1234 three:............xxxx"


def test_chunks_that_end_in_the_middle_of_a_block_are_waited_for(index):
    """After five tokens one block can be found, after ten two, after the third chunk all."""
    tiny = tiny_scheduler(index=index, budget=16, max_chunk_tokens=5)
    tiny.add("leader", "ABCDEFGHIJKL")
    tiny.add("follower", "ABCDEFGHIJKxy")
    assert tiny.step() == "leader:ABCDE"
    assert tiny.step() == "leader:FGHIJ"
    assert tiny.step() == "leader:KL follower:........,,,xy"


def test_unrelated_requests_overtake_those_that_wait_for_a_prefill(tiny):
    """Rule 4 of the scheduler; the follower loses nothing by it."""
    tiny.add("leader", "ABCDEFGHIJ")
    tiny.add("follower", "ABCDEFGHxy")
    tiny.add("stranger", "STU")
    assert tiny.step() == "leader:ABCD stranger:STU"
    assert tiny.state == "leader | follower"


# --- when the leader does not get there ---------------------------------------------------------


def test_when_the_leader_is_cancelled_a_follower_takes_over(tiny):
    """It goes on from the last computed token, and the other follower follows it."""
    tiny.add("leader", "ABCDEFGHIJKL")
    tiny.add("heir", "ABCDEFGHIJKx")
    tiny.add("other", "ABCDEFGHIyyy")
    assert tiny.step() == "leader:ABCD"
    assert tiny.cancel("leader") == ["leader"]
    assert tiny.step() == "heir:....EFGH"
    assert tiny.step() == "heir:IJKx other:........,yyy"
    assert tiny.reasons == {"leader": "abort", "heir": "length", "other": "length"}


def test_the_heir_finds_the_cancelled_leaders_last_block_token_by_token(index):
    """The leader's chunk ended within a block, which is sealed when it leaves."""
    tiny = tiny_scheduler(index=index, budget=16, max_chunk_tokens=6)
    tiny.add("leader", "ABCDEFGHIJKL")
    tiny.add("heir", "ABCDEFGHIJKx")
    assert tiny.step() == "leader:ABCDEF"
    tiny.cancel("leader")
    assert tiny.step() == "heir:....,,GHIJKx"


def test_when_the_leaders_step_fails_a_follower_takes_over(tiny):
    """What the failed step was to compute is forgotten; ABCD stands from the step before."""
    tiny.add("leader", "ABCDEFGHIJKL")
    tiny.add("heir", "ABCDEFGHIJxy")
    assert tiny.step() == "leader:ABCD"
    assert tiny.failing_step() == "leader:EFGH"
    assert tiny.reasons == {"leader": "error"}
    assert tiny.step() == "heir:....EFGH"
    assert tiny.step() == "heir:IJxy"


def test_followers_that_shared_the_failed_step_end_with_it(tiny):
    """Those that waited for more of it do not."""
    tiny.add("leader", "ABCDEFGHIJKL")
    tiny.add("near", "ABCDxy")
    tiny.add("far", "ABCDEFGHxy")
    assert tiny.failing_step() == "leader:ABCD near:....xy"
    assert tiny.reasons == {"leader": "error", "near": "error"}
    assert tiny.step() == "far:ABCD"


def test_a_preempted_leader_follows_the_request_that_takes_over(index):
    """The decode needs a second block in step 2, and the leader is last in rank."""
    tiny = chunked(index, num_blocks=4)
    tiny.add("leader", "ABCDEFGHIJKL", priority=1)
    tiny.add("decode", "QRST", max_tokens=3)
    assert tiny.step() == "decode:QRST leader:ABCD"
    tiny.add("heir", "ABCDEFxy")
    assert tiny.step() == "decode:a"
    assert tiny.state == "decode | heir leader"
    assert tiny.step() == "decode:b heir:....EFxy"
    assert tiny.step() == "leader:....,,GHIJ"


def test_a_follower_that_leads_and_is_cancelled_hands_over_again(tiny):
    """The leader is cancelled in every step: the prompt gets on by a block each time."""
    names = [f"request {number}" for number in range(4)]
    for name in names:
        tiny.add(name, "ABCDEFGHIJKLMNOP" + name[-1])
    steps = []
    for name in names[:3]:
        steps.append(tiny.step())
        tiny.cancel(name)
    assert steps == ["request 0:ABCD", "request 1:....EFGH", "request 2:........IJKL"]
    assert tiny.run() == ["request 3:............MNOP", "request 3:3"]


# --- who neither leads nor follows ---------------------------------------------------------------


def test_no_request_waits_for_a_leader_that_does_not_write_the_cache(tiny):
    """What it computes will never be findable."""
    tiny.add("private", "ABCDEFGH", cache_write=False)
    tiny.add("other", "ABCDEFGH")
    assert tiny.step() == "private:ABCD other:ABCD"


@pytest.mark.parametrize("how", [{"cache_read": False}, {"prompt_logprobs": 0}])
def test_a_request_that_does_not_read_the_cache_does_not_wait(tiny, how):
    """Prompt log-probs need the logits of every token, so nothing may hit."""
    tiny.add("leader", "ABCDEFGH")
    tiny.add("other", "ABCDEFGH", **how)
    assert tiny.step() == "leader:ABCD other:ABCD"


def test_no_request_waits_for_another_tenant(tiny):
    """The first block of another tenant is another block (law 3)."""
    tiny.add("leader", "ABCDEFGH", tenant="one")
    tiny.add("other", "ABCDEFGH", tenant="two")
    assert tiny.step() == "leader:ABCD other:ABCD"


def test_no_request_waits_with_prefix_caching_off(index):
    tiny = chunked(index, enable_prefix_caching=False)
    tiny.add("leader", "ABCDEFGH")
    tiny.add("other", "ABCDEFGH")
    assert tiny.step() == "leader:ABCD other:ABCD"


def test_no_request_waits_for_a_decode(tiny):
    """All that can be found of its prompt can be found already."""
    tiny.add("decode", "ABCDEF", max_tokens=4)
    assert [tiny.step(), tiny.step()] == ["decode:ABCD", "decode:EF"]
    tiny.add("other", "ABCDEFab")
    assert tiny.step() == "decode:a other:....EFab"


# --- images -------------------------------------------------------------------------------------


def test_followers_share_the_text_before_an_image_that_differs(tiny):
    """A cat and a dog at the same place: what comes before is the same, and nothing after."""
    tiny.add("cat", "ABCD####EFGH", images=(ImageSpan(b"cat", 4, 4),))
    tiny.add("dog", "ABCD####EFGH", images=(ImageSpan(b"dog", 4, 4),))
    assert tiny.step() == "cat:ABCD dog:....####"


def test_followers_wait_for_the_image_that_they_share(tiny):
    """It is as good as text, in whole blocks."""
    tiny.add("one", "ABCD####EFGH", images=(ImageSpan(b"cat", 4, 4),))
    tiny.add("two", "ABCD####EFxy", images=(ImageSpan(b"cat", 4, 4),))
    assert tiny.step() == "one:ABCD"
    assert tiny.step() == "one:####"
    assert tiny.step() == "one:EFGH two:........,,xy"


def test_a_request_waits_for_tokens_behind_an_image_in_the_same_block(tiny):
    """ABCDE#F is shared: the follower copies the image, and the text behind it."""
    picture = (ImageSpan(b"cat", 5, 1),)
    tiny.add("leader", "ABCDE#FGHIJKLMNO", images=picture)
    tiny.add("follower", "ABCDE#Fx", images=picture)
    assert tiny.step() == "leader:ABCD"
    assert tiny.step() == "leader:E#FG follower:....,,,x"

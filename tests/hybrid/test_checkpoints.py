"""Where checkpoints are placed, and which of them goes first."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.hybrid.checkpoint import Checkpoint
from ostinato.hybrid.placement import Placement, place
from ostinato.settings import StateConfig
from tests.support.cache.tiny_cache import tiny_cache
from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler

DEPTHS = st.dictionaries(st.integers(1, 30), st.integers(1, 5), min_size=1, max_size=7)


def saved(depths: dict[int, int], chosen: tuple[int, ...]) -> int:
    """Count what need not be computed again by all that part at some depth."""
    return sum(w * max((c for c in chosen if c <= d), default=0) for d, w in depths.items())


@given(DEPTHS, st.integers(1, 4))
def test_no_other_choice_of_positions_saves_more(depths: dict[int, int], budget: int):
    chosen = place([(d, float(w)) for d, w in sorted(depths.items())], 0, budget)
    assert len(chosen) <= budget and chosen == sorted(chosen)
    every = combinations(sorted(depths), min(budget, len(depths)))
    assert saved(depths, tuple(chosen)) == max(saved(depths, other) for other in every)


def test_a_prompt_is_cut_where_many_parted_and_otherwise_only_while_slots_are_unused():
    placement = Placement(budget=1)
    assert placement.choose(1, 20, has_unused=False) == []
    assert placement.choose(1, 20, has_unused=True) == [11], "the middle, if nothing is known"
    for _ in range(5):
        placement.learn(7)
    assert placement.choose(1, 20, has_unused=False) == [7]
    assert placement.choose(8, 20, has_unused=False) == [], "nothing parted there"


def stateful(index: str, num_slots: int) -> TinyScheduler:
    """Return a scheduler with states at multiples of 4, blocks of 4, and none between."""
    return tiny_scheduler(64, index=index, states=StateConfig(num_slots, 4, 0), max_num_seqs=1)


def checkpoints(tiny: TinyScheduler) -> dict[int, Checkpoint]:
    """Return the states that are kept, by the length of their prefixes."""
    states = tiny.cache.states
    assert states is not None
    entries = [entry for run in states.runs() for entry in run.entries]
    return {entry.num_tokens: entry for entry in entries if isinstance(entry, Checkpoint)}


def test_the_checkpoint_that_saves_least_goes_first_and_not_the_oldest(index):
    """Three slots beside the running one: that of 12 tokens is the oldest, that of 4 goes."""
    tiny = stateful(index, 4)
    for name, length in (("A", 13), ("B", 5), ("C", 9), ("D", 17)):
        tiny.serve(name, name * length)
    assert checkpoints(tiny).keys() == {8, 12, 16}


def test_where_one_of_two_neighbours_goes_the_other_is_worth_more(index):
    """A chat's 8 and 12: the state of 12 saves 4 tokens beside that of 8, and 12 without it."""
    tiny = stateful(index, 3)
    tiny.serve("first turn", "ABCDEFGHI")
    tiny.serve("second turn", "ABCDEFGHIJKLM")
    by_length = checkpoints(tiny)
    assert by_length[12].saved_tokens == 4
    tiny.cache.manager.remove(lambda entry: entry is by_length[8])
    assert by_length[12].saved_tokens == 12


def test_a_state_is_that_of_the_last_token_of_its_step(index):
    """A step that computes past a cut, as ``end_of_chunk`` never plans it, saves no state there."""
    cache = tiny_cache(8, index=index, states=StateConfig(4, unit=4))
    cache.admit("one", "ABCDEFG")
    cache.finish("one")
    assert cache.match("ABCDEFGHI").num_tokens == 0, "the state was that of 7 tokens, not of 4"


@pytest.mark.parametrize(("end", "num_hit"), [(6, 0), (8, 8)])
def test_of_a_step_that_is_published_in_two_parts_the_last_state_is_kept(index, end, num_hit):
    """There is no state of 4 tokens; that of 6 is not kept."""
    cache = tiny_cache(8, index=index, states=StateConfig(4, unit=4))
    cache.plan("one", "ABCDEFGH", upto=4)
    cache.advance("one", end)
    cache.commit()
    cache.finish("one")
    assert cache.match("ABCDEFGHI").num_tokens == num_hit

"""The queue of evictable entries against a Python list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import LeastRecentlyUsed
from ostinato.core.identity import Identity


@given(st.lists(st.tuples(st.sampled_from(["append", "remove"]), st.integers(0, 20))))
def test_the_queue_is_a_list_whose_members_may_leave_from_the_middle(steps):
    queue, model = LeastRecentlyUsed(), []
    for what, number in steps:
        if what == "append" or not model:
            model.append(CacheEntry(Identity()))
            queue.add((model[-1],), None)
        else:
            queue.remove((model.pop(number % len(model)),))
        assert list(queue) == model
        assert queue.victim() == ((model[0], 0) if model else None)


def test_an_entry_is_in_the_queue_once():
    queue, entry = LeastRecentlyUsed(), CacheEntry(Identity())
    queue.add((entry,), None)
    with pytest.raises(AssertionError, match="once"):
        queue.add((entry,), None)
    queue.remove((entry,))
    with pytest.raises(KeyError):
        queue.remove((entry,))

"""What a disk keeps when it is full: what the pool's eviction policy expects to be used again."""

from functools import partial

from ostinato.cache.eviction import LeastRecentlyUsed, RequestSummary
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.testing.conformance_medium import conversation, get, payload, put
from ostinato.testing.simulated_disk import SimulatedFolder
from ostinato.tiers import retention
from ostinato.tiers.disk import DiskOptions, DiskTier
from tests.support.cache.tiny_cache import tiny_cache

SMALL = DiskOptions(limit_bytes=64 * 1024, segment_bytes=8 * 1024)


class Forecast:
    """Requests of class 1 return, those of class 0 do not."""

    def row_of(self, request_class, uses):
        return request_class

    def worth(self, row, age_s):
        return row / (1 + age_s)


def used(request_class, at_s=0.0):
    item = retention.Retained()
    item.use(at_s, retention.ReuseClass(Forecast(), request_class))
    return item


def test_the_segment_with_least_worth_keeping_is_evicted_after_that_was_copied():
    """A and B have 15 blocks. The two that are worth least are in B; of equals, roots go first."""
    stale = [used(0, 9.0), used(0, 9.5)]
    root, tail, *others = (used(1, at_s) for at_s in (5.0, 5.0, *range(11)))
    content = {"A": [used(1) for _ in range(15)], "B": [*stale, root, tail, *others]}
    content |= {"newer": [used(0)], "newest": []}
    segments = {name: partial(list, items) for name, items in content.items()}
    rank = partial(retention.Retained.rank, now_s=10.0)
    segment, kept = retention.choose_eviction(segments, 20, 20, 10.0, rank)
    assert segment == "B" and {*kept} == {root, tail, *others}
    assert kept.index(tail) == kept.index(root) + 1
    assert retention.choose_eviction(segments, 20, 1, 10.0, rank)[0] == "A", (
        "what is lost there is worth less"
    )


def test_what_a_policy_expects_back_outlives_what_was_used_later():
    """One conversation of a class that returns, then a hundred of one that does not."""
    for request_class, num_found in ((1, 4), (0, 0)):
        tier = DiskTier(SimulatedFolder(), SMALL)
        put(tier, conversation(1))
        tier.use(conversation(1), retention.ReuseClass(Forecast(), request_class))
        for number in range(100, 200):
            put(tier, conversation(number))
            tier.use(conversation(number), retention.ReuseClass(Forecast(), 0))
        assert get(tier, conversation(1), start_block=4) == num_found


def test_a_tail_is_evicted_before_what_it_continues():
    """The disk takes a third of a long conversation: its beginning, also after restarts."""
    folder, prefix = SimulatedFolder(), conversation(1, num_blocks=1600)
    for first in range(0, 1600, 400):
        tier = DiskTier(folder, SMALL)
        for start in range(first, first + 400, 40):  # as an engine writes it, piece by piece
            runs = [(block, 4) for block in range(start, start + 40, 4)]
            tier.store([(prefix.extent(*run), payload(prefix, *run)) for run in runs])
        folder = folder.after_kill()
    num_reached = get(tier, prefix)
    assert num_reached > 0.4 * tier.stats()[0].num_blocks
    for number in range(2, 14):  # tails behind the gap make room for others
        put(tier, conversation(number, tenant=b"another"))
    assert get(tier, prefix) > 0.8 * num_reached


def test_a_policy_that_learns_ranks_for_the_tier():
    policy = ReuseHazard(8, lambda: 0.0)
    assert retention.reuse_class(policy, RequestSummary(num_output_tokens=100)).forecast is policy
    assert retention.reuse_class(LeastRecentlyUsed(), RequestSummary()) is retention.UNKNOWN


def test_a_policy_remembers_for_a_tier_what_its_own_pool_would_not():
    """Four blocks remember 32; before a disk of a hundred, 256 and not 400: 64 pools at most."""
    cache = tiny_cache(4, eviction_policy="reuse_hazard")
    policy = cache.manager.pool.shares.policy_of(b"")
    assert isinstance(policy, ReuseHazard)
    for num_disk_blocks, num_remembered in ((0, 32), (100, 256)):
        retention.remember_for_tier([policy, LeastRecentlyUsed()], num_disk_blocks)
        for number in range(260):
            cache.serve(f"{number:04d}")
        assert policy.num_remembered_blocks == num_remembered

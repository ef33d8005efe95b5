"""What lies in the cache, and what it is good for: the same from both indexes."""

import random

from ostinato.observe.introspection import BlockState, count_states, map_blocks, top_prefixes
from tests.support.cache.cache_views import letters, prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.cache.whole_state import whole_state


def top(cache: TinyCache, most: int, *how):
    """The prefixes that saved most."""
    return top_prefixes(cache.manager, cache.prefix_cache.hits, most, *how)


def listed(cache, most: int = 20, **how) -> list[tuple[str, int, int]]:
    """Of the heaviest prefixes: text, tokens of its own, hits."""
    found = top(cache, most, **how)
    return [(letters(prefix.head), prefix.own_tokens, prefix.num_hits) for prefix in found]


def test_a_prefix_that_hit_often_is_heavier_than_a_longer_one_that_never_hit(index):
    """ABCD was found three times; what follows it was not, though two of four blocks are there."""
    cache = tiny_cache(16, index=index)
    for prompt in ("ABCDEFGHIJKL", "ABCD1234", "ABCD5678", "ABCDvwxy"):
        cache.serve(prompt)
    cache.serve("QRSTUVWXYZ..----")
    assert listed(cache)[0] == ("ABCD", 4, 3)
    assert listed(cache)[1] == ("QRSTUVWXYZ..----", 16, 0)
    assert ("ABCDEFGHIJKL", 8, 0) in listed(cache)


def test_hits_of_an_evicted_tail_stay_with_what_is_left_of_it(index):
    """EFGH was found twice and goes: ABCD was found as often, whatever is left behind it."""
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEFGH")
    cache.serve("ABCDEFGHx")
    cache.serve("ABCDEFGHy")
    cache.serve("----====!!!!")
    assert ("ABCD", 4, 2) in listed(cache)


def test_a_request_that_comes_back_after_a_preemption_is_no_hit(cache):
    cache.serve("ABCDEFGH")
    cache.serve("ABCDEFGH", preempted=True)
    assert [hits for *_, hits in listed(cache)] == [0]


def test_tenants_can_be_listed_apart(index):
    """The same text of two tenants is two prefixes."""
    cache = tiny_cache(16, index=index)
    for tenant, times in ((b"ann", 3), (b"bob", 2)):
        for _ in range(times):
            cache.serve("ABCDEFGHI", tenant=tenant)
    of_bob = top_prefixes(
        cache.manager, cache.prefix_cache.hits, 9, lambda identity: identity.tenant == b"bob"
    )
    assert {prefix.identity.tenant for prefix in of_bob} == {b"bob"}
    assert of_bob[0].num_hits == 1
    assert top(cache, 1)[0].identity.tenant == b"ann"


def test_a_prefix_knows_its_blocks_and_its_age(index):
    """Three steps ago ABCD was published; two blocks go on behind it, one of them a tail."""
    cache = tiny_cache(16, index=index)
    cache.serve("ABCDEFGH")
    cache.serve("ABCDxy")
    cache.serve("ABCD.")
    first = top(cache, 1)[0]
    assert (first.own_blocks, first.num_blocks_below) == (1, 3)
    assert first.age_s == 3.0
    assert first.num_holders == 0
    cache.admit("reader", "ABCD!")
    assert top(cache, 1)[0].num_holders == 1


def test_the_map_shows_every_block_with_its_state_and_owner(cache):
    cache.serve("ABCDEFGH", tenant=b"ann")
    cache.admit("bob's", "ABCDEF", tenant=b"bob")
    cache.admit("ann's", "ABCDxy", tenant=b"ann")
    drawn = map_blocks(cache.manager)
    of = {tenant: place for place, tenant in enumerate(drawn.tenants)}
    pairs = sorted(zip(drawn.states, drawn.owners, strict=True))
    assert pairs == sorted(
        [(BlockState.UNUSED, -1)] * 3
        + [(BlockState.PRIVATE, of[b"bob"]), (BlockState.HELD, of[b"bob"])]
        + [(BlockState.PRIVATE, of[b"ann"]), (BlockState.HELD, of[b"ann"])]
        + [(BlockState.EVICTABLE, of[b"ann"])]
    )


def test_counts_of_states_agree_with_the_map_after_every_step(index):
    """Random prompts of three letters, some of them held, in a pool that is too small."""
    draw, cache = random.Random(1), tiny_cache(12, index=index)
    for number in range(150):
        prompt = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 14)))
        name = f"r{number % 3}"
        if name in cache.sequences:
            cache.finish(name)
        cache.admit(name, prompt, tenant=draw.choice([b"ann", b"bob"]))
        drawn, counts = map_blocks(cache.manager), count_states(cache.manager)
        assert {state: drawn.count(state) for state in BlockState} == counts


def test_a_survey_changes_nothing(cache):
    cache.serve("ABCDEFGHIJ")
    cache.admit("reader", "ABCDEFxy")
    before = whole_state(cache.manager)
    top(cache, 9)
    map_blocks(cache.manager)
    assert whole_state(cache.manager) == before


def test_both_indexes_weigh_the_same_traffic_alike(index):
    """A hundred prompts of two letters with room for all; compared with counting by hand."""
    draw, cache = random.Random(2), tiny_cache(400, index=index, seal_tails=False)
    found: dict[str, int] = {}
    for _ in range(100):
        prompt = "".join(draw.choice("ab") for _ in range(draw.randrange(4, 18)))
        hit = cache.manager.match(prefix_key(prompt)).num_shared_tokens
        if hit:
            found[prompt[:hit]] = found.get(prompt[:hit], 0) + 1
        cache.serve(prompt)
    for prefix in top(cache, 999):
        text = letters(prefix.head)
        ended = sum(count for end, count in found.items() if end.startswith(text))
        assert prefix.num_hits == ended, text
    ends = {letters(prefix.head) for prefix in top(cache, 999)}
    assert found.keys() <= ends
    saved = sum(prefix.saved_tokens for prefix in top(cache, 999))
    assert saved == cache.prefix_cache.stats.first.shared_tokens, "each token counts once"

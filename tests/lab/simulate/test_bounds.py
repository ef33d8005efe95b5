"""Belady's bound, beside all that a cache could have done."""

import random
from functools import cache

import pytest

from ostinato.lab.simulate.simulation import belady_hits


def trees(rng: random.Random, num_requests: int) -> list[list[int]]:
    """Requests over a small tree in which a block's number gives its parent's."""
    paths = []
    for _ in range(num_requests):
        path, block = [], 1
        for _ in range(rng.randint(1, 3)):
            block = 2 * block + rng.randint(0, 1)
            path.append(block)
        paths.append(path)
    return paths


def most_hits(paths: list[list[int]], num_blocks: int) -> int:
    """Try every set of blocks that may stay after each request: whatever is closed upwards."""

    def closed(kept: frozenset[int]) -> bool:
        return all(block // 2 in kept or block < 4 for block in kept)

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        hits = next((i for i, block in enumerate(path) if block not in held), len(path))
        seen, found, most = {held}, [held], 0
        while found:  # evict leaf by leaf until the request fits; not the request's own blocks
            kept = found.pop()
            after = kept | frozenset(path)
            if len(after) <= num_blocks:
                most = max(most, best(number + 1, after))
            for block in kept - frozenset(path):
                smaller = kept - {block}
                if closed(smaller) and smaller not in seen:
                    seen.add(smaller)
                    found.append(smaller)
        return hits + most

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_no_policy_that_evicts_leaves_finds_more_than_belady(seed):
    """Found by trying everything: the bound is met, and not passed."""
    rng = random.Random(seed)
    paths, num_blocks = trees(rng, 8), rng.randint(3, 6)
    assert belady_hits(paths, num_blocks) == most_hits(paths, num_blocks)

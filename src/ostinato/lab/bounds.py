"""What could a cache of this size have found, had it known the future?

Belady evicts what is wanted furthest in the future. A prefix cache may evict leaves only; that
costs nothing here, for a block is wanted whenever one behind it is, so among the furthest there
is always a leaf. With bypass, a block that is wanted later than all that is cached is not
inserted in the first place; it has still been computed.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
"""

import heapq
from collections.abc import Sequence

_NEVER = 2**62


def belady_hits(paths: Sequence[Sequence[int]], num_blocks: int, bypass: bool = False) -> int:
    """Return how many blocks hit when requests come one by one.

    Args:
        paths: Block ids of each request, in token order. Ids are prefix-chained: a block has the
            same parent wherever it stands.
        num_blocks: Blocks that fit; longer requests are cut to it.
        bypass: Whether a block need not be inserted.

    Cost: O(n log n) in all blocks of all requests.
    """
    next_uses = _next_uses(paths)
    next_use: dict[int, int] = {}  # of what is cached
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for number, whole in enumerate(paths):
        path = whole[:num_blocks]
        num_hits = next((i for i, block in enumerate(path) if block not in next_use), len(path))
        hits += num_hits
        running = set(path)
        if not bypass:
            num_missing = len(path) - num_hits
            _evict(heap, next_use, running, len(next_use) + num_missing - num_blocks)
        for depth, block in enumerate(path):
            next_use[block] = next_uses[number][depth]
            heapq.heappush(heap, (-next_use[block], -depth, block))
        if bypass:
            _evict(heap, next_use, set(), len(next_use) - num_blocks)
    return hits


def _evict(
    heap: list[tuple[int, int, int]], next_use: dict[int, int], running: set[int], num_blocks: int
) -> None:
    """Evict what is wanted last, and of equals the deepest; not what is running."""
    spared = []
    while num_blocks > 0 and heap:
        entry = heapq.heappop(heap)
        block = entry[2]
        if next_use.get(block) != -entry[0]:
            continue  # it is gone, or wanted at another time
        if block in running:
            spared.append(entry)
            continue
        del next_use[block]
        num_blocks -= 1
    for entry in spared:
        heapq.heappush(heap, entry)


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for every block of every request, the number of the next request that wants it."""
    wanted: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        found.append([wanted.get(block, _NEVER) for block in paths[number]])
        wanted.update(dict.fromkeys(paths[number], number))
    found.reverse()
    return found

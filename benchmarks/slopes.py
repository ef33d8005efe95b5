"""Whether an operation of the cache costs more when others have more state.

::

    python -m benchmarks.slopes                     # 10, 1,000 and 100,000 of each

The cost is counted in steps of the interpreter (bytecode instructions), so it is the same on every
machine; work inside C, such as comparing two runs of tokens, is one step. Each scene makes so many
of something, and counts the steps of one operation beside them. Leases nest in each other's
blocks, so 1,000 are the most that are nested.
"""

import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from ostinato.cache.block_table import BlockTable
from ostinato.cache.child_index import ChildIndex
from ostinato.cache.eviction import BlockShares, LeastRecentlyUsed
from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.settings import TenantShare
from ostinato.tenants.lease_book import LeaseBook
from ostinato.tenants.shares import TenantShares
from ostinato.tenants.terms import ANTHROPIC_5M

BLOCK_SIZE = 4
SIZES = (10, 1_000, 100_000)
MAX_NESTED = 1_000


def hit_of_nested_leases(num_leases: int) -> int:
    """Hit the deepest of leases that are nested in each other, and were hit before."""
    book, num_leases = LeaseBook(lambda: 0.0), min(num_leases, MAX_NESTED)
    for length in range(1, num_leases + 1):
        book.open(leased_table(range(length)), ANTHROPIC_5M)
    table = leased_table(range(num_leases))
    book.on_admit(table, RequestContext())
    return steps_of(lambda: book.on_admit(table, RequestContext()))


def hit_beside_leases(num_leases: int) -> int:
    """Hit one of leases that share their first block."""
    book = LeaseBook(lambda: 0.0)
    for number in range(num_leases):
        book.open(leased_table([0, number + 1]), ANTHROPIC_5M)
    table = leased_table([0, num_leases])
    return steps_of(lambda: book.on_admit(table, RequestContext()))


def leased_table(blocks: Any) -> BlockTable:
    """Return a table of one tenant's blocks."""
    return BlockTable(PrefixKey(Identity(tenant=b"ann"), [0]), array("i", blocks))


def eviction_beside_tenants(num_tenants: int) -> int:
    """Evict a block for a newcomer, when each of the tenants has one."""
    tenants = {str(number).encode(): TenantShare(quota=2) for number in range(num_tenants)}
    cache = make_cache(num_tenants + 1, TenantShares(tenants, LeastRecentlyUsed))
    for number, tenant in enumerate(tenants):
        serve(cache, [number] * BLOCK_SIZE, tenant)
    serve(cache, [1] * 3 * BLOCK_SIZE, b"other")  # the first eviction ranks all
    return steps_of(lambda: serve(cache, [2] * 3 * BLOCK_SIZE, b"another"))


def release_of_old_weights(num_blocks: int) -> int:
    """Release a sequence of old weights beside blocks that the new ones have computed."""
    cache = make_cache(num_blocks + 2, BlockShares(LeastRecentlyUsed()))
    key = PrefixKey(Identity(), [7] * BLOCK_SIZE)
    table, _ = cache.admit(key, cache.match(key))
    cache.publish(table, BLOCK_SIZE)
    cache.commit()
    cache.new_epoch()
    for number in range(num_blocks):
        serve(cache, [number] * BLOCK_SIZE, b"", epoch=1)
    return steps_of(lambda: cache.release(table, BLOCK_SIZE))


def newest_of_siblings(num_children: int) -> int:
    """Find the newest child that begins with 1, when the older half does."""
    children: ChildIndex[int] = ChildIndex()
    for number in range(num_children):
        children.add(array("I", [1 + (2 * number >= num_children), number]).tobytes(), number)
    run = array("I", [1, num_children]).tobytes()
    return steps_of(lambda: children.closest(run))


def newest_after_removals(num_children: int) -> int:
    """Remove the newest child, when as many newer ones were removed before."""
    children: ChildIndex[int] = ChildIndex()
    names = [array("I", [number]).tobytes() for number in range(num_children)]
    for number, name in enumerate(names):
        children.add(name, number)
    for name in names[: num_children // 2 : -1]:
        children.remove(name)
    return steps_of(lambda: children.remove(names[num_children // 2]))


SCENES: dict[str, Callable[[int], int]] = {
    "hit of nested leases": hit_of_nested_leases,
    "hit beside leases": hit_beside_leases,
    "eviction beside tenants": eviction_beside_tenants,
    "release of old weights": release_of_old_weights,
    "newest of siblings": newest_of_siblings,
    "newest after removals": newest_after_removals,
}


def make_cache(num_blocks: int, shares: BlockShares) -> CacheManager:
    """Return an empty cache."""
    return CacheManager(CacheConfig(num_blocks, BLOCK_SIZE), lambda: 0.0, shares)


def serve(cache: CacheManager, prompt: list[int], tenant: bytes, epoch: int = 0) -> None:
    """Take one prompt through the cache."""
    key = PrefixKey(Identity(tenant=tenant, epoch=epoch), prompt)
    table, _ = cache.admit(key, cache.match(key))
    cache.publish(table, len(prompt))
    cache.commit()
    cache.release(table, len(prompt))


def steps_of(operation: Callable[[], object]) -> int:
    """Count the bytecode instructions that an operation takes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return count


def main() -> None:
    """Print a row per scene."""
    table = Table(title="steps of the interpreter for one operation")
    for name in ("operation", *(f"beside {size:,}" for size in SIZES)):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for name, scene in SCENES.items():
        table.add_row(name, *(f"{scene(size):,}" for size in SIZES))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

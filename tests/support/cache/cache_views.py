"""What tests look at in a cache: keys of letters, windows, and tenants' shares."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import LeastRecentlyUsed
from ostinato.cache.manager import CacheManager
from ostinato.cache.pool import BlockPool
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.hybrid.manager import HybridCacheManager
from ostinato.hybrid.window_content import WindowTable
from ostinato.hybrid.window_group import WindowGroup
from ostinato.tenants.shares import TenantShares


def prefix_key(prompt: str, images: Iterable[ImageSpan] = (), **identity: Any) -> PrefixKey:
    """Return the key of a prompt, a letter per token; ``identity`` as in ``Identity``."""
    return PrefixKey(Identity(**identity), [ord(letter) for letter in prompt], images)


def windows_of(manager: CacheManager) -> list[WindowGroup]:
    """Return a manager's sliding windows; none of a plain one."""
    groups = manager.layer_groups if isinstance(manager, HybridCacheManager) else ()
    return [group for group in groups if isinstance(group, WindowGroup)]


def held_windows(table: BlockTable) -> list[WindowTable]:
    """Return what a table holds in windows."""
    return [held for held in table.held if isinstance(held, WindowTable)]


def shares_of(pool: BlockPool) -> TenantShares:
    """Return the accounts of a pool; empty ones where all blocks are everyone's."""
    shares = pool.shares
    return shares if isinstance(shares, TenantShares) else TenantShares({}, LeastRecentlyUsed)


def letters(packed: "bytes | array[int]") -> str:
    """Return packed tokens as the letters they stand for."""
    tokens = packed if isinstance(packed, array) else array("I", packed)
    return "".join(map(chr, tokens))


def num_common(left: Sequence[object], right: Sequence[object]) -> int:
    """Count the items with which two sequences begin alike."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def found(cache, prompt: str, **what) -> tuple[int, int]:
    """Return how many tokens hit in whole blocks, and how many are to be copied."""
    match = cache.match(prompt, **what)
    return match.num_shared_tokens, match.num_copied_tokens

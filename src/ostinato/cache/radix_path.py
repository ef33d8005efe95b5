"""Which nodes does one request hold, and what becomes of them?

A path is named by its deepest node and goes up to the root; holding it counts one more holder in
each of its nodes. So it costs one step per branch, whatever the number of blocks::

    root 2 ── system 2 ─┬─ turns of one 1      ◄── path of the first
                        └─ turns of another 1  ◄── path of the second
"""

from ostinato.cache.block import CacheEntry
from ostinato.cache.radix_node import RadixNode


def hold(path: RadixNode) -> list[RadixNode]:
    """Count one more who holds a path; returns the nodes that nobody held, the deepest first."""
    node, idle = path, []
    while (parent := node.parent) is not None:
        if not node.ref_count:
            idle.append(node)
        node.ref_count += 1
        node = parent
    node.ref_count += 1
    return idle


def let_go(path: RadixNode, idle: list[CacheEntry]) -> RadixNode:
    """Count one less who holds a path.

    Args:
        path: Which.
        idle: Is given the nodes that nobody holds any more, the deepest first.

    Returns:
        The root.
    """
    node = path
    while (parent := node.parent) is not None:
        count = node.ref_count = node.ref_count - 1
        assert count >= 0, "released more often than acquired"
        if not count:
            idle.append(node)
            node.is_growing = False
        node = parent
    node.ref_count -= 1
    return node


def quote(path: RadixNode) -> list[tuple[bytearray, int]]:
    """Return the packed tokens of a path's nodes, root first, each with how many bytes there are.

    Effects: the nodes change nothing of it any more; they may write behind it.
    """
    node, quotes = path, []
    while (parent := node.parent) is not None:
        node.is_quoted = True
        quotes.append((node.tokens, len(node.tokens)))
        node = parent
    quotes.reverse()
    return quotes

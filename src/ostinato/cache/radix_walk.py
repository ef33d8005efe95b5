"""Walks over the radix tree: for pictures, surveys and checks."""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ostinato.cache.prefix_index import CachedBlock, CachedRun
from ostinato.cache.radix_node import RadixNode
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES

Roots = Mapping[Identity, RadixNode]


def walk(roots: Roots, block_size: int) -> Iterator[tuple[RadixNode, bytes]]:
    """Walk all nodes but the roots, each with the packed blocks before it."""
    size = block_size * TOKEN_BYTES
    stack = [
        (child, identity.encoded) for identity, root in roots.items() for child in root.children
    ]
    while stack:
        node, before = stack.pop()
        yield node, before
        for index in range(node.num_blocks):
            extra = node.extras.get(node.start + index)
            before += bytes(node.tokens[index * size : (index + 1) * size])
            before += b"" if extra is None else extra.encoded
        stack += [(child, before) for child in node.children]


def cached_blocks(roots: Roots, block_size: int) -> Iterator[CachedBlock]:
    """Walk every published block."""
    size = block_size * TOKEN_BYTES
    for node, before in walk(roots, block_size):
        for index, block in enumerate(node.blocks):
            tokens = bytes(node.tokens[index * size : (index + 1) * size])
            known = node.extras.get(node.start + index)
            extra = b"" if known is None else known.encoded
            yield CachedBlock(BlockId(block), tokens, node.ref_count, before, extra)
            before += tokens + extra


def cached_runs(roots: Roots, block_size: int) -> Iterator[CachedRun]:
    """Walk everything published; a node is one run.

    Cost: O(nodes) steps in Python, and one copy of all tokens.
    """
    number, none = 0, array("i")
    stack: list[tuple[RadixNode, int | None]] = [
        (child, None) for root in roots.values() for child in root.children
    ]
    while stack:
        node, parent = stack.pop()
        held, idle = (node.blocks[:], none) if node.ref_count else (none, node.blocks[:])
        tokens = bytes(node.tokens)
        yield CachedRun(
            number, parent, node.identity, tokens, held, idle, node.ref_count, node.born_s
        )
        stack += [(child, number) for child in node.children]
        number += 1


def check(
    roots: Roots,
    block_size: int,
    idle: set[int],
    paths: Sequence[RadixNode],
    tails: Sequence[RadixNode],
) -> None:
    """Assert the index's rules 1 to 5 and that the tree's links agree.

    Args:
        roots: The trees.
        block_size: Tokens per block.
        idle: ``id`` of every entry that the pool can evict.
        paths: Every live path; reference counts are recounted from them.
        tails: Every source of a copy that is held.
    """
    counted = Counter(id(node) for path in paths for node in path.up())
    counted.update(map(id, tails))
    nodes = [node for node, _ in walk(roots, block_size)]
    for node in nodes:
        assert node.ref_count == counted.pop(id(node), 0), "a node's references are miscounted"
        assert node.blocks and node.tokens, "a node has no blocks"
        assert node.num_blocks == len(node.blocks) == node.end - node.start, "miscounted blocks"
        assert node.parent is not None
        assert node.start == node.parent.end, "a node is not where its parent ends"
        assert (id(node) in idle) == (node.ref_count == 0), "idle nodes alone are evictable"
        parted = node.identity != node.parent.identity and node.parent.parent is not None
        assert not parted or node.parent.ref_count, "content after a public prefix that may go"
        partial = node.is_partial(block_size)
        assert not partial or (node.num_blocks == 1 and not node.children)
    assert len(idle) == sum(node.ref_count == 0 for node in nodes), "a lost node is evictable"
    for root in roots.values():
        assert root.ref_count == counted.pop(id(root), 0), "a root's references"
        assert root.ref_count or root.children, "an empty root was left behind"
    assert not counted, "a path leads to a node outside the tree"

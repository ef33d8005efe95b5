"""What lies in the radix index, from the roots on? For pictures, surveys and checks."""

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
            for aside in node.asides.get(node.start + index, ()):
                yield aside, before
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
    """Walk everything published: a node is one run, cut where hits or births ended.

    Cost: O(nodes) steps in Python, and one copy of all tokens.
    """
    size, number = block_size * TOKEN_BYTES, 0
    stack: list[tuple[RadixNode, int | None]] = [
        (child, None) for root in roots.values() for child in root.children
    ]
    while stack:
        node, parent = stack.pop()
        start, ends = 0, {*node.hits, *(end for end, _ in node.births), node.end}
        for end in sorted(end - node.start for end in ends):
            stack += [(aside, parent) for aside in node.asides.get(node.start + start, ())]
            blocks = node.blocks[start:end]
            none = array("i")
            held, idle = (blocks, none) if node.ref_count else (none, blocks)
            hits = node.hits.get(node.start + end, 0)
            tokens = bytes(node.tokens[start * size : end * size])
            yield CachedRun(
                number, parent, node.identity, tokens, held, idle,
                node.ref_count, hits, node.birth_of(node.start + end),
            )  # fmt: skip
            start, parent, number = end, number, number + 1
        stack += [(child, parent) for child in node.children]


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
        is_aside = node in node.parent.asides.get(node.start, ())
        assert is_aside or node.start == node.parent.end
        assert not is_aside or node.is_sealed_tail(block_size), "more than a sealed tail is aside"
        ends = [end for end, _ in node.births]
        assert ends == sorted(set(ends)) and all(node.start < end <= node.end for end in ends)
        assert all(place in ends and place < node.end for place in node.asides), "a lost aside"
        assert not node.is_growing or node.ref_count, "nobody is there who could have grown it"
        assert (id(node) in idle) == (node.ref_count == 0), "idle nodes alone are evictable"
        assert all(node.start < end <= node.end for end in node.hits), "a hit ended elsewhere"
        parted = node.identity != node.parent.identity and not node.parent.is_root
        assert not parted or node.parent.ref_count, "content behind a public head that may go"
        sealed = node.is_sealed_tail(block_size)
        assert not sealed or (node.num_blocks == 1 and not node.children)
    assert len(idle) == sum(node.ref_count == 0 for node in nodes), "a lost node is evictable"
    for root in roots.values():
        assert root.ref_count == counted.pop(id(root), 0), "a root's references"
        assert root.ref_count or root.children, "an empty root was left behind"
    assert not counted, "a path leads to a node outside the tree"

"""How far does the tree agree with a sequence?

The walk goes from node to node. The next one is found by the tokens of its first block, and its
whole run is compared at once (``memcmp``): nothing here is done per block or per token::

    sequence  ABCD EFGH IJKL MNOP QRST UV
              └─ node, whole ─┘└ node ┘└─ tail: the child that begins most like it
"""

from array import array

from ostinato.cache.block_hash import block_bytes
from ostinato.cache.prefix_index import PrefixMatch, TailMatch
from ostinato.cache.radix_node import RadixNode
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.tokens import num_common_tokens


def longest_prefix(
    root: RadixNode | None, key: PrefixKey, num_tokens: int, block_size: int
) -> PrefixMatch:
    """Find the longest prefix in a tree among a sequence's first tokens.

    Args:
        root: Of the sequence's identity; None if nothing of it is cached.
        key: The sequence.
        num_tokens: How many of its tokens may hit.
        block_size: Tokens per block.

    Returns:
        The match; its cursor is the last node and how many of its blocks are matched.

    Cost: O(num_tokens) compared bytes, O(depth) steps in Python.
    """
    if root is None:
        return PrefixMatch(block_size)
    node, used, done, most = root, 0, 0, num_tokens // block_size
    tokens, blocks, is_plain = key.tokens, array("i"), not key.has_extras
    view = memoryview(tokens)  # a slice of it copies nothing
    while done < most and (child := node.children.newest) is not None:
        # Most nodes have one child, and all of it agrees: nobody has to ask for it by its name.
        is_whole = is_plain and _agrees(child, view, most, block_size)
        if not is_whole:
            child = node.children.get(block_bytes(key, done, block_size))
            if child is None:
                break
            is_whole = is_plain and _agrees(child, view, most, block_size)
        node, used = child, child.num_blocks
        if is_whole:
            blocks.extend(child.blocks)
            done += used
            continue
        used = child.num_common_blocks(key, view.cast("B"), most - done, block_size)
        blocks.extend(child.blocks[:used])
        done += used
        if used < child.num_blocks:
            break
    tail = None
    if used < node.num_blocks or node.children.by_text:  # something follows that may begin alike
        tail = _tail(key, num_tokens, node, used, block_size)
    return PrefixMatch(block_size, blocks, tail, (), (node, used))


def _agrees(node: RadixNode, view: memoryview, most: int, block_size: int) -> bool:
    """Whether a sequence without extras goes on with all of a node, among its first blocks."""
    start, end = node.start, node.end
    if end > most or node.extras:
        return False
    return node.tokens.startswith(view[start * block_size : end * block_size])


def _tail(
    key: PrefixKey, num_tokens: int, node: RadixNode, used: int, block_size: int
) -> TailMatch | None:
    """Find the block behind a match that begins most like the sequence goes on."""
    start = (node.start + used) * block_size
    stop = min(num_tokens, start + block_size)
    if key.has_extras:
        stop = start + key.num_text_tokens(start, stop)
    if stop <= start or block_size == 1:  # no prompt leaves a single token in its middle
        return None
    text = key.tokens[start:stop].tobytes()
    if used < node.num_blocks:
        common = num_common_tokens(node.text_of(used, block_size), text)
        return TailMatch(BlockId(node.blocks[used]), common, node, used) if common else None
    best = node.children.most_alike(text)
    if best is None:
        return None
    child, common = best
    return TailMatch(BlockId(child.blocks[0]), common, child)

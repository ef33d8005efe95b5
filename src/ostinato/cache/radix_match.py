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
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens


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
    node, used, count, done, most = root, 0, 0, 0, num_tokens // block_size
    blocks, width, is_plain = array("i"), block_size * TOKEN_BYTES, not key.has_extras
    tokens = key.tokens
    packed = memoryview(tokens).cast("B")
    while used == count and done < most:
        if is_plain:
            first = done * block_size
            child = node.children.get(tokens[first : first + block_size].tobytes())
        else:
            child = node.children.get(block_bytes(key, done, block_size))
        if child is None:
            break
        node, theirs, start = child, child.blocks, done * width
        used = count = len(theirs)
        whole = is_plain and done + count <= most and not child.extras
        # So it is nearly always; a slice of the view copies nothing.
        if whole and child.tokens.startswith(packed[start : start + count * width]):
            blocks.extend(theirs)
        else:
            used = child.num_common_blocks(key, packed, most - done, block_size)
            blocks.extend(theirs[:used])
        done += used
    tail = None
    if used < count or node.children:  # something follows that may begin alike
        tail = _tail(key, num_tokens, node, used, block_size)
    return PrefixMatch(block_size, blocks, tail, (), (node, used))


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
    text = key.packed_range(start, stop)
    if used < len(node.blocks):
        common = num_common_tokens(node.text_of(used, block_size), text)
        return TailMatch(BlockId(node.blocks[used]), common, node, used) if common else None
    best = node.children.most_alike(text)
    if best is None:
        return None
    child, common = best
    return TailMatch(BlockId(child.blocks[0]), common, child)

"""How does a node grow, and how is it split?

A conversation's next turn would hang a node behind that of the last one, and every turn more
would have to be walked, held and let go of one by one. So where the policy cannot tell, a run
goes on in the node that it continues::

    system ─┬─ turn 1 ── turn 2 ── turn 3              system ─┬─ turns 1, 2 and 3
            │       └ sealed tail             instead:         │        └ aside
            └─ somebody else's                                 └─ somebody else's

Rules:

1. Nothing that can be seen depends on it: neither what is cached, nor since when, nor who is
   evicted next. So whoever lets a node grow is its only holder, and the policy goes by the moment
   alone at which an entry was let go of.
2. A sealed tail goes aside when the run goes on with all of its tokens: no look-up would name it,
   and it is let go of before the run that it hangs at, so it is evicted before.
3. A node that is split is as if it had always been two.
"""

from itertools import chain

from ostinato.cache.radix_node import RadixNode
from ostinato.core.identity import PrefixKey
from ostinato.core.tokens import TOKEN_BYTES

_FEW = 4
"""Sealed tails that are looked at: where more begin, prompts part, and it is no run."""


def first_text(key: PrefixKey, place: int, name: bytes, block_size: int) -> bytes:
    """Return the packed tokens of a block before its first image.

    Args:
        key: The sequence.
        place: Of the block in it.
        name: The block's packed tokens and extras.
        block_size: Tokens per block.
    """
    if not key.has_extras:
        return name
    start = place * block_size
    return name[: key.num_text_tokens(start, start + block_size) * TOKEN_BYTES]


def overtaken(
    node: RadixNode, key: PrefixKey, name: bytes, block_size: int
) -> list[RadixNode] | None:
    """List what goes aside if new content is put into the node that it continues.

    Args:
        node: Held by whoever publishes.
        key: The sequence.
        name: Packed tokens and extras of the first new block.
        block_size: Tokens per block.

    Returns:
        Sealed tails, seldom any but the publisher's last turn's; None if the content has to be a
        node of its own.
    """
    if node.ref_count != 1 or node.parent is None:
        return None
    if node.identity is not key.identity and node.identity != key.identity:
        return None
    tails = node.children.sealed_tails(_FEW)
    if tails:
        text = first_text(key, node.end, name, block_size)
        for tail in tails:
            if not text.startswith(tail.tokens):
                return None
    return tails


def go_on(node: RadixNode, tails: list[RadixNode], now_s: float) -> None:
    """Prepare a node for content that is published now, behind what it has.

    Args:
        node: Whose.
        tails: What goes aside.
        now_s: The clock.
    """
    if node.is_growing and not tails:
        return
    node.end_birth(now_s)
    node.is_growing = True
    if tails:
        node.put_aside(tails)


def split(node: RadixNode, num_blocks: int, block_size: int) -> RadixNode:
    """Make the first blocks of a node a node of their own, which is returned.

    The old node keeps the rest, so that paths that end in it stay true.
    """
    parent = node.parent
    assert parent is not None and 0 < num_blocks < node.num_blocks
    block_name, text = node.names(block_size)
    assert block_name is not None, "a sealed tail is never split"
    size, end = num_blocks * block_size * TOKEN_BYTES, node.start + num_blocks
    head = RadixNode(parent, node.identity)
    head.tokens += memoryview(node.tokens)[:size]
    head.add_blocks(node.blocks[:num_blocks])
    head.ref_count = node.ref_count
    head.digests, node.digests = node.digests[:num_blocks], node.digests[num_blocks:]
    if node.extras:
        head.extras = {i: extra for i, extra in node.extras.items() if i < end}
        node.extras = {i: extra for i, extra in node.extras.items() if i >= end}
    parent.children.replace(block_name, text, node, head)
    node.keep_tokens(size, len(node.tokens))
    del node.blocks[:num_blocks]
    node.parent, node.start, node.num_blocks = head, end, node.num_blocks - num_blocks
    node.give_hits(head)
    _give_past(node, head)
    head.add_child(*node.names(block_size), node)
    return head


def _give_past(node: RadixNode, head: RadixNode) -> None:
    """Leave a node that was split off what came before the rest: births and asides."""
    head.born_s = node.birth_of(head.end)
    head.births = [birth for birth in node.births if birth[0] < head.end]
    node.births = [birth for birth in node.births if birth[0] > head.end]
    if not node.asides:
        return
    head.asides = {place: some for place, some in node.asides.items() if place < head.end}
    between = node.asides.get(head.end, ())
    node.asides = {place: some for place, some in node.asides.items() if place > head.end}
    for aside in between:
        head.add_child(None, bytes(aside.tokens), aside)
    for aside in chain(between, *head.asides.values()):
        aside.parent = head

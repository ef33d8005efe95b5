"""When do two nodes become one, and how does one become two?

A conversation's next turn hangs a node behind that of the last one. All of them would be walked,
held and let go of one by one, so nodes of which nobody can tell any more that they were two are
joined when their path is let go of::

    system ─┬─ turn 1 ── turn 2 ── turn 3              system ─┬─ turns 1, 2 and 3
            │       └ sealed tail             ─────►           │        └ aside
            └─ somebody else's                                 └─ somebody else's

Rules:

1. Nothing that can be seen changes: neither what is cached, nor since when, nor who is evicted
   next. So both have just been let go of by the same path, and the policy goes by that moment
   alone.
2. A sealed tail between the two goes aside, if the run goes on with all of its tokens: no look-up
   would name it, and it waits to be evicted before the run that it hangs at.
3. A run that is cut in two where it was joined is as it was before. What was split because
   somebody went another way stays split: whoever asks for it next goes there again.
"""

from itertools import chain

from ostinato.cache.radix_node import RadixNode
from ostinato.core.tokens import TOKEN_BYTES

_FEW = 4
"""Siblings that are looked at: where more begin, prompts part, and it is no run."""


def join_all(idle: list[RadixNode], block_size: int) -> list[RadixNode]:
    """Join what can be joined of a path's end that was just let go of.

    Args:
        idle: Neighbours on one path, the deepest first; the policy has none of them.
        block_size: Tokens per block.

    Returns:
        What is left of them, the deepest first.
    """
    kept = idle[:1]
    for parent in idle[1:]:
        if _are_one(parent, kept[-1], block_size):
            _join(parent, kept[-1])
            kept[-1] = parent
        else:
            kept.append(parent)
    return kept


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
    head.blocks.extend(node.blocks[:num_blocks])
    head.ref_count = node.ref_count
    head.digests, node.digests = node.digests[:num_blocks], node.digests[num_blocks:]
    head.extras = {i: extra for i, extra in node.extras.items() if i < end}
    node.extras = {i: extra for i, extra in node.extras.items() if i >= end}
    parent.children.replace(block_name, text, node, head)
    del node.tokens[:size]
    del node.blocks[:num_blocks]
    head.is_parted, node.is_parted = node.is_parted, True
    node.parent, node.start = head, end
    node.give_hits(head)
    _give_past(node, head)
    head.children.add(*node.names(block_size), node)
    return head


def _are_one(parent: RadixNode, child: RadixNode, block_size: int) -> bool:
    """Whether nobody could tell that two neighbours are two nodes."""
    siblings = parent.children
    if (
        child.is_parted
        or siblings.num_full != 1
        or siblings.num_texts > _FEW
        or parent.identity != child.identity
    ):
        return False
    text = child.text_of(0, block_size)
    return all(
        other is child or (not other.ref_count and text.startswith(other.tokens))
        for other in siblings
    )


def _join(parent: RadixNode, child: RadixNode) -> None:
    """Put a node's content behind its parent's, which takes its place."""
    overtaken = [other for other in parent.children if other is not child]
    if overtaken:
        parent.asides[parent.end] = overtaken
    parent.asides.update(child.asides)
    parent.num_of_one_birth()  # forgets the births of what was cut off
    parent.births += [(parent.end, parent.born_s), *child.births]
    parent.born_s = child.born_s
    parent.tokens += child.tokens
    parent.blocks.extend(child.blocks)
    parent.digests += child.digests
    parent.extras.update(child.extras)
    parent.hits.update(child.hits)
    parent.children = child.children
    for other in chain(child.children, *child.asides.values()):
        other.parent = parent


def _give_past(node: RadixNode, head: RadixNode) -> None:
    """Leave a node that was split off what was joined into it: births and asides."""
    head.born_s = node.birth_of(head.end)
    head.births = [birth for birth in node.births if birth[0] < head.end]
    node.births = [birth for birth in node.births if birth[0] > head.end]
    for place in [place for place in node.asides if place <= head.end]:
        asides = node.asides.pop(place)
        for aside in asides:
            aside.parent = head
            if place == head.end:
                head.children.add(None, bytes(aside.tokens), aside)
        if place < head.end:
            head.asides[place] = asides

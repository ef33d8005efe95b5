"""Checks of lab 2: a radix tree, step by step and against a dictionary."""

from itertools import product
from typing import Any

from ostinato.labs.mistakes import (
    BLOCK,
    CheckList,
    Mistake,
    Story,
    expect_list,
    expect_match,
    expect_type,
    spaced,
    texts,
    tokens,
)
from ostinato.observe.prompt_diff import num_alike

CHECKS = CheckList()


@CHECKS.add("Blocks in common", 1)
def check_common(lab: Any, story: Story) -> None:
    """Whole blocks only, up to the end of either."""
    for held in (*texts(4, shortest=2), "ABABAB"):
        if len(held) % BLOCK:
            continue
        node = lab.Node(None, tokens(held), range(len(held) // BLOCK))
        for text in texts(5, shortest=0):
            call = story.begin(f"common_blocks({spaced(held)}, {spaced(text)})")
            count = expect_type(lab.Index(BLOCK).common_blocks(node, tokens(text)), int, call)
            right = num_alike(held, text) // BLOCK
            picture = [f"node      {spaced(held)}", f"tokens    {spaced(text)}",
                       f"->  {count}, not {right}"]  # fmt: skip
            if count * BLOCK > num_alike(held, text):
                what = "A block counts as common that differs, or is not all there."
                raise Mistake("differing-block-counts", what, picture)
            if count != right:
                what = "A block that both begin with does not count."
                raise Mistake("common-block-missed", what, picture)


@CHECKS.add("A walk down", 1, 2)
def check_match(lab: Any, story: Story) -> None:
    """A tree of three nodes, built by hand."""
    index = _small_tree(lab)
    before = index.picture()
    rights = {"ABCD": [7, 8], "ABCDEF": [7, 8, 9], "ABCDGH": [7, 8, 3], "ABXY": [7], "AB": [7],
              "ABC": [7], "XY": [], "": [], "ABCDEFGH": [7, 8, 9], "ABXYEF": [7],
              "ABEF": [7]}  # fmt: skip
    for text, right in rights.items():
        call = story.begin(f"match({spaced(text)})")
        match = expect_list(index.match(tokens(text)), int, call)
        picture = [*before.splitlines(), f"{call}  ->  {match}, not {right}"]
        if index.picture() != before:
            what = "A look-up changes the tree."
            raise Mistake(
                "match-has-effects", what, [*picture[:-1], call, *index.picture().split("\n")]
            )
        if match == right:
            continue
        if text in ("ABXY", "AB", "ABC") and len(match) < len(right):
            why = (
                "RadixAttention splits an edge only when a request needs it; a match must not wait."
            )
            raise Mistake(
                "whole-edges-only", "match takes an edge as a whole or not at all.", picture, why
            )
        if text in ("ABXYEF", "ABEF") or len(match) > len(right):
            raise Mistake(
                "goes-on-past-a-difference", "match goes on where the tokens differ.", picture
            )
        raise Mistake("stops-too-early", "match does not follow a child that agrees.", picture)


@CHECKS.add("A split", 1, 3)
def check_split(lab: Any, story: Story) -> None:
    """Tokens, blocks and links of both parts."""
    for num_blocks in (1, 2):
        index = lab.Index(BLOCK)
        node = lab.Node(index.root, tokens("ABCDEF"), [7, 8, 9])
        below = lab.Node(node, tokens("GH"), [3])
        node.children[index.name(below.tokens)] = below
        index.root.children[index.name(node.tokens)] = node
        story[:] = [f"ABCDEF [7, 8, 9], split after {num_blocks}"]
        head = index.split(node, num_blocks)
        expect_type(head, lab.Node, "split(node, 1)", "the new head")
        _check_parts(index, node, head, below, num_blocks)


def _check_parts(index: Any, node: Any, head: Any, below: Any, num_blocks: int) -> None:
    end = num_blocks * BLOCK
    picture = [f"split(ABCDEF [7, 8, 9], {num_blocks}) leaves", *index.picture().split("\n")]
    if head is node:
        what = "split returns the node that keeps the rest, not the new head."
        raise Mistake("split-returns-the-tail", what, picture)
    if head.blocks != [7, 8, 9][:num_blocks] or node.blocks != [7, 8, 9][num_blocks:]:
        raise Mistake("blocks-cut-wrong", "The blocks are not divided between both parts.", picture)
    if head.tokens != tokens("ABCDEF")[:end] or node.tokens != tokens("ABCDEF")[end:]:
        what = "The tokens are not cut where the blocks are: a block has several tokens."
        raise Mistake("tokens-cut-wrong", what, picture)
    if list(index.root.children.values()) != [head]:
        what = "The parent's child is still the old node: the head cannot be reached."
        raise Mistake("head-not-linked", what, picture)
    if head.children != {index.name(node.tokens): node}:
        what = "The head has not the rest as its only child, under the name of its first block."
        raise Mistake("tail-lost", what, picture)
    if head.parent is not index.root or node.parent is not head:
        what = "A parent is wrong: the head's is the old parent, the rest's is the head."
        raise Mistake("parents-wrong", what, picture)
    if node.children != {index.name(below.tokens): below}:
        raise Mistake("grandchild-lost", "What was below the node is lost by a split.", picture)


@CHECKS.add("Insert: new, known, and in part", 1, 2, 3, 4)
def check_insert(lab: Any, story: Story) -> None:
    """One prompt after another, by hand."""
    index = lab.Index(BLOCK)
    _insert(index, story, "ABCDEF", [7, 8, 9], [7, 8, 9])
    _insert(index, story, "ABCDEF", [1, 2, 3], [7, 8, 9])
    _insert(index, story, "AB", [1], [7])
    _insert(index, story, "ABCDGH", [1, 2, 3], [7, 8, 3])
    _insert(index, story, "ABXY", [1, 4], [7, 4])
    _insert(index, story, "AXYZ", [5, 6], [5, 6])
    _check_tree(index, story)


def _insert(index: Any, story: Story, text: str, blocks: list[int], right: list[int]) -> None:
    """Insert, and find all that was there before."""
    call = f"insert({spaced(text)}, {blocks})"
    story.append(call)
    known = {one: index.match(tokens(one)) for one in ("ABCDEF", "ABCDGH", "ABXY", "AXYZ")}
    held = expect_list(index.insert(tokens(text), blocks[:]), int, call)
    picture = [*story[-6:], *index.picture().split("\n")]
    match = index.match(tokens(text))
    if match != right and match == blocks and right != blocks:
        what = "A newer block takes the place of an older one with the same content."
        raise Mistake("newer-block-replaces", what, [*picture, f"found {match}, not {right}"])
    if len(match) < len(right):
        what = f"What was just inserted is not found: {match}, not {right}."
        raise Mistake("insert-drops-the-rest", what, picture)
    for one, before in known.items():
        if index.match(tokens(one))[: len(before)] != before:
            what = f"{spaced(one)} was found before, and is lost now."
            why = "Where two prompts part, the edge has to be split: both branches stay."
            raise Mistake("other-branch-lost", what, picture, why)
    if held != right:
        what = (
            f"insert returns {held}, not {right}: the block that holds each, the older ones first."
        )
        raise Mistake("insert-returns-own-blocks", what, picture)


@CHECKS.add("Remove: from the end", 1, 2, 3, 4, 5)
def check_remove(lab: Any, story: Story) -> None:
    """Block by block, until the tree is empty."""
    index = lab.Index(BLOCK)
    for text, blocks in (("ABCDEF", [7, 8, 9]), ("ABCDGH", [7, 8, 3])):
        index.insert(tokens(text), blocks)
    start = index.picture().split("\n")
    order = {"ABCDEF": ([7, 8], [7, 8, 3]), "ABCDGH": ([7, 8], [7, 8]), "ABCD": ([7], [7]),
             "AB": ([], [])}  # fmt: skip
    for text, rights in order.items():
        call = f"remove({spaced(text)})"
        story.append(call)
        index.remove(tokens(text))
        finds = tuple(index.match(tokens(one)) for one in ("ABCDEF", "ABCDGH"))
        picture = [*start, *story, *index.picture().split("\n")]
        for one, match, right in zip(("AB CD EF", "AB CD GH"), finds, rights, strict=True):
            line = f"match({one})  ->  {match}, not {right}"
            if len(match) > len(right):
                what = "A removed block is still found."
                raise Mistake("remove-forgets-nothing", what, [*picture, line])
            if match != right:
                what = "More than the last block is removed."
                raise Mistake("remove-takes-too-much", what, [*picture, line])
        _check_tree(index, story)


@CHECKS.add("All short histories", 1, 2, 3, 4, 5)
def check_all(lab: Any, story: Story) -> None:
    """Each triple of prompts, against a dictionary of all prefixes."""
    prompts = [text for text in texts(4, shortest=2) if not len(text) % BLOCK]
    prompts += ["ABABAB", "ABABBB", "ABBBAB"]
    for history in product(prompts, repeat=2):
        index, blocks, number = lab.Index(BLOCK), dict[str, int](), 0
        story[:] = []
        for text in history:
            own = list(range(number, number + len(text) // BLOCK))
            number += len(own)
            story.append(f"insert({spaced(text)}, {own})")
            held = index.insert(tokens(text), own[:])
            ends = [text[: (at + 1) * BLOCK] for at in range(len(own))]
            right = [blocks.setdefault(end, block) for end, block in zip(ends, own, strict=True)]
            for one in prompts:
                expect_match(index, one, blocks, story, index.picture().split("\n"))
            if held != right:
                what = "insert returns another block than the one that holds the content."
                raise Mistake("insert-returns-wrong", what, [*story, f"->  {held}, not {right}"])
        _check_tree(index, story)


def _check_tree(index: Any, story: Story) -> None:
    """Require that names, sizes and parents of all nodes agree."""
    todo = [index.root]
    while todo:
        node = todo.pop()
        for name, child in node.children.items():
            todo.append(child)
            picture = [*story[-6:], *index.picture().split("\n")]
            if not child.blocks:
                raise Mistake(
                    "empty-node-left", "A node without a block stays in the tree.", picture
                )
            if len(child.tokens) != len(child.blocks) * BLOCK:
                what = "A node's tokens and blocks are not of one length."
                raise Mistake("tokens-and-blocks-differ", what, picture)
            if name != index.name(child.tokens):
                what = "A child is kept under another name than its first block's tokens."
                raise Mistake("child-under-wrong-name", what, picture)
            if child.parent is not node:
                raise Mistake("parents-wrong", "A child's parent is another node.", picture)


def _small_tree(lab: Any) -> Any:
    """Build AB CD with EF and GH below, by hand."""
    index = lab.Index(BLOCK)
    top = lab.Node(index.root, tokens("ABCD"), [7, 8])
    index.root.children[index.name(top.tokens)] = top
    for text, block in (("EF", 9), ("GH", 3)):
        child = lab.Node(top, tokens(text), [block])
        top.children[index.name(child.tokens)] = child
    return index

"""Mistakes of lab 2: the kind that the check names, and the change that plants it."""

PLANTED = {
    "differing-block-counts": (
        "if list(tokens[run]) != node.tokens[run]:",
        "if tokens[run][0:1] != node.tokens[run][0:1]:",
    ),
    "common-block-missed": ("len(node.blocks):", "len(node.blocks[1:]):"),
    "whole-edges-only": (
        "            match += child.blocks[:count]\n",
        "            if count < len(child.blocks):\n                break\n"
        "            match += child.blocks[:count]\n",
    ),
    "goes-on-past-a-difference": (
        "            if count < len(child.blocks):\n                break\n",
        "",
    ),
    "stops-too-early": ("node = child\n", "break\n"),
    "match-has-effects": (
        "            match += child.blocks[:count]\n",
        "            if 0 < count < len(child.blocks):\n"
        "                child = self.split(child, count)\n"
        "            match += child.blocks[:count]\n",
    ),
    "split-returns-the-tail": ("        return head\n", "        return node\n"),
    "head-not-linked": ("        node.parent.children[self.name(head.tokens)] = head\n", ""),
    "tail-lost": ("        head.children[self.name(node.tokens)] = node\n", ""),
    "tokens-cut-wrong": ("end = num_blocks * self.block_size", "end = num_blocks"),
    "blocks-cut-wrong": ("node.blocks[num_blocks:]", "node.blocks"),
    "parents-wrong": ("node.parent, node.tokens, node.blocks =", "_, node.tokens, node.blocks ="),
    "grandchild-lost": (
        "(node.tokens)] = node\n",
        "(node.tokens)] = node\n        node.children = {}\n",
    ),
    "other-branch-lost": (
        "            node = child if count == len(child.blocks) else self.split(child, count)\n",
        "            node = child\n"
        "            if count < len(child.blocks):\n"
        "                del child.blocks[count:], child.tokens[count * self.block_size :]\n",
    ),
    "insert-drops-the-rest": ("Node(node, rest, left)", "Node(node, self.name(rest), left[:1])"),
    "insert-returns-own-blocks": ("kept += node.blocks", "kept += left[:count]"),
    "newer-block-replaces": (
        "kept += node.blocks",
        "node.blocks = left[:count]\n            kept += node.blocks",
    ),
    "child-under-wrong-name": (
        "                node.children[self.name(rest)] = Node(node, rest, left)\n",
        "                node.children[self.name(rest)] = Node(node, rest, left)\n"
        "                node.children[tuple(rest)] = node.children[self.name(rest)]\n",
    ),
    "remove-forgets-nothing": (
        "        del node.blocks[-1], node.tokens[-self.block_size :]\n",
        "",
    ),
    "remove-takes-too-much": ("if not node.blocks and node.parent", "if node.parent"),
    "empty-node-left": (
        "        if not node.blocks and node.parent is not None:\n"
        "            del node.parent.children[first]\n",
        "        del first\n",
    ),
}

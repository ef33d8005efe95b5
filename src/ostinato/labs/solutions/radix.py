"""Lab 2: a radix tree that splits its edges.

Fill the holes, then run ``ostinato labs check 2``.
"""

from collections.abc import Sequence


class Node:
    """An edge of tokens, the blocks that hold them, and what continues it."""

    def __init__(
        self, parent: "Node | None" = None, tokens: Sequence[int] = (), blocks: Sequence[int] = ()
    ) -> None:
        """Make a node; its parent does not know it yet."""
        self.parent = parent
        self.tokens = list(tokens)  # of whole blocks
        self.blocks = list(blocks)  # one per block of tokens
        self.children: dict[tuple[int, ...], Node] = {}  # by the tokens of their first block


class Index:
    """An index as a tree of runs of blocks."""

    def __init__(self, block_size: int) -> None:
        """Make an empty tree."""
        self.block_size = block_size
        self.root = Node()

    def name(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the name of a run among its siblings: the tokens of its first block."""
        return tuple(tokens[: self.block_size])

    def common_blocks(self, node: Node, tokens: Sequence[int]) -> int:
        """Count the leading blocks of a node that tokens begin with."""
        # Hole 1 (Edges are runs of blocks): compare block by block; a part of one does not count.
        count, size = 0, self.block_size
        while count < len(node.blocks):
            run = slice(count * size, (count + 1) * size)
            if list(tokens[run]) != node.tokens[run]:
                break
            count += 1
        return count
        # End of hole 1.

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix, in order; changes nothing."""
        # Hole 2 (Match: walk down): from the root, take the child that begins with the next block,
        # and as many of its blocks as agree. Go on below it only if all of them do.
        node, match, rest = self.root, list[int](), list(tokens)
        while (child := node.children.get(self.name(rest))) is not None:
            count = self.common_blocks(child, rest)
            match += child.blocks[:count]
            rest = rest[count * self.block_size :]
            if count < len(child.blocks):
                break
            node = child
        return match
        # End of hole 2.

    def split(self, node: Node, num_blocks: int) -> Node:
        """Make the first blocks of a node a node of their own, which is returned."""
        # Hole 3 (Split: two prompts part): head and node share the tokens and blocks; the head
        # takes the node's place among its siblings, and the node becomes the head's only child.
        assert node.parent is not None
        end = num_blocks * self.block_size
        head = Node(node.parent, node.tokens[:end], node.blocks[:num_blocks])
        node.parent.children[self.name(head.tokens)] = head
        node.parent, node.tokens, node.blocks = head, node.tokens[end:], node.blocks[num_blocks:]
        head.children[self.name(node.tokens)] = node
        return head
        # End of hole 3.

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Add the full blocks of a sequence; return the block that holds each from now on."""
        # Hole 4 (Insert: follow, split, append): follow what is known and keep its blocks; split a
        # node that agrees in part; append the rest below as one new node.
        node, kept, rest, left = self.root, list[int](), list(tokens), list(blocks)
        while left:
            child = node.children.get(self.name(rest))
            if child is None:
                node.children[self.name(rest)] = Node(node, rest, left)
                return kept + left
            count = self.common_blocks(child, rest)
            node = child if count == len(child.blocks) else self.split(child, count)
            kept += node.blocks
            rest, left = rest[count * self.block_size :], left[count:]
        return kept
        # End of hole 4.

    def remove(self, tokens: Sequence[int]) -> None:
        """Forget the last block of a sequence of full blocks, which nothing continues."""
        # Hole 5 (Remove: from the end): find the node that ends there, cut its last block off,
        # and drop a node that has no block left.
        node, rest = self.root, list(tokens)
        while rest:
            node = node.children[self.name(rest)]
            rest = rest[len(node.tokens) :]
        first = self.name(node.tokens)
        del node.blocks[-1], node.tokens[-self.block_size :]
        if not node.blocks and node.parent is not None:
            del node.parent.children[first]
        # End of hole 5.

    def picture(self) -> str:
        """Draw the tree: a node per line, its letters and its blocks."""
        return "\n".join(self._lines(self.root, 0)) or "(empty)"

    def _lines(self, node: Node, depth: int) -> list[str]:
        lines = []
        for child in node.children.values():
            lines.append("    " * depth + f"{_letters(child.tokens)} {child.blocks}")
            lines += self._lines(child, depth + 1)
        return lines


def _letters(tokens: Sequence[int]) -> str:
    return "".join(chr(token) if token > 31 else f"<{token}>" for token in tokens)

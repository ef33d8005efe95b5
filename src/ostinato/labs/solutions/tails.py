"""Lab 4: tails, and copy on write.

Fill the holes, then run ``ostinato labs check 4``.
"""

from collections.abc import Sequence


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the leading tokens that two runs share."""
    # Hole 1 (Single tokens): stop at the first that differs, or at the end of the shorter run.
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
    # End of hole 1.


class Index:
    """An index as a dictionary of prefixes, as simple as can be."""

    def __init__(self, block_size: int) -> None:
        """Make an empty index."""
        self.block_size = block_size
        self.blocks: dict[tuple[int, ...], int] = {}
        """Block by all tokens up to its end; a prefix that ends inside a block is a sealed tail."""

    def ends(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the prefixes of a sequence that end with a full block."""
        size = self.block_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix, whole blocks only."""
        match = []
        for prefix in self.ends(tokens):
            if prefix not in self.blocks:
                break
            match.append(self.blocks[prefix])
        return match

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Add the full blocks of a sequence; return the block that holds each from now on."""
        pairs = zip(self.ends(tokens), blocks, strict=True)
        return [self.blocks.setdefault(prefix, block) for prefix, block in pairs]

    def remove(self, tokens: Sequence[int]) -> None:
        """Forget the last block of a sequence."""
        del self.blocks[tuple(tokens)]

    def siblings(self, tokens: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        """List what is cached behind exactly these tokens: its own tokens, and its block."""
        # Hole 2 (The closest sibling): of each cached prefix that begins with all of these tokens,
        # and is at most a block longer, what follows them. These tokens are whole blocks.
        start, before = len(tokens), tuple(tokens)
        return [
            (prefix[start:], block)
            for prefix, block in self.blocks.items()
            if prefix[:start] == before and start < len(prefix) <= start + self.block_size
        ]
        # End of hole 2.

    def tail(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the block after a match that agrees longest, and in how many tokens."""
        # Hole 3 (The closest sibling): of the siblings behind the whole blocks that match, the one
        # with the most leading tokens in common with the rest; None if not even one token agrees.
        start = len(self.match(tokens)) * self.block_size
        rest = tokens[start:]
        best = None
        for own, block in self.siblings(tokens[:start]):
            count = num_common(own, rest)
            if count and (best is None or count > best[1]):
                best = block, count
        return best
        # End of hole 3.

    def seal(self, tokens: Sequence[int], block: int) -> bool:
        """Add the last block of a sequence that is not full; return whether it was taken."""
        # Hole 4 (Sealed tails): not if a sibling begins with the same tokens already: a look-up
        # of them finds that one. The tokens before the tail are whole blocks.
        start = len(tokens) // self.block_size * self.block_size
        own = tuple(tokens[start:])
        if any(other[: len(own)] == own for other, _ in self.siblings(tokens[:start])):
            return False
        self.blocks[tuple(tokens)] = block
        return True
        # End of hole 4.


def copy_slots(source: int, target: int, num_tokens: int, block_size: int) -> list[tuple[int, int]]:
    """Return the slots to copy, from and to: the first tokens of a block into another one."""
    # Hole 5 (Slots): token i of block b is in slot b * block_size + i. Copy no more than agrees.
    first, to = source * block_size, target * block_size
    return [(first + offset, to + offset) for offset in range(num_tokens)]
    # End of hole 5.


def writable(table: list[int], place: int, ref_counts: dict[int, int], free: list[int]) -> bool:
    """Make the block at a place of a table the sequence's own, so that it may write there.

    Args:
        table: Block numbers of the sequence; changed where a block is copied.
        place: Which of them is to be written.
        ref_counts: Holders of each block.
        free: Blocks without a holder; the last one is taken.

    Returns:
        Whether the block has to be copied. The caller copies it, from the old number to the new.

    Raises:
        MemoryError: A block is needed and none is free; then nothing has changed.
    """
    # Hole 6 (Copy on write): with one holder, write in place. With several, take a free block, hold
    # it, release the shared one, and put the new number into the table.
    shared = table[place]
    if ref_counts[shared] == 1:
        return False
    if not free:
        raise MemoryError("no block is free")
    own = free.pop()
    ref_counts[shared] -= 1
    ref_counts[own] = 1
    table[place] = own
    return True
    # End of hole 6.

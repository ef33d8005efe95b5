"""Lab 3: reference counts, least recently used, leaves first.

Fill the holes, then run ``ostinato labs check 3``.
"""

from collections import OrderedDict
from typing import Any


class Block:
    """A cached block: who holds it, and how many cached blocks continue it."""

    def __init__(self, name: str, parent: "Block | None" = None) -> None:
        """Cache a block behind its parent; no request holds it yet."""
        self.name = name
        self.parent = parent
        self.ref_count = 0  # requests that hold it
        self.num_children = 0  # cached blocks that continue it
        if parent is not None:
            parent.num_children += 1

    @property
    def is_leaf(self) -> bool:
        """Whether no cached block continues it."""
        return self.num_children == 0


class Policy:
    """Chooses the next block to evict among those that no request holds."""

    def __init__(self) -> None:
        """Begin without a block."""
        self.queue: OrderedDict[Any, None] = OrderedDict()  # the one released longest ago first

    def add(self, entries: list[Any]) -> None:
        """Add blocks that were just released, in the order in which they come."""
        # Hole 1 (Least recently used): they were used last of all, so they go to the end.
        for entry in entries:
            self.queue[entry] = None
            self.queue.move_to_end(entry)
        # End of hole 1.

    def remove(self, entries: list[Any]) -> None:
        """Remove blocks: they are held again, or evicted."""
        # Hole 2 (Least recently used): whatever their place in the queue is.
        for entry in entries:
            del self.queue[entry]
        # End of hole 2.

    def victim(self) -> Any | None:
        """Return the block to evict, None if there is none; changes nothing."""
        # Hole 3 (Leaves first): the first in the queue that is a leaf.
        return next((entry for entry in self.queue if entry.is_leaf), None)
        # End of hole 3.


def hold(path: list[Block], policy: Policy) -> None:
    """Let a request hold the blocks of a prefix, root first."""
    # Hole 4 (Counting holders): count one more holder of each; what was idle leaves the policy.
    policy.remove([block for block in path if not block.ref_count])
    for block in path:
        block.ref_count += 1
    # End of hole 4.


def release(path: list[Block], policy: Policy) -> None:
    """Let a request go that held the blocks of a prefix, root first.

    Raises:
        ValueError: One of them is not held; then nothing has changed.
    """
    # Hole 5 (Counting holders): count one holder less, from the tail to the root, and add the
    # blocks that have no holder any more to the policy in that order, in one call.
    if any(not block.ref_count for block in path):
        raise ValueError("a block is released that is not held")
    for block in path:
        block.ref_count -= 1
    policy.add([block for block in reversed(path) if not block.ref_count])
    # End of hole 5.


def make_room(num_blocks: int, policy: Policy) -> list[Block]:
    """Evict ``num_blocks`` blocks, all or none, and return them, first victim first."""
    # Hole 6 (Evict: all or nothing): an evicted block leaves the policy, and its parent has a
    # child less, so that it may be the next leaf. Only blocks of the policy can go.
    if num_blocks > len(policy.queue):
        return []
    evicted: list[Block] = []
    while len(evicted) < num_blocks and (block := policy.victim()) is not None:
        policy.remove([block])
        if block.parent is not None:
            block.parent.num_children -= 1
        evicted.append(block)
    return evicted
    # End of hole 6.

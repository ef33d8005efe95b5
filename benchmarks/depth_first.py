"""Depth-first order: requests that share a prefix are served one after another.

The prompts that wait are the paths of a tree. A depth-first walk over it visits those that share
a prefix one after another, so that a prefix is computed, used by all, and may then be evicted
(SGLang shows that for a batch this order has the best possible hit ratio: arXiv 2312.07104,
theorem 3.1). Longest prefix first comes close to it while the prefix of each branch is cached,
and not at all in a step in which nothing is cached yet, since it ranks once per step.

At each fork the branch with the longest cached prefix comes first, then the one with the most
requests, then the one with the earliest::

    waiting, by arrival     the tree                    the walk
    1  doc A  question x    ─┬─ doc A ─┬─ x   1         3   doc B is cached
    2  doc C  question x     │         └─ y   4         1
    3  doc B  question x     ├─ doc B ─── x   3         4   A has two requests
    4  doc A  question y     └─ doc C ─── x   2         2

Sorted packed tokens are such a walk already, with branches in the order of their bytes; the
forks are where neighbours part.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ostinato.core.identity import PrefixKey
from ostinato.core.ids import SequenceId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import NumCachedTokens
from ostinato.scheduling.ranked_orders import RankedOrder

FOREST = -1
"""Depth of the fork at which identities part: nothing is shared between them."""


class DepthFirst(RankedOrder):
    """Serve by priority, then as a depth-first walk meets the prompts, within the bound."""

    def __init__(self, max_overtakes: int, num_cached_tokens: NumCachedTokens) -> None:
        """Weigh branches by a look-up that has no effects."""
        super().__init__(max_overtakes)
        self._num_cached_tokens = num_cached_tokens

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Number those who wait as the walk meets them.

        Cost, for n that wait (``MAX_RANKED`` at most): n look-ups, and O(n log n) comparisons
        of packed tokens.
        """
        walk = depth_first(waiting, [self._num_cached_tokens(s) for s in waiting])
        return {sequence.sequence_id: place for place, sequence in enumerate(walk)}


@dataclass(slots=True)
class Branch:
    """A part of the tree.

    Attributes:
        depth: Tokens that all below it share.
        num_cached: Longest cached prefix below it, in tokens.
        num_requests: Sequences below it.
        first: The earliest of them.
        ends: Who ends where it begins to fork; a second one of the same tokens is a fork of it.
        forks: Branches below it.
    """

    depth: int
    num_cached: int = 0
    num_requests: int = 0
    first: int = 2**63
    ends: Sequence | None = None
    forks: list["Branch"] = field(default_factory=list)

    def add(self, branch: "Branch") -> None:
        """Hang a complete branch below this one."""
        self.num_cached = max(self.num_cached, branch.num_cached)
        self.num_requests += branch.num_requests
        self.first = min(self.first, branch.first)
        self.forks.append(branch)

    @property
    def weight(self) -> tuple[int, int, int]:
        """Its place among its siblings: lower is walked first."""
        return -self.num_cached, -self.num_requests, self.first


def depth_first(waiting: list[Sequence], num_cached: list[int]) -> Iterator[Sequence]:
    """Walk the tree of prompts, shorter ones before those that go on from them.

    Args:
        waiting: In any order.
        num_cached: Cached tokens of each of them.
    """
    texts = [(s.key.identity.encoded, prefix_sort_key(s.key)) for s in waiting]
    order = sorted(range(len(waiting)), key=lambda i: (texts[i], waiting[i].sequence_id))
    # Branches that are still open, from the root to the newest; each is deeper than the last.
    path = [Branch(FOREST)]
    for place, i in enumerate(order):
        if place:
            _close(path, _num_shared(texts[order[place - 1]], texts[i]))
        leaf = Branch(len(waiting[i].key), num_cached[i], 1, waiting[i].sequence_id, waiting[i])
        path.append(leaf)
    _close(path, FOREST)
    return _walk(path[0])


def prefix_sort_key(key: PrefixKey) -> bytes:
    """Return bytes that two sequences have in common as far as they can share KV.

    Four bytes per token; those of an image are its content's, so that other content, in spite
    of the same placeholder tokens, is another branch.
    """
    if not key.images:
        return key.tokens.tobytes()
    text = bytearray(key.tokens.tobytes())
    for image in key.images:
        name = image.length.to_bytes(8, "little") + image.digest
        symbol = hashlib.blake2b(name, digest_size=TOKEN_BYTES).digest()
        text[image.start * TOKEN_BYTES : image.end * TOKEN_BYTES] = symbol * image.length
    return bytes(text)


def _num_shared(left: tuple[bytes, bytes], right: tuple[bytes, bytes]) -> int:
    """Return the depth at which two neighbours part."""
    return num_common_tokens(left[1], right[1]) if left[0] == right[0] else FOREST


def _close(path: list[Branch], depth: int) -> None:
    """Complete the branches that are deeper than a fork, and open the fork if it is new."""
    while path[-1].depth > depth:
        branch = path.pop()
        if path[-1].depth < depth:
            path.append(Branch(depth))
        path[-1].add(branch)


def _walk(root: Branch) -> Iterator[Sequence]:
    """Walk a complete tree, without recursion: a chat's turns nest as deep as they are many."""
    left = [root]
    while left:
        branch = left.pop()
        if branch.ends is not None:
            yield branch.ends
        left += sorted(branch.forks, key=lambda fork: fork.weight, reverse=True)

"""An adversary of policies that learn: it sees the cache, and does the most harm it can.

An adversary knows two kinds of documents, told apart by the lengths of their outputs. It teaches
the policy that one kind comes back soon, where LRU finds it too, so that no lead is won, and that
the other never does; then it asks for just what the policy has parted with on that account. What
it does and when is for Hypothesis to choose, and shrinks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.support.cache.hard_traffic import Asked

KIND_OUTPUTS = (10, 700)
"""Output tokens of the two kinds."""

EACH = 1_000
"""Block ids between two documents."""


Act = tuple[str, tuple[Any, ...]]
"""A method of ``Adversary``, and its arguments."""


def _act(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Act]:
    return st.tuples(st.just(name), st.tuples(*arguments))


_ACTS = st.one_of(
    _act("teach", st.integers(0, 1), st.integers(8, 30), st.integers(1, 3)),
    _act("betray", st.integers(1, 12), st.booleans()),
    _act("tempt", st.integers(0, 1), st.integers(3, 15)),
    _act("wait", st.sampled_from((5.0, 60.0, 600.0))),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What an adversary is going to do.

    Attributes:
        num_blocks: Of the cache.
        length: Blocks of each document.
        acts: One after the other.
    """

    num_blocks: int
    length: int
    acts: list[Act]


PLANS = st.builds(
    Plan, st.integers(6, 16), st.integers(1, 3), st.lists(_ACTS, min_size=4, max_size=10)
)


class Adversary:
    """Requests, made up while it is seen what they do."""

    def __init__(self, lacking: Callable[[], set[int]], length: int) -> None:
        """Begin.

        Args:
            lacking: Blocks that LRU has and the policy has not.
            length: Blocks of each document.
        """
        self._lacking, self._length = lacking, length
        self._number, self._at_s = 0, 0.0
        self._kinds: dict[int, int] = {}
        self._loved: tuple[deque[int], deque[int]] = (deque(), deque())

    def requests(self, acts: list[Act]) -> Iterator[Asked]:
        """Follow a plan."""
        for name, arguments in acts:
            yield from getattr(self, name)(*arguments)

    def teach(self, lost: int, num_rounds: int, num_loved: int) -> Iterator[Asked]:
        """Ask for documents of a kind once, and for some of the other again and again."""
        loved = self._loved[1 - lost]
        while len(loved) < num_loved:
            asked = self._new(1 - lost)
            loved.append(self._number)
            yield asked
        for _ in range(num_rounds):
            yield self._new(lost)
            loved.rotate()
            yield self._ask(loved[0])

    def betray(self, num_documents: int, newest_first: bool) -> Iterator[Asked]:
        """Ask for what was parted with, whole, until nothing is lacking or so often."""
        for _ in range(num_documents):
            documents = {block // EACH for block in self._lacking()}
            if not documents:
                return
            yield self._ask(max(documents) if newest_first else min(documents))

    def tempt(self, kind: int, num_rounds: int) -> Iterator[Asked]:
        """Ask for a new document of a kind, and for what is lacking because of it, so often."""
        for _ in range(num_rounds):
            yield self._new(kind)
            yield from self.betray(1, newest_first=True)

    def wait(self, seconds: float) -> Iterator[Asked]:
        """Ask for nothing for a while: what was learned by age is of another age then."""
        self._at_s += seconds
        return iter(())

    def _new(self, kind: int) -> Asked:
        self._number += 1
        self._kinds[self._number] = kind
        return self._ask(self._number)

    def _ask(self, document: int) -> Asked:
        self._at_s += 1.0
        first = document * EACH
        path = list(range(first, first + self._length))
        return Asked(self._at_s, path, KIND_OUTPUTS[self._kinds[document]])

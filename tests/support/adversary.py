"""An adversary of policies that learn: it sees the cache, and does the most harm it can.

An adversary knows two kinds of documents, told apart by the lengths of their outputs. It teaches
the policy that one kind comes back soon, where LRU finds it too, so that no lead is won, and that
the other never does; then it asks for just what the policy has parted with on that account. What
it does and when is for Hypothesis to choose, and shrinks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.support.hard_traffic import Asked

KIND_OUTPUTS = (10, 700)
"""Output tokens of the two kinds."""

EACH = 1_000
"""Block ids between two documents."""


@dataclass(frozen=True, slots=True)
class Teach:
    """Documents of a kind come once, and of the other again and again.

    Attributes:
        lost: The kind that never comes back.
        num_rounds: Documents of it.
        num_loved: How many documents of the other kind take turns.
    """

    lost: int
    num_rounds: int
    num_loved: int


@dataclass(frozen=True, slots=True)
class Betray:
    """What was parted with is asked for, whole, until nothing is lacking or so often.

    Attributes:
        most: Documents.
        newest_first: Which of them come first.
    """

    most: int
    newest_first: bool


@dataclass(frozen=True, slots=True)
class Tempt:
    """A new document of a kind, and what is lacking now because of it; so many rounds of it."""

    kind: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing for a while; what was learned by age is of another age then."""

    seconds: float


Act = Teach | Betray | Tempt | Wait

_ACTS = st.one_of(
    st.builds(Teach, st.integers(0, 1), st.integers(8, 30), st.integers(1, 3)),
    st.builds(Betray, st.integers(1, 12), st.booleans()),
    st.builds(Tempt, st.integers(0, 1), st.integers(3, 15)),
    st.builds(Wait, st.sampled_from((5.0, 60.0, 600.0))),
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

    def requests(self, plan: list[Act]) -> Iterator[Asked]:
        """Follow a plan."""
        for act in plan:
            match act:
                case Teach(lost, num_rounds, num_loved):
                    yield from self._teach(lost, num_rounds, num_loved)
                case Betray(most, newest_first):
                    yield from self._betray(most, newest_first)
                case Tempt(kind, num_rounds):
                    for _ in range(num_rounds):
                        yield self._new(kind)
                        yield from self._betray(1, newest_first=True)
                case Wait(seconds):
                    self._at_s += seconds

    def _teach(self, lost: int, num_rounds: int, num_loved: int) -> Iterator[Asked]:
        loved = self._loved[1 - lost]
        while len(loved) < num_loved:
            asked = self._new(1 - lost)
            loved.append(self._number)
            yield asked
        for _ in range(num_rounds):
            yield self._new(lost)
            loved.rotate()
            yield self._ask(loved[0])

    def _betray(self, most: int, newest_first: bool) -> Iterator[Asked]:
        for _ in range(most):
            documents = {block // EACH for block in self._lacking()}
            if not documents:
                return
            yield self._ask(max(documents) if newest_first else min(documents))

    def _new(self, kind: int) -> Asked:
        self._number += 1
        self._kinds[self._number] = kind
        return self._ask(self._number)

    def _ask(self, document: int) -> Asked:
        self._at_s += 1.0
        first = document * EACH
        path = list(range(first, first + self._length))
        return Asked(self._at_s, path, KIND_OUTPUTS[self._kinds[document]])

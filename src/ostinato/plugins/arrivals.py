"""Notes requests in the order in which they come, to be replayed under the built-in policies.

Once per step the scheduler shows its order who waits; a sequence that is new there has arrived.
The first ``MAX_ARRIVALS`` are kept, or fewer if their prompts exceed ``MAX_TOKENS`` together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ostinato.core.ids import SequenceId
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import StepRoom, WaitingOrder

MAX_ARRIVALS = 2_000
MAX_TOKENS = 2_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the step at which it was first seen."""

    sequence: Sequence
    step: int


class NotedArrivals(WaitingOrder):
    """Another order, and a note of each request that comes."""

    def __init__(self, order: WaitingOrder) -> None:
        """Wrap an order."""
        self.order = order
        self.admitted, self.planned = order.admitted, order.planned  # type: ignore[method-assign]
        self.arrivals: list[Arrival] = []
        self.num_steps, self._num_tokens, self._last = 0, 0, -1

    def divide(
        self, prefilling: list[Sequence], waiting: list[Sequence], room: StepRoom
    ) -> dict[SequenceId, int]:
        """Note who is new, and divide the step as the order does."""
        self.num_steps += 1
        new = [one for one in waiting if one.sequence_id > self._last and not one.index]
        for sequence in sorted(new, key=lambda one: one.sequence_id):
            self._note(sequence)
        return self.order.divide(prefilling, waiting, room)

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk in the order's order."""
        return self.order.candidates(waiting)

    def _note(self, sequence: Sequence) -> None:
        self._last = sequence.sequence_id
        self._num_tokens += sequence.num_prompt_tokens
        if len(self.arrivals) < MAX_ARRIVALS and self._num_tokens <= MAX_TOKENS:
            self.arrivals.append(Arrival(sequence, self.num_steps))


def arrivals_of(order: WaitingOrder) -> list[Arrival]:
    """Return what was noted inside an order, which others may be wrapped around."""
    inner: Any = order
    while inner is not None and not isinstance(inner, NotedArrivals):
        inner = getattr(inner, "order", None)
    return [] if inner is None else inner.arrivals[:]

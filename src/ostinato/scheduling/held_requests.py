"""Waiting requests that are passed over for now, such as those whose prefix is being loaded.

A held request keeps its place in the queue; once released, it is tried in its turn.
"""

from collections.abc import Iterable, Iterator

from ostinato.core.ids import RequestId, SequenceId
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import StepRoom, WaitingOrder

HeldRequests = set[RequestId]
"""Names of requests that may not be admitted yet; shared with the one who holds them."""


class SkipHeld(WaitingOrder):
    """Another order, without the requests that are held."""

    def __init__(self, order: WaitingOrder, held: Iterable[HeldRequests]) -> None:
        """Wrap an order; a request in any of the sets is passed over."""
        self.order, self._held = order, tuple(held)
        self.admitted, self.planned = order.admitted, order.planned  # type: ignore[method-assign]

    def divide(
        self, prefilling: list[Sequence], waiting: list[Sequence], room: StepRoom
    ) -> dict[SequenceId, int]:
        """Divide the step among the others."""
        return self.order.divide(prefilling, self._ready(waiting), room)

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the others in their order."""
        return self.order.candidates(self._ready(waiting))

    def _ready(self, waiting: list[Sequence]) -> list[Sequence]:
        for held in filter(None, self._held):
            waiting = [one for one in waiting if one.request.request_id not in held]
        return waiting

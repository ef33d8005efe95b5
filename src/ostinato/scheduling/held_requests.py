"""Waiting requests that are passed over for now, such as those whose prefix is being loaded.

A held request keeps its place in the queue; once released, it is tried in its turn.
"""

from collections.abc import Iterator

from ostinato.core.ids import RequestId
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import WaitingOrder

HeldRequests = set[RequestId]
"""Names of requests that may not be admitted yet; shared with the one who holds them."""


class SkipHeld(WaitingOrder):
    """Another order, without the requests that are held."""

    def __init__(self, order: WaitingOrder, held: HeldRequests) -> None:
        """Wrap an order."""
        self._order, self._held = order, held
        self.admitted, self.planned = order.admitted, order.planned  # type: ignore[method-assign]

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the others in their order."""
        if self._held:
            waiting = [one for one in waiting if one.request.request_id not in self._held]
        return self._order.candidates(waiting)

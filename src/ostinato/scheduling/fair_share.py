"""Fair share: the tenant that was served least is next.

Each tenant (``cache_salt``) has a counter of the tokens that went through the model for it,
prompt and output alike; what is read from the cache costs nothing. The tenant with the lowest
counter is next: the Virtual Token Counter of Sheng et al., *Fairness in Serving Large Language
Models*, arXiv 2401.00588, without its weights. Two rules keep time in it:

* Idle time is not saved up: a tenant that begins to wait is lifted to the lowest counter among
  those that already did, so that an idle hour is worth nothing.
* Debts end when no tenant waits: then all counters are level again.
"""

import heapq
from collections.abc import Iterable, Iterator

from ostinato.sched.sequence import Sequence
from ostinato.scheduling.ranked_orders import RankedOrder

MAX_TENANTS = 4096
"""Counters that are kept of tenants that do not wait; above that, the lowest are forgotten."""


class FairShare(RankedOrder):
    """Serve by priority, then the tenant that was served least; each tenant's by arrival.

    The bound on waiting is a tenant's, not a request's: the first of each tenant is
    overtaken by later ones of others ``max_overtakes`` times at most. If it were that of each
    request, then a flood would be overdue as a whole after that many, and starve the others.

    Cost per step: O(requests that wait), and O(log tenants) for each that is tried.
    """

    def __init__(self, max_overtakes: int) -> None:
        """Start with all tenants level."""
        super().__init__(max_overtakes)
        self._served: dict[bytes, int] = {}
        self._min_served = 0  # the lowest counter among those who waited in the last step

    def num_served_tokens(self, tenant: bytes) -> int:
        """Return a tenant's counter; that of one who is not known is the lowest."""
        return max(self._min_served, self._served.get(tenant, 0))

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the overdue by arrival, then the first of the tenant with the lowest counter.

        A sequence that is admitted on the way counts at once.
        """
        self._update_virtual_time({tenant_of(sequence) for sequence in waiting})
        return self._walk(waiting)

    def overtaken(self, before: list[Sequence]) -> Iterable[Sequence]:
        """Return the first of each tenant."""
        return [queue[0] for queue in _queues(before).values()]

    def planned(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the tokens of this step to the tenant's counter."""
        tenant = tenant_of(sequence)
        self._served[tenant] = self.num_served_tokens(tenant) + num_tokens

    def _update_virtual_time(self, tenants: set[bytes]) -> None:
        """Lift those who wait to the lowest counter of the last step, and find that of this one.

        Lifting moves only who began to wait since: all others are at that counter or above.
        """
        if not tenants:
            self._served.clear()
            return
        lifted = {tenant: self.num_served_tokens(tenant) for tenant in tenants}
        self._served |= lifted
        self._min_served = min(lifted.values())
        if len(self._served) > len(tenants) + MAX_TENANTS:
            self._remove(tenants)

    def _remove(self, tenants: set[bytes]) -> None:
        """Forget the lower half of the counters of those who do not wait."""
        absent = sorted(self._served.keys() - tenants, key=self._served.__getitem__)
        for tenant in absent[: len(absent) // 2 + 1]:
            del self._served[tenant]

    def _walk(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        queues = [queue[::-1] for queue in _queues(waiting).values()]
        heap: list[tuple[int, bool, int, int, list[Sequence]]] = []
        self._has_newly_overdue = True
        while queues:
            if self._has_newly_overdue:
                heap = [self._entry(queue) for queue in queues if queue]
                heapq.heapify(heap)
                self._has_newly_overdue = False
            if not heap:
                return
            queue = heapq.heappop(heap)[-1]
            yield queue.pop()
            if queue:
                heapq.heappush(heap, self._entry(queue))

    def _entry(self, queue: list[Sequence]) -> tuple[int, bool, int, int, list[Sequence]]:
        """Return the place of a tenant's first, which is the last of its list."""
        first = queue[-1]
        on_time = first.num_overtakes < self._max_overtakes
        served = self.num_served_tokens(tenant_of(first)) if on_time else 0
        return first.request.priority, on_time, served, first.sequence_id, queue


def tenant_of(sequence: Sequence) -> bytes:
    """Return whose request it is; those without a salt are one tenant."""
    return sequence.request.identity.owner


def _queues(waiting: list[Sequence]) -> dict[tuple[int, bytes], list[Sequence]]:
    """Sort sequences into one queue per priority and tenant, each by arrival."""
    queues: dict[tuple[int, bytes], list[Sequence]] = {}
    for sequence in waiting:
        queues.setdefault((sequence.request.priority, tenant_of(sequence)), []).append(sequence)
    return queues

"""For whose work requests wait, from their arrival to their first token.

The time of a step is split among its sequences by the price list; what a request has waited for is
the difference of two totals, so that a step costs nothing for each request that waits.
"""

from collections import OrderedDict
from dataclasses import dataclass

from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import StepPlan
from ostinato.observe.explanation import Wait
from ostinato.sched.sequence import Sequence
from ostinato.scheduling.learned_prices import LearnedPrices


@dataclass(slots=True)
class _Open:
    """A request without a first token: totals when it came, and its own work since."""

    tenant: bytes
    arrival_s: float
    all_s: float
    tenant_s: float
    own_s: float = 0.0


class WaitBook:
    """Accounts of waiting requests, and what the last ``num_kept`` waited for."""

    def __init__(self, prices: LearnedPrices, num_kept: int) -> None:
        """Start without requests."""
        self._prices, self._num_kept = prices, num_kept
        self._open: dict[SequenceId, _Open] = {}
        self._tenants: dict[bytes, float] = {}
        self._all_s = 0.0
        self._waits: OrderedDict[RequestId, Wait] = OrderedDict()

    def begin(self, sequence: Sequence, now_s: float) -> None:
        """Note a request that has arrived."""
        tenant = sequence.request.identity.owner
        tenant_s = self._tenants.setdefault(tenant, 0.0)
        self._open[sequence.sequence_id] = _Open(tenant, now_s, self._all_s, tenant_s)

    def add_step(self, plan: StepPlan, seconds: float) -> None:
        """Split the time of a step among those whose work it was."""
        if not self._open:
            self._tenants.clear()
            return
        prices = self._prices.now
        works = []
        for s in plan.sequences:
            num_tokens = len(s.tokens)
            works.append(num_tokens if prices is None else prices.prompt_s(s.start, num_tokens))
        each_s = seconds / max(sum(works), 1e-12)
        for scheduled, work in zip(plan.sequences, works, strict=True):
            tenant = scheduled.identity.owner
            if tenant in self._tenants:  # of others only the sum is asked for
                self._tenants[tenant] += work * each_s
            if (account := self._open.get(scheduled.sequence_id)) is not None:
                account.own_s += work * each_s
        self._all_s += seconds

    def end(self, sequence: Sequence, now_s: float) -> None:
        """Close the account of a request, at its first token or its end."""
        account = self._open.pop(sequence.sequence_id, None)
        if account is None or not self._num_kept:
            return
        steps_s = self._all_s - account.all_s
        tenant_s = self._tenants.get(account.tenant, 0.0) - account.tenant_s
        wait = Wait(
            now_s - account.arrival_s,
            account.own_s,
            max(0.0, tenant_s - account.own_s),
            max(0.0, steps_s - tenant_s),
        )
        self._waits[sequence.request.request_id] = wait
        if len(self._waits) > self._num_kept:
            self._waits.popitem(last=False)

    def erase(self, tenant: bytes) -> None:
        """Forget a tenant whose requests have ended."""
        self._tenants.pop(tenant, None)

    def wait_of(self, request_id: str) -> Wait | None:
        """Return what a request waited for, if it is remembered."""
        return self._waits.get(RequestId(request_id))

"""The newest decisions, for explanations and the page."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ostinato.router import Decision

MOST_KEPT = 1024


@dataclass(slots=True)
class Kept:
    """A decision and its result.

    Attributes:
        decision: The decision.
        tenant: The request's tenant.
        time_s: Its time, in seconds since 1970.
        status: ``running``, ``finished``, ``failed``, or ``cancelled``.
        cached_tokens: Hits reported by the worker; None if not reported.
    """

    decision: Decision
    tenant: str
    time_s: float
    status: str = "running"
    cached_tokens: int | None = None

    def row(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        decision = self.decision
        return {
            "decision": decision.number,
            "time_s": round(self.time_s, 3),
            "tenant": self.tenant,
            "worker": decision.worker,
            "state": decision.state.value,
            "policy": decision.policy,
            "num_tokens": decision.num_tokens,
            "expected_cached_tokens": decision.expected_cached_tokens,
            "tokens_to_compute": decision.tokens_to_compute,
            "cached_tokens": self.cached_tokens,
            "reason": decision.reason,
            "follows": decision.follows,
            "status": self.status,
        }


class Decisions:
    """A bounded number of decisions, the oldest forgotten first."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        """Start empty; ``most`` are kept."""
        self.most = most
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def taken(self, decision: Decision, tenant: str) -> Kept:
        """Keep one more."""
        kept = self._kept[decision.number] = Kept(decision, tenant, time.time())
        if len(self._kept) > self.most:
            self._kept.popitem(last=False)
        return kept

    def find(self, number: int) -> Kept | None:
        """Return one by its number, if it is kept."""
        return self._kept.get(number)

    def newest(self, most: int) -> list[Kept]:
        """Return the newest ones, the newest first."""
        found: list[Kept] = []
        for kept in reversed(self._kept.values()):
            if len(found) == most:
                break
            found.append(kept)
        return found


def candidate_rows(decision: Decision) -> list[dict[str, Any]]:
    """Return what each worker would have had to do, as JSON has it."""
    return [
        {
            "worker": candidate.worker,
            "state": candidate.state.value,
            "cached_tokens": candidate.cached_tokens,
            "expected_tokens": candidate.expected_tokens,
            "tokens_to_compute": candidate.tokens_to_compute,
            "load_tokens": round(candidate.load_tokens, 1),
            "score": round(candidate.score, 3),
        }
        for candidate in decision.candidates
    ]

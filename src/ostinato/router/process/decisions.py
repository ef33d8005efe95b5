"""The newest decisions, for explanations and the page."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from ostinato.router.policy import Decision

MAX_RECORDS = 1024


@dataclass(slots=True)
class DecisionRecord:
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
        """Return it as JSON."""
        fields = msgspec.to_builtins(self.decision)
        del fields["candidates"]
        return {
            "decision": fields.pop("number"),
            "time_s": round(self.time_s, 3),
            "tenant": self.tenant,
            **fields,
            "cached_tokens": self.cached_tokens,
            "status": self.status,
        }

    def candidate_rows(self) -> list[dict[str, Any]]:
        """Return the cost at each worker, as JSON."""
        return [
            {**msgspec.to_builtins(each), "score": round(each.score, 3)}
            for each in self.decision.candidates
        ]


class DecisionLog:
    """The newest ``MAX_RECORDS`` decisions."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, DecisionRecord] = OrderedDict()

    def add(self, decision: Decision, tenant: str) -> DecisionRecord:
        """Add a decision."""
        record = self._records[decision.number] = DecisionRecord(decision, tenant, time.time())
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)
        return record

    def find(self, number: int) -> DecisionRecord | None:
        """Return a decision by its number; None if unknown."""
        return self._records.get(number)

    def newest(self, limit: int) -> list[DecisionRecord]:
        """Return up to ``limit`` decisions, the newest first."""
        return list(islice(reversed(self._records.values()), limit))

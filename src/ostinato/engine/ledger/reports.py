"""What the ledger did to each of the last requests, for explanations."""

import threading
from collections import OrderedDict

from ostinato.core.identity import tenant_of
from ostinato.engine.ledger.continuation import TurnReport


class ReportBook:
    """The reports of the last requests, by request id; safe in any thread."""

    def __init__(self, max_reports: int) -> None:
        """Start empty; the oldest of more than ``max_reports`` is dropped."""
        self._max_reports = max_reports
        self._reports: OrderedDict[str, tuple[bytes, TurnReport]] = OrderedDict()
        self._guard = threading.Lock()

    def add(self, request_id: str, salt: bytes, report: TurnReport) -> None:
        """Remember the report of a request of a tenant."""
        with self._guard:
            self._reports[request_id] = salt, report
            while len(self._reports) > self._max_reports:
                self._reports.popitem(last=False)

    def of(self, request_id: str) -> TurnReport | None:
        """Return the report of a request; None if it is not remembered."""
        with self._guard:
            return self._reports.get(request_id, (b"", None))[1]

    def erase(self, tenant: bytes) -> None:
        """Remove the reports of a tenant's requests."""
        with self._guard:
            for name, (salt, _) in list(self._reports.items()):
                if tenant in (salt, tenant_of(salt)):
                    del self._reports[name]

    def clear(self) -> None:
        """Remove all reports."""
        with self._guard:
            self._reports.clear()

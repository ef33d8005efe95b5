"""An HTTP request between the two deployments, and its progress.

A call is created in the ingress, routed in the same process by the request router, which runs in
another thread, and then pickled to a replica, without its ``DecisionLink``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ostinato.router.policy import Decision, RouteRequest

Report = Callable[[str, int | None], None]
"""Called with ``first_token``, ``finished`` or ``failed``, and the cached tokens if known."""


class DecisionLink:
    """Links a call in the ingress to its decision in the request router.

    Attributes:
        decision: The latest decision; None before it is routed.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self._report: Report | None = None
        self._has_begun = self._has_ended = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without state."""
        return DecisionLink, ()

    def decided(self, decision: Decision, report: Report) -> None:
        """Set the decision; it has failed if the call has ended already."""
        self.decision, self._report = decision, report
        if self._has_ended:
            report("failed", None)

    def first_token(self) -> None:
        """Record the start of the response."""
        if not self._has_begun and self._report is not None:
            self._has_begun = True
            self._report("first_token", None)

    def ended(self, cached_tokens: int | None = None) -> None:
        """Record the end, once: finished if the response had begun, else failed."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._report is not None:
            self._report("finished" if self._has_begun else "failed", cached_tokens)


@dataclass(slots=True)
class RayCall:
    """An HTTP request.

    Attributes:
        method: HTTP method.
        path: Path and query.
        headers: Headers as in ASGI.
        body: Its body.
        route_request: The router's view of it; None if the shortest queue decides.
        is_comparable: Whether its hits are those of the routed prompt alone.
        progress: Its progress, in the ingress only.
    """

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    route_request: RouteRequest | None = None
    is_comparable: bool = True
    progress: DecisionLink = field(default_factory=DecisionLink)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers, which a replica sends first."""

    status: int
    headers: list[tuple[bytes, bytes]]

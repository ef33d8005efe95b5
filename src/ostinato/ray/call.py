"""One HTTP request between the two deployments, and what becomes of it.

A call is made in the ingress, routed in the same process by the request router, which runs in
another thread, and then pickled to a replica. ``Progress`` stays behind.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ostinato.router import Decision, RouteRequest

Tell = Callable[[str, int | None], None]
"""Is told ``first_token``, ``finished`` or ``failed``, and the cached tokens if they are known."""


class Progress:
    """Links a call in the ingress to its decision in the request router.

    Attributes:
        decision: The latest; None until it is routed.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self._tell: Tell | None = None
        self._has_begun = self._has_ended = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind: a replica gets a new one."""
        return Progress, ()

    def decided(self, decision: Decision, tell: Tell) -> None:
        """Take a decision; it has failed if the call has ended already."""
        self.decision, self._tell = decision, tell
        if self._has_ended:
            tell("failed", None)

    def first_token(self) -> None:
        """Note that the answer began."""
        if not self._has_begun and self._tell is not None:
            self._has_begun = True
            self._tell("first_token", None)

    def ended(self, cached_tokens: int | None = None) -> None:
        """Note the end, once: finished if the answer had begun, else failed."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._tell is not None:
            self._tell("finished" if self._has_begun else "failed", cached_tokens)


@dataclass(slots=True)
class Call:
    """An HTTP request.

    Attributes:
        method: HTTP method.
        path: With its query.
        headers: As ASGI has them.
        body: As it came.
        asked: What the router is asked; None where the shortest queue will do.
        progress: For the ingress and the request router.
    """

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    asked: RouteRequest | None = None
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, slots=True)
class Head:
    """What a replica sends before the bytes of its answer."""

    status: int
    headers: list[tuple[bytes, bytes]]

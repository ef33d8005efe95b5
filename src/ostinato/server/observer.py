"""The port of observers: what they learn of each request.

Metrics, spans, recorders and quotas watch the one path that every completion takes. An observer is
called in the event loop: it notes and returns, and never waits.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ostinato.engine.outputs import RequestOutput
from ostinato.server.call import GenerateCall
from ostinato.server.callers import Caller
from ostinato.server.errors import ApiError
from ostinato.tenants.terms import LeaseReceipt


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request on its way.

    Attributes:
        request_id: Of the engine.
        call: What was asked.
        caller: By whom.
        salt: Whose cache it uses.
        accepted_s: When the server took it in, by ``time.monotonic``.
        output: What there is of it so far; None before its first token.
        first_token_s: When its first output was there, by the same clock; None before.
        gaps_s: Seconds from each output to the next one.
        error: What it ended with; None while it runs, and if it went well.
        is_gone: Whether its reader went away before its end.
        lease: What became of the wish to keep its prompt; None without one.
    """

    request_id: str
    call: GenerateCall
    caller: Caller
    salt: str
    accepted_s: float
    output: RequestOutput | None = None
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    error: ApiError | None = None
    is_gone: bool = False
    lease: LeaseReceipt | None = None
    _last_s: float = 0.0

    def note(self, output: RequestOutput, now_s: float) -> bool:
        """Keep the newest output and when it came; returns whether it is the first."""
        is_first, self.output = self.output is None, output
        if is_first:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        return is_first

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from its arrival to its first output, as its caller feels them."""
        return None if self.first_token_s is None else self.first_token_s - self.accepted_s


class Observer(Protocol):
    """Watches requests; of each, one call of ``accepted`` and one of ``finished``."""

    def accepted(self, record: ServedRequest) -> None:
        """Note that a request was taken in."""
        ...

    def first_token(self, record: ServedRequest) -> None:
        """Note that its first output is there; not called if it fails before."""
        ...

    def finished(self, record: ServedRequest) -> None:
        """Note that it ended, normally, with an error or because the client disconnected."""
        ...

    def refused(self, caller: Caller, call: GenerateCall, error: ApiError) -> None:
        """Note that a request was not taken in: the queue is full, or a limit is reached."""
        ...


@runtime_checkable
class ForgetsTenants(Protocol):
    """An observer that remembers something of tenants, and can forget it."""

    def forget(self, tenant: str) -> bool:
        """Leave nothing of a tenant; returns whether there was anything."""
        ...

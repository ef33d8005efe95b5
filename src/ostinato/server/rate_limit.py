"""Limits of requests and tokens per minute.

Concurrent continuations are counted. Tokens are a bucket that refills within a minute: a request is
admitted while the bucket is not empty, and its tokens are taken out once known, the prompt's with
the first token and the answer's at the end; so the bucket may go into debt, and the next requests
are refused until it has refilled.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.engine.outputs import RequestOutput
from ostinato.server.callers import NO_LIMITS, Caller
from ostinato.server.errors import ApiError

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Use:
    """The use of one tenant.

    Attributes:
        num_live: Unfinished continuations.
        tokens: Tokens in the bucket; negative in debt.
        filled_s: When it was last refilled, by the clock.
    """

    num_live: int
    tokens: float
    filled_s: float


class RateLimit:
    """Enforces the limits of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with full buckets; the clock is monotonic, in seconds."""
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, caller: Caller, num_sequences: int) -> None:
        """Admit a request's continuations, until ``leave``.

        Raises:
            ApiError: A limit of the tenant is reached (429), or below the request's size (400).
        """
        limits = caller.limits
        if limits == NO_LIMITS:
            return
        use = self._use(caller)
        most = limits.max_requests
        if most is not None and num_sequences > most:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} continuations, and this key may have "
                f"{most} at once: ask for fewer",
                code="too_many_continuations",
            )
        if most is not None and use.num_live + num_sequences > most:
            raise _too_much(
                f"{use.num_live} of {most} continuations of this key are running or waiting", 1
            )
        if limits.tokens_per_minute is not None and use.tokens <= 0:
            wait_s = math.floor(-use.tokens / limits.tokens_per_minute * _MINUTE_S) + 1
            raise _too_much(
                f"this key may use {limits.tokens_per_minute} tokens per minute", wait_s
            )
        use.num_live += num_sequences

    def charge(self, caller: Caller, num_tokens: int) -> None:
        """Take used tokens out of a tenant's bucket."""
        if caller.limits.tokens_per_minute is not None:
            self._use(caller).tokens -= num_tokens

    def leave(self, caller: Caller, num_sequences: int, output: RequestOutput | None) -> None:
        """End continuations, and charge their generated tokens."""
        if caller.limits == NO_LIMITS:
            return
        use = self._use(caller)
        use.num_live = max(0, use.num_live - num_sequences)
        if output is not None:
            self.charge(caller, sum(len(part.token_ids) for part in output.outputs))

    def remove(self, tenant: str) -> None:
        """Remove a tenant without unfinished requests."""
        use = self._uses.get(tenant)
        if use is not None and not use.num_live:
            del self._uses[tenant]

    def _use(self, caller: Caller) -> _Use:
        """Return a tenant's use, with its bucket refilled up to now."""
        now, rate = self._clock(), caller.limits.tokens_per_minute or 0
        use = self._uses.setdefault(caller.tenant, _Use(0, float(rate), now))
        use.tokens = min(float(rate), use.tokens + (now - use.filled_s) * rate / _MINUTE_S)
        use.filled_s = now
        return use


def _too_much(what: str, wait_s: int) -> ApiError:
    seconds = "second" if wait_s == 1 else "seconds"
    return ApiError(
        429,
        f"{what}: retry in {wait_s} {seconds}",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(wait_s)},
    )

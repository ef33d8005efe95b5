"""Limits of requests and tokens per minute.

Concurrent continuations are counted, of each tenant and of all. A tenant without a limit of its own
may have as many as are free, at a ``key_share`` of a half; so one busy tenant has at most a half of
the places, two have a third each, and a part is always free for another one.

Tokens are a bucket that refills within a minute: a request is
admitted while the bucket is not empty, and its tokens are taken out once known, the prompt's with
the first token and the answer's at the end; so the bucket may go into debt, and the next requests
are refused until it has refilled.

Source: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches
(IEEE/ACM Transactions on Networking, 1998), for shares of what is free.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.server.access.callers import Caller
from ostinato.server.errors import ApiError

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Use:
    """The use of one tenant.

    Attributes:
        tokens: Tokens in the bucket; negative in debt.
        filled_s: When it was last refilled, by the clock.
    """

    tokens: float
    filled_s: float


class RateLimit:
    """Enforces the limits of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with full buckets; the clock is monotonic, in seconds."""
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self._live: Counter[str] = Counter()  # unfinished continuations by tenant
        self.num_live = 0  # of all

    def has_room(self, caller: Caller, num_sequences: int, max_requests: int, share: float) -> bool:
        """Return whether a tenant's share of ``max_requests`` has room for more continuations."""
        if not caller.tenant or caller.limits.max_requests is not None or share == 1:
            return True
        num_own = self._live[caller.tenant] + num_sequences
        num_free = max_requests - self.num_live - num_sequences
        return num_own <= max(1, num_free * share / (1 - share))

    def enter(self, caller: Caller, num_sequences: int) -> None:
        """Admit a request's continuations, until ``leave``.

        Raises:
            ApiError: A limit of the tenant is reached (429), or below the request's size (400).
        """
        limits, num_live = caller.limits, self._live[caller.tenant]
        limit = limits.max_requests
        if limit is not None and num_sequences > limit:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} continuations, and this key may have "
                f"{limit} at once: ask for fewer",
                code="too_many_continuations",
            )
        if limit is not None and num_live + num_sequences > limit:
            raise _too_much(
                f"{num_live} of {limit} continuations of this key are running or waiting", 1
            )
        if limits.tokens_per_minute is not None and (tokens := self._use(caller).tokens) <= 0:
            wait_s = math.floor(-tokens / limits.tokens_per_minute * _MINUTE_S) + 1
            raise _too_much(
                f"this key may use {limits.tokens_per_minute} tokens per minute", wait_s
            )
        self._live[caller.tenant] += num_sequences
        self.num_live += num_sequences

    def charge(self, caller: Caller, num_tokens: int) -> None:
        """Take used tokens out of a tenant's bucket."""
        if caller.limits.tokens_per_minute is not None:
            self._use(caller).tokens -= num_tokens

    def leave(self, caller: Caller, num_sequences: int) -> None:
        """End continuations."""
        self.num_live -= num_sequences
        self._live[caller.tenant] -= num_sequences
        if not self._live[caller.tenant]:
            del self._live[caller.tenant]

    def remove(self, tenant: str) -> None:
        """Remove a tenant without unfinished requests."""
        if not self._live[tenant]:
            self._uses.pop(tenant, None)

    def _use(self, caller: Caller) -> _Use:
        """Return a tenant's use, with its bucket refilled up to now."""
        now, rate = self._clock(), caller.limits.tokens_per_minute or 0
        use = self._uses.setdefault(caller.tenant, _Use(float(rate), now))
        use.tokens = min(float(rate), use.tokens + (now - use.filled_s) * rate / _MINUTE_S)
        use.filled_s = now
        return use


def _too_much(what: str, wait_s: int) -> ApiError:
    seconds = "second" if wait_s == 1 else "seconds"
    return ApiError(
        429,
        f"{what}: retry in {wait_s} {seconds}",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(wait_s)},
    )

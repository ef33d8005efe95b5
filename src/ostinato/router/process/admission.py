"""Limits concurrent requests and bytes, per caller and in total."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from ostinato.router.policy import RouteRequest
from ostinato.router.process.config import FleetConfig
from ostinato.router.process.routing_fields import RoutingFields
from ostinato.server.access.callers import Caller, Callers
from ostinato.server.access.rate_limit import RateLimit
from ostinato.server.errors import ApiError, body_in_pieces, body_too_long, body_too_slow, stopping

_MAX_SMALL_PIECES = 1024
_MIN_PIECE_BYTES = 64
"""Pieces of a body beyond the first ones have at least this many bytes on average: each costs the
event loop the same, whatever its length."""


@dataclass(slots=True)
class Job:
    """One unfinished request.

    Attributes:
        request: The client's request.
        caller: Its sender.
        begun_s: When it arrived, by ``time.perf_counter``.
        body: Its body.
        num_bytes: Bytes of the body received so far.
        prompt: The prompt, for routing; None if routing does not depend on one.
        route_request: The router's view of it; None if routing does not depend on a prompt.
        tried: Workers that failed.
        was_repeated: Whether a failed worker was tried again.
        shows_hits: Whether the caller may learn the expected hits.
    """

    request: web.Request
    caller: Caller
    begun_s: float
    body: bytes = b""
    num_bytes: int = 0
    prompt: RoutingFields | None = None
    route_request: RouteRequest | None = None
    tried: set[str] = field(default_factory=set)
    was_repeated: bool = False
    shows_hits: bool = True


class Admission:
    """Admits and limits requests.

    Attributes:
        is_draining: Whether new requests are refused.
        num_live: Unfinished requests.
        rate_limit: Limits of keys, for the whole fleet.
    """

    def __init__(self, config: FleetConfig, callers: Callers) -> None:
        self.is_draining = False
        self.rate_limit = RateLimit()
        self._config = config
        self._callers = callers
        self.num_live = 0
        self._bytes: Counter[str] = Counter()

    def identify(self, request: web.Request) -> Caller:
        """Return the caller.

        Raises:
            ApiError: The key is unknown, or there is none (401).
        """
        return self._callers.identify(request.headers)

    @asynccontextmanager
    async def admit(self, request: web.Request) -> AsyncIterator[Job]:
        """Admit a request within its caller's limits, and read its body.

        Raises:
            ApiError: The router is full or stopping, the caller is unknown or at a limit, or the
                body is too long (413), too slow (408), or one too many of its tenant (429).
        """
        job = self._enter(request)
        try:
            await self._read(job)
            yield job
        finally:
            self._leave(job)

    def _enter(self, request: web.Request) -> Job:
        job = Job(request, self.identify(request), time.perf_counter())
        if self.is_draining:
            raise stopping("the router is shutting down: send the request to another one")
        if self.num_live >= self._config.max_requests:
            raise _too_many("the router is at capacity (--max-requests)")
        self.rate_limit.enter(job.caller, 1)
        self.num_live += 1
        return job

    def _leave(self, job: Job) -> None:
        tenant = job.caller.tenant
        self.num_live -= 1
        self.rate_limit.leave(job.caller, 1)
        self._bytes[tenant] -= job.num_bytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    async def _read(self, job: Job) -> None:
        limit, pieces = self._config.max_body_bytes, []
        announced = job.request.content_length
        if announced is not None and announced > limit:
            raise body_too_long(announced, limit)
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for piece in job.request.content.iter_any():
                    pieces.append(piece)
                    self._count(job, len(piece))
                    if job.num_bytes > limit:
                        raise body_too_long(job.num_bytes, limit)
                    if job.num_bytes < _MIN_PIECE_BYTES * (len(pieces) - _MAX_SMALL_PIECES):
                        raise body_in_pieces(len(pieces), job.num_bytes)
        except TimeoutError:
            raise body_too_slow(self._config.body_timeout_s) from None
        job.body = b"".join(pieces)

    def _count(self, job: Job, num_bytes: int) -> None:
        job.num_bytes += num_bytes
        self._bytes[job.caller.tenant] += num_bytes
        limit = self._config.max_tenant_body_bytes
        if self._bytes[job.caller.tenant] > limit:
            raise _too_many(f"the bodies of this key's requests have more than {limit} bytes")


def _too_many(reason: str) -> ApiError:
    return ApiError(
        429,
        f"{reason}: retry when some of them have finished",
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )

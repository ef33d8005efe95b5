"""Forwards requests to the workers that the router chooses, and their responses.

::

    key ─► body ─► prompt ─► tokens ─► decision ─► worker ─► first byte ─► ... ─► last byte
                                           ▲           │ no answer, 502, 503, 504:
                                           └───────────┘ another worker, while no byte was sent

Bodies and responses are forwarded byte for byte. A request that waits for a first byte is moved if
its worker turns unhealthy. There is no retry after the first byte: if a response breaks off, the
client's connection is closed mid-response, so that the client notices.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
from aiohttp import web
from yarl import URL

from ostinato.core.identity import derive_salt
from ostinato.router.policy import RouteRequest
from ostinato.router.process.admission import Admission, Job
from ostinato.router.process.decisions import DecisionLog, DecisionRecord
from ostinato.router.process.headers import (
    end_to_end,
    headers_to_worker,
    keys_for_worker,
    routing_headers,
    session_of,
)
from ostinato.router.process.metrics import FleetMetrics
from ostinato.router.process.public_prefixes import FleetPrefixes
from ostinato.router.process.routing_fields import RoutingFields
from ostinato.router.process.tokens import RoutingTokenizer
from ostinato.router.process.usage_sniffer import UsageSniffer
from ostinato.router.process.worker import Worker
from ostinato.router.process.worker_pool import ResponseOwner, WorkerPool
from ostinato.server.access.callers import Caller
from ostinato.server.errors import ApiError

_RETRIED_STATUSES = frozenset({502, 503, 504})
_MAX_ERROR_BYTES = 65_536
_PAUSE_S = 0.05


class NoAnswer(Exception):
    """A worker did not answer a request, or answered that it cannot.

    Attributes:
        answer: Its answer, to be forwarded if no other worker does better.
        may_repeat: Whether only the connection was lost, and the worker may be well.
    """

    def __init__(
        self, reason: str, answer: web.Response | None = None, may_repeat: bool = False
    ) -> None:
        super().__init__(reason)
        self.answer = answer
        self.may_repeat = may_repeat

    @classmethod
    def by(cls, worker: Worker, error: Exception) -> "NoAnswer":
        """Record that an exchange with a worker failed before its first byte."""
        worker.failed(error)
        may_repeat = isinstance(error, aiohttp.ServerDisconnectedError | OSError) and not (
            isinstance(error, aiohttp.ClientConnectorError | TimeoutError)
        )
        return cls(type(error).__name__, may_repeat=may_repeat)  # without the worker's address


@dataclass(slots=True)
class Attempt:
    """A request at one worker.

    Attributes:
        job: The request.
        worker: The worker.
        record: Its decision; None if no prompt was routed.
        peek: Usage and id of the response.
    """

    job: Job
    worker: Worker
    record: DecisionRecord | None
    peek: UsageSniffer = field(default_factory=UsageSniffer)


class Proxy:
    """Forwards requests to workers, and responses to clients."""

    def __init__(
        self,
        fleet: WorkerPool,
        admission: Admission,
        tokens: RoutingTokenizer,
        decisions: DecisionLog,
        metrics: FleetMetrics,
        prefixes: FleetPrefixes,
    ) -> None:
        self._fleet = fleet
        self._config = fleet.config
        self._admission = admission
        self._tokens = tokens
        self._decisions = decisions
        self._metrics = metrics
        self._prefixes = prefixes

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Handle a route that is routed by its prompt."""
        async with self._admission.admit(request) as job:
            job.prompt, job.route_request = await self.read(
                request.path, job.body, job.caller, request.headers
            )
            job.shows_hits = self._is_separate or job.caller.may_administer
            return await self._serve(job)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Handle a route for any worker, or for the one that stored a response."""
        async with self._admission.admit(request) as job:
            if job.body and "number" not in request.match_info:
                job.prompt = await self._tokens.read(request.path, job.body, job.caller.tenant)
            return await self._serve(job)

    async def read(
        self, path: str, body: bytes, caller: Caller, headers: Mapping[str, str]
    ) -> tuple[RoutingFields, RouteRequest]:
        """Return the prompt of a request's body, and the router's view of it.

        Raises:
            PromptTooLong: It has too many characters.
            ApiError: It asks for a priority that its caller may not have (400).
        """
        prompt = await self._tokens.read(path, body, caller.tenant)
        caller.check_priority(prompt.priority)  # refused here for workers that know no keys
        is_separate = self._is_separate
        salt = derive_salt(caller.salt, prompt.salt) if is_separate else prompt.salt
        session = session_of(headers, prompt.session)
        session = f"{caller.tenant}\0{session}" if session and caller.tenant else session
        keys = keys_for_worker(headers, self._config)
        view = await self._tokens.request(prompt, salt, caller.tenant, session, keys)
        if is_separate and caller.public_prefixes:
            view = replace(view, held=self._prefixes.cached_tokens(view, caller.public_prefixes))
        return prompt, view

    @property
    def _is_separate(self) -> bool:
        """Whether workers keep their callers' caches apart; else hits reveal what others sent."""
        known = [worker for worker in self._fleet.workers.values() if worker.is_well]
        return not self._config.replace_keys and all(worker.is_ours for worker in known)

    async def send_copy(
        self, record: DecisionRecord, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Send a prompt to the worker of a decision, only to fill its cache."""
        worker, peek, status = self._fleet.workers[record.decision.worker], UsageSniffer(), "failed"
        sent = {**keys_for_worker(headers, self._config), "Content-Type": "application/json"}
        worker.num_live += 1
        try:
            post = self._fleet.session.post(
                worker.spec.url + path, data=body, headers=sent, allow_redirects=False
            )
            async with self._silence_limit(), post as answer:
                peek.see(await answer.read())
                peek.status = answer.status
                status = "finished" if answer.status < 400 else "failed"
        except (aiohttp.ClientError, OSError) as error:
            worker.failed(error)
        finally:
            worker.num_live -= 1
            self._ended(record, status, peek)

    # --- to a worker, and back ---

    async def _serve(self, job: Job) -> web.StreamResponse:
        """Try workers until one answers."""
        last: web.Response | None = None
        reason = "no worker is well"
        for _ in range(self._config.retries + 1):
            choice = await self._choose(job)
            if choice is None and job.tried:  # all were tried: one may have recovered
                await asyncio.sleep(_PAUSE_S)
                job.tried.clear()
                choice = await self._choose(job)
            if choice is None:
                break
            worker, record = choice
            try:
                return await self._try(Attempt(job, worker, record))
            except NoAnswer as error:
                reason, last = f"worker {worker.name}: {error}", error.answer or last
                self._metrics.retries.labels(worker.name).inc()
                if error.may_repeat and not job.was_repeated and await worker.probe():
                    job.was_repeated = True  # the worker had just closed an idle connection
                else:
                    job.tried.add(worker.name)
        if last is not None:
            return last
        raise ApiError(
            503,
            f"no worker answered this request ({reason}): retry in a second",
            code="no_worker",
            headers={"Retry-After": "1"},
        )

    async def _choose(self, job: Job) -> tuple[Worker, DecisionRecord | None] | None:
        """Choose the next worker to try, with the decision if the prompt was routed."""
        fleet = self._fleet
        if job.route_request is None:
            owner = fleet.workers.get(self._owner(job, job.request.match_info.get("number", "")))
            model = job.prompt.model if job.prompt else ""
            if owner is None or owner.name in job.tried or owner.refusal:
                owner = fleet.least_busy(model, job.tried)
            return None if owner is None else (owner, None)
        assert job.prompt is not None, "only prompts are routed"
        decision = None
        if job.prompt.previous:
            name = self._owner(job, job.prompt.previous)
            decision = await fleet.choose_owner(job.route_request, name, job.tried)
        if decision is None:
            decision = await fleet.choose(job.route_request, job.prompt.model, job.tried)
        if decision is None:
            return None
        return fleet.workers[decision.worker], self._decisions.add(decision, job.caller.tenant)

    def _owner(self, job: Job, number: str) -> str:
        """Return the worker that has a stored answer; empty if unknown.

        Raises:
            ApiError: Workers see one key for all callers, and the answer is another caller's.
        """
        owner, caller = self._fleet.owner_of(number), job.caller
        is_guarded = self._config.replace_keys and self._config.keys_file is not None
        is_same_tenant = owner is not None and owner.tenant == caller.tenant
        if number and is_guarded and not is_same_tenant and not caller.may_administer:
            message = f"{number:.100}: this key has no such response, or it is no longer known"
            raise ApiError(404, message, code="not_found")
        return "" if owner is None else owner.worker

    async def _try(self, attempt: Attempt) -> web.StreamResponse:
        """Send a request to its worker.

        Raises:
            NoAnswer: The worker did not answer, and no byte was sent.
        """
        job, worker, peek, status = attempt.job, attempt.worker, attempt.peek, "failed"
        self._metrics.chosen(worker.name, attempt.record, time.perf_counter() - job.begun_s)
        worker.num_live += 1
        try:
            response = await self._exchange(attempt)
            status = "failed" if response.status >= 400 else "finished"
            if peek.number:
                self._fleet.note_owner(peek.number, ResponseOwner(worker.name, job.caller.tenant))
            return response
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        finally:
            worker.num_live -= 1
            self._admission.rate_limit.charge(job.caller, peek.generated_tokens)
            prompt = job.prompt
            is_comparable = prompt is not None and prompt.is_whole
            self._ended(attempt.record, status, peek, is_comparable)

    async def _exchange(self, attempt: Attempt) -> web.StreamResponse:
        job, worker = attempt.job, attempt.worker
        try:
            async with self._first_byte_limit(attempt):
                upstream = await self._fleet.session.request(
                    job.request.method,
                    URL(worker.spec.url + job.request.rel_url.raw_path_qs, encoded=True),
                    data=job.body or None,
                    headers=headers_to_worker(job.request.headers, self._config),
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer.by(worker, error) from error
        try:
            return await self._relay(attempt, upstream)
        finally:
            upstream.close() if not upstream.content.at_eof() else upstream.release()

    async def _relay(
        self, attempt: Attempt, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Forward a response; its head is sent with its first bytes."""
        job, worker, record = attempt.job, attempt.worker, attempt.record
        try:
            async with self._first_byte_limit(attempt):
                piece = await upstream.content.readany()
                if upstream.status in _RETRIED_STATUSES:
                    piece += await upstream.content.read(_MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer.by(worker, error) from error
        headers = end_to_end(upstream.headers)
        headers["x-ostinato-worker"] = worker.name
        if record is not None:
            headers["x-ostinato-decision"] = str(record.decision.number)
            headers.update(routing_headers(record.decision, job.shows_hits))
        if upstream.status in _RETRIED_STATUSES:
            answer = web.Response(status=upstream.status, headers=headers, body=piece)
            raise NoAnswer(f"it answered {upstream.status}", answer)
        attempt.peek.status = upstream.status
        if record is not None and upstream.status < 400:
            self._fleet.router.first_token(record.decision)
            assert job.route_request is not None, "a decision is about a prompt"
            self._admission.rate_limit.charge(job.caller, job.route_request.num_tokens)
        response = web.StreamResponse(status=upstream.status, headers=headers)
        if (length := upstream.headers.get("content-length")) is not None:
            response.content_length = int(length)
        await response.prepare(job.request)
        while piece:
            attempt.peek.see(piece)
            await self._write(job, response, piece)
            try:
                async with self._silence_limit():
                    piece = await upstream.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                worker.failed(error)
                self._break_off(job, worker)
                return response
        await response.write_eof()
        return response

    async def _write(self, job: Job, response: web.StreamResponse, piece: bytes) -> None:
        """Send the next bytes of a response, unless the client is stalled."""
        try:
            async with self._silence_limit():
                await response.write(piece)
        except TimeoutError:
            if job.request.transport is not None:
                job.request.transport.abort()  # the client would never read what is buffered
            raise

    @asynccontextmanager
    async def _first_byte_limit(self, attempt: Attempt) -> AsyncIterator[None]:
        """Limit the silence before a response; it ends early if the request should be moved."""
        job, waiting = attempt.job, attempt.worker.waiting
        async with self._silence_limit() as limit:
            is_bound = "number" in job.request.match_info or (job.prompt and job.prompt.previous)
            if not is_bound:  # any worker will do
                waiting[limit] = job.prompt.model if job.prompt else "", job.tried
            try:
                yield
            finally:
                waiting.pop(limit, None)

    def _silence_limit(self) -> asyncio.Timeout:
        """Limit a silence; aiohttp's own limit ends at a malformed chunk."""
        return asyncio.timeout(self._config.silence_timeout_s)

    def _break_off(self, job: Job, worker: Worker) -> None:
        """Close a client's connection in the middle of an incomplete response."""
        self._metrics.broken_off.labels(worker.name).inc()
        if job.request.transport is not None:
            job.request.transport.close()

    def _ended(
        self,
        record: DecisionRecord | None,
        status: str,
        peek: UsageSniffer,
        is_comparable: bool = True,
    ) -> None:
        """Report to the router how a request ended, and its hits if they are of the prompt."""
        if record is None:
            return
        router = self._fleet.router
        record.status, record.cached_tokens = status, peek.cached_tokens
        was_computed = 0 < peek.status < 400  # it began to answer
        if was_computed:
            cached_tokens = record.cached_tokens if is_comparable else None
            router.finished(record.decision, self._fleet.clock(), cached_tokens)
        else:
            router.failed(record.decision)
        self._metrics.ended(record, was_computed)

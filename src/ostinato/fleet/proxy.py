"""A request's way: to the worker that the router chooses, and its answer's way back.

::

    key ─► body ─► prompt ─► tokens ─► decision ─► worker ─► first byte ─► ... ─► last byte
                                           ▲           │ no answer, 502, 503, 504:
                                           └───────────┘ another worker, while no byte was sent

Bodies and answers pass byte for byte. After the first byte nothing is tried again: an answer that
breaks off has its connection closed without an end, so that no client takes it for whole.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ostinato.fleet.decisions import Decisions, Kept
from ostinato.fleet.fleet import Fleet
from ostinato.fleet.metrics import FleetMetrics
from ostinato.fleet.peek import Peek
from ostinato.fleet.prompts import Prompt, read_prompt
from ostinato.fleet.tokens import PromptTokens
from ostinato.fleet.worker import Worker
from ostinato.router import RouteRequest
from ostinato.server.callers import Caller, Callers
from ostinato.server.errors import ApiError, stopping

_OF_ONE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect"),
    }
)
_KEYS = ("authorization", "x-api-key")
_OURS = "x-ostinato-"
_ANOTHER_MAY_DO = frozenset({502, 503, 504})
_MOST_ERROR_BYTES = 65_536
_PAUSE_S = 0.05
_THREAD_BYTES = 65_536
"""From this size on a body is read beside the event loop."""


class NoAnswer(Exception):
    """A worker did not answer a request, or said that it cannot.

    Attributes:
        answer: What it said, to be handed on if no other worker does better.
        is_worth_repeating: The connection was lost, and maybe not the worker.
    """

    def __init__(self, reason: str, answer: web.Response | None = None) -> None:
        """Say why."""
        super().__init__(reason)
        self.answer = answer
        self.is_worth_repeating = False

    @classmethod
    def by(cls, worker: Worker, error: Exception) -> "NoAnswer":
        """Note that an exchange with a worker failed before its first byte."""
        made = cls(type(error).__name__)  # clients need not know addresses
        made.is_worth_repeating = isinstance(error, (aiohttp.ServerDisconnectedError, OSError))
        made.is_worth_repeating &= not isinstance(error, aiohttp.ClientConnectorError)
        worker.failed(error)
        return made


@dataclass(slots=True)
class Job:
    """One request under way.

    Attributes:
        request: Of the client.
        caller: Whose it is.
        begun_s: When it came, by ``time.perf_counter``.
        body: As it came.
        num_bytes: Of the body, as far as it came.
        prompt: What decides where it goes; None where nothing does.
        asked: What the router is asked; None where nothing decides.
        tried: Workers that did not answer.
        was_repeated: Whether a worker was asked again that did not answer.
        tells: Whether the caller may know what its worker is expected to have cached.
    """

    request: web.Request
    caller: Caller
    begun_s: float
    body: bytes = b""
    num_bytes: int = 0
    prompt: Prompt | None = None
    asked: RouteRequest | None = None
    tried: set[str] = field(default_factory=set)
    was_repeated: bool = False
    tells: bool = True


class Proxy:
    """Hands requests on to workers, and answers back to clients.

    Attributes:
        is_draining: Whether no more requests are taken.
    """

    def __init__(
        self,
        fleet: Fleet,
        callers: Callers,
        tokens: PromptTokens,
        decisions: Decisions,
        metrics: FleetMetrics,
    ) -> None:
        """Stand before a fleet."""
        self.is_draining = False
        self._fleet = fleet
        self._config = fleet.config
        self._callers = callers
        self._tokens = tokens
        self._decisions = decisions
        self._metrics = metrics
        self._live: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Serve a route whose prompt decides where it goes."""
        job = self._enter(request)
        try:
            await self._read(job)
            job.prompt = await self._prompt(job)
            job.asked, job.tells = await self.ask(job.prompt, job.caller, request.headers)
            return await self._serve(job)
        finally:
            self._leave(job)

    async def hand_on(self, request: web.Request) -> web.StreamResponse:
        """Serve a route that any worker can answer, or the one that gave an answer its name."""
        job = self._enter(request)
        try:
            await self._read(job)
            if job.body and "number" not in request.match_info:
                job.prompt = await self._prompt(job)
            return await self._serve(job)
        finally:
            self._leave(job)

    async def ask(
        self, prompt: Prompt, caller: Caller, headers: Mapping[str, str]
    ) -> tuple[RouteRequest, bool]:
        """Return what the router is asked for a prompt, and whether the caller may know more.

        Where the workers do not keep callers apart, what they have cached tells what others sent.
        """
        is_apart = not self._config.replace_keys and any(
            worker.is_ours for worker in self._fleet.workers.values()
        )
        salt = caller.narrow(prompt.salt) if is_apart else prompt.salt
        session = headers.get("x-session-id", "")[:200]
        keys = self._keys_for_worker(headers)
        asked = await self._tokens.request(prompt, salt, caller.tenant, session, keys)
        return asked, is_apart or caller.may_administer

    async def send_copy(
        self, kept: Kept, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Send a prompt to the worker of a decision, for its cache alone."""
        worker, peek, status = self._fleet.workers[kept.decision.worker], Peek(), "failed"
        worker.num_live += 1
        try:
            async with self._fleet.session.post(
                worker.spec.url + path,
                data=body,
                headers={**self._keys_for_worker(headers), "Content-Type": "application/json"},
                allow_redirects=False,
            ) as answer:
                peek.see(await answer.read())
                peek.status = answer.status
                status = "finished" if answer.status < 400 else "failed"
        except (aiohttp.ClientError, OSError) as error:
            worker.failed(error)
        finally:
            worker.num_live -= 1
            self._ended(kept, status, peek)

    def identify(self, request: web.Request) -> Caller:
        """Return who is calling.

        Raises:
            ApiError: Nobody that is known (401).
        """
        return self._callers.identify(request.headers)

    # --- in ---

    def _enter(self, request: web.Request) -> Job:
        """Let a request in, if its caller may have one more."""
        job = Job(request, self.identify(request), time.perf_counter())
        if self.is_draining:
            raise stopping("the router is shutting down: send the request to another one")
        tenant, most = job.caller.tenant, job.caller.limits.max_requests
        if most is not None and self._live[tenant] >= most:
            raise _too_many(f"{most} requests of this key are under way")
        if self._live.total() >= self._config.max_requests:
            raise _too_many("the router is at capacity (--max-requests)")
        self._live[tenant] += 1
        return job

    def _leave(self, job: Job) -> None:
        tenant = job.caller.tenant
        for counts, number in ((self._live, 1), (self._bytes, job.num_bytes)):
            counts[tenant] -= number
            if not counts[tenant]:
                del counts[tenant]

    async def _read(self, job: Job) -> None:
        """Read a body.

        Raises:
            ApiError: It is too long (413), too slow (408), or its tenant has too many (429).
        """
        most, pieces = self._config.max_body_bytes, []
        announced = job.request.content_length
        if announced is not None and announced > most:
            raise _too_long(announced, most)
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for piece in job.request.content.iter_any():
                    pieces.append(piece)
                    self._hold(job, len(piece))
                    if job.num_bytes > most:
                        raise _too_long(job.num_bytes, most)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._config.body_timeout_s:g} s: send it "
                "faster, or raise --body-timeout",
                code="body_timeout",
            ) from None
        job.body = b"".join(pieces)

    def _hold(self, job: Job, num_bytes: int) -> None:
        job.num_bytes += num_bytes
        self._bytes[job.caller.tenant] += num_bytes
        most = self._config.max_tenant_body_bytes
        if self._bytes[job.caller.tenant] > most:
            raise _too_many(f"the bodies of this key's requests have more than {most} bytes")

    async def _prompt(self, job: Job) -> Prompt:
        path, body = job.request.path, job.body
        if len(body) < _THREAD_BYTES:
            return read_prompt(path, body)
        return await asyncio.to_thread(read_prompt, path, body)

    # --- to a worker, and back ---

    async def _serve(self, job: Job) -> web.StreamResponse:
        """Try workers until one answers."""
        last: web.Response | None = None
        reason = "no worker is well"
        for _ in range(self._config.retries + 1):
            found = self._choose(job)
            if found is None and job.tried:  # all were tried: one may be back
                await asyncio.sleep(_PAUSE_S)
                job.tried.clear()
                found = self._choose(job)
            if found is None:
                break
            worker, kept = found
            try:
                return await self._try(job, worker, kept)
            except NoAnswer as error:
                reason, last = f"worker {worker.name}: {error}", error.answer or last
                self._metrics.retries.labels(worker.name).inc()
                if error.is_worth_repeating and not job.was_repeated and await worker.probe():
                    job.was_repeated = True  # an idle connection that the worker had just closed
                else:
                    job.tried.add(worker.name)
        if last is not None:
            return last
        raise ApiError(
            503,
            f"no worker answers this request ({reason}): try again soon",
            "server_error",
            code="no_worker",
            headers={"Retry-After": "1"},
        )

    def _choose(self, job: Job) -> tuple[Worker, Kept | None] | None:
        """Choose the next worker to try; with the decision, where the prompt decides."""
        fleet = self._fleet
        if job.asked is None:
            number = job.request.match_info.get("number", "")
            owner = fleet.workers.get(fleet.owner_of(number))
            model = job.prompt.model if job.prompt else ""
            if owner is None or owner.name in job.tried:
                owner = fleet.least_busy(model, job.tried)
            return None if owner is None else (owner, None)
        assert job.prompt is not None, "what is asked was read from a prompt"
        decision = None
        if job.prompt.previous:
            name = fleet.owner_of(job.prompt.previous)
            decision = fleet.choose_owner(job.asked, name, job.tried)
        if decision is None:
            decision = fleet.choose(job.asked, job.prompt.model, job.tried)
        if decision is None:
            return None
        return fleet.workers[decision.worker], self._decisions.taken(decision, job.caller.tenant)

    async def _try(self, job: Job, worker: Worker, kept: Kept | None) -> web.StreamResponse:
        """Have one worker answer.

        Raises:
            NoAnswer: It did not, and no byte was sent.
        """
        peek, status = Peek(), "failed"
        self._metrics.chosen(worker.name, kept, time.perf_counter() - job.begun_s)
        worker.num_live += 1
        try:
            response = await self._exchange(job, worker, kept, peek)
            status = "failed" if response.status >= 400 else "finished"
            if peek.number:
                self._fleet.note_owner(peek.number, worker.name)
            return response
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        finally:
            worker.num_live -= 1
            self._ended(kept, status, peek)

    async def _exchange(
        self, job: Job, worker: Worker, kept: Kept | None, peek: Peek
    ) -> web.StreamResponse:
        request = job.request
        try:
            upstream = await self._fleet.session.request(
                request.method,
                URL(worker.spec.url + request.rel_url.raw_path_qs, encoded=True),
                data=job.body or None,
                headers=self._headers_to_worker(request.headers),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer.by(worker, error) from error
        try:
            return await self._relay(job, worker, kept, upstream, peek)
        finally:
            upstream.close() if not upstream.content.at_eof() else upstream.release()

    async def _relay(
        self,
        job: Job,
        worker: Worker,
        kept: Kept | None,
        upstream: aiohttp.ClientResponse,
        peek: Peek,
    ) -> web.StreamResponse:
        """Hand an answer on; its head goes out with its first bytes."""
        try:
            piece = await upstream.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer.by(worker, error) from error
        headers = _end_to_end(upstream.headers)
        headers.update(_told(worker, kept, job.tells))
        if upstream.status in _ANOTHER_MAY_DO:
            piece += await upstream.content.read(_MOST_ERROR_BYTES)
            answer = web.Response(status=upstream.status, headers=headers, body=piece)
            raise NoAnswer(f"it answered {upstream.status}", answer)
        peek.status = upstream.status
        if kept is not None and upstream.status < 400:
            self._fleet.router.first_token(kept.decision, self._fleet.clock())
        response = web.StreamResponse(status=upstream.status, headers=headers)
        if (length := upstream.headers.get("content-length")) is not None:
            response.content_length = int(length)
        await response.prepare(job.request)
        while piece:
            peek.see(piece)
            await response.write(piece)
            try:
                piece = await upstream.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                worker.failed(error)
                self._break_off(job, worker)
                return response
        await response.write_eof()
        return response

    def _break_off(self, job: Job, worker: Worker) -> None:
        """Close a client's connection in the middle of an answer that will not be whole."""
        self._metrics.broken_off.labels(worker.name).inc()
        if job.request.transport is not None:
            job.request.transport.close()

    def _ended(self, kept: Kept | None, status: str, peek: Peek) -> None:
        """Tell the router how a request ended."""
        if kept is None:
            return
        router, now = self._fleet.router, self._fleet.clock()
        kept.status, kept.cached_tokens = status, peek.cached_tokens
        if 0 < peek.status < 400:  # it began to answer, so its prompt was computed
            router.finished(kept.decision, now, kept.cached_tokens)
        else:
            router.failed(kept.decision, now)
        self._metrics.ended(kept)

    # --- headers ---

    def _keys_for_worker(self, headers: Mapping[str, str]) -> dict[str, str]:
        if self._config.replace_keys:
            return {"Authorization": f"Bearer {self._config.worker_key}"}
        return {name: headers[name] for name in _KEYS if name in headers}

    def _headers_to_worker(self, headers: Mapping[str, str]) -> CIMultiDict[str]:
        kept = _end_to_end(headers)
        if self._config.replace_keys:
            for name in _KEYS:
                kept.popall(name, None)
            kept.update(self._keys_for_worker(headers))
        return kept


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that are not for one connection alone, nor ours to set."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in _OF_ONE_CONNECTION
        and low not in named
        and not low.startswith(_OURS)
    )


def _told(worker: Worker, kept: Kept | None, tells: bool) -> dict[str, str]:
    """Return what the answer says of its way."""
    told = {"x-ostinato-worker": worker.name}
    if kept is None:
        return told
    decision = kept.decision
    told["x-ostinato-decision"] = str(decision.number)
    told["x-ostinato-worker-state"] = decision.state.value
    if tells:
        told["x-ostinato-expected-cached-tokens"] = str(decision.expected_cached_tokens)
    return told


def _too_many(reason: str) -> ApiError:
    return ApiError(
        429,
        f"{reason}: wait until some of them have ended",
        kind="rate_limit_error",
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )


def _too_long(num_bytes: int, most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {num_bytes} bytes or more, and at most {most} are taken: send less, or "
        "raise --max-body",
        code="body_too_large",
    )

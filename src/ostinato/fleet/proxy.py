"""Forwards requests to the workers that the router chooses, and their responses.

::

    key ─► body ─► prompt ─► tokens ─► decision ─► worker ─► first byte ─► ... ─► last byte
                                           ▲           │ no answer, 502, 503, 504:
                                           └───────────┘ another worker, while no byte was sent

Bodies and responses are forwarded byte for byte. There is no retry after the first byte: if a
response breaks off, the client's connection is closed without its end, so that the client notices.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import aiohttp
from aiohttp import web
from yarl import URL

from ostinato.fleet.admission import Admission, Job
from ostinato.fleet.decisions import Decisions, Kept
from ostinato.fleet.fleet import Fleet, Owner
from ostinato.fleet.headers import end_to_end, headers_to_worker, keys_for_worker, told_of
from ostinato.fleet.metrics import FleetMetrics
from ostinato.fleet.peek import Peek
from ostinato.fleet.prompts import Prompt, read_prompt
from ostinato.fleet.public_prefixes import FleetPrefixes
from ostinato.fleet.tokens import PromptTokens
from ostinato.fleet.worker import Worker
from ostinato.router import RouteRequest
from ostinato.server.callers import Caller
from ostinato.server.errors import ApiError

_ANOTHER_MAY_DO = frozenset({502, 503, 504})
_MOST_ERROR_BYTES = 65_536
_PAUSE_S = 0.05
_THREAD_BYTES = 65_536
"""Size from which a body is parsed in another thread."""


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
        made.is_worth_repeating &= not isinstance(
            error, aiohttp.ClientConnectorError | TimeoutError
        )
        worker.failed(error)
        return made


class Proxy:
    """Forwards requests to workers, and responses to clients."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        tokens: PromptTokens,
        decisions: Decisions,
        metrics: FleetMetrics,
        prefixes: FleetPrefixes,
    ) -> None:
        """Forward requests to a fleet."""
        self._fleet = fleet
        self._config = fleet.config
        self._admission = admission
        self._tokens = tokens
        self._decisions = decisions
        self._metrics = metrics
        self._prefixes = prefixes

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Handle a route that is routed by its prompt."""
        job = self._admission.enter(request)
        try:
            await self._admission.read(job)
            job.prompt = await self._prompt(job)
            job.asked, job.tells = await self.ask(job.prompt, job.caller, request.headers)
            self._admission.rate_limit.charge(job.caller, job.asked.num_tokens)
            return await self._serve(job)
        finally:
            self._admission.leave(job)

    async def hand_on(self, request: web.Request) -> web.StreamResponse:
        """Handle a route for any worker, or for the one that stored a response."""
        job = self._admission.enter(request)
        try:
            await self._admission.read(job)
            if job.body and "number" not in request.match_info:
                job.prompt = await self._prompt(job)
            return await self._serve(job)
        finally:
            self._admission.leave(job)

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
        session = headers.get("x-session-id", "")[:200] or prompt.session
        session = f"{caller.tenant}\0{session}" if session and caller.tenant else session
        keys = keys_for_worker(headers, self._config)
        asked = await self._tokens.request(prompt, salt, caller.tenant, session, keys)
        if is_apart and caller.public_prefixes:
            asked = replace(asked, held=self._prefixes.held(asked, caller.public_prefixes))
        return asked, is_apart or caller.may_administer

    async def send_copy(
        self, kept: Kept, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Send a prompt to the worker of a decision, for its cache alone."""
        worker, peek, status = self._fleet.workers[kept.decision.worker], Peek(), "failed"
        sent = {**keys_for_worker(headers, self._config), "Content-Type": "application/json"}
        worker.num_live += 1
        try:
            async with self._fleet.session.post(
                worker.spec.url + path,
                data=body,
                headers=sent,
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
            if found is None and job.tried:  # all were tried: one may have recovered
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
            owner = fleet.workers.get(self._owner(job, job.request.match_info.get("number", "")))
            model = job.prompt.model if job.prompt else ""
            if owner is None or owner.name in job.tried:
                owner = fleet.least_busy(model, job.tried)
            return None if owner is None else (owner, None)
        assert job.prompt is not None, "what is asked was read from a prompt"
        decision = None
        if job.prompt.previous:
            name = self._owner(job, job.prompt.previous)
            decision = fleet.choose_owner(job.asked, name, job.tried)
        if decision is None:
            decision = fleet.choose(job.asked, job.prompt.model, job.tried)
        if decision is None:
            return None
        return fleet.workers[decision.worker], self._decisions.taken(decision, job.caller.tenant)

    def _owner(self, job: Job, number: str) -> str:
        """Return the worker that has a stored answer; empty if that is unknown.

        Raises:
            ApiError: Workers see one key for all callers, and the answer is not this caller's.
        """
        owner, caller = self._fleet.owner_of(number), job.caller
        is_guarded = self._config.replace_keys and self._config.keys_file is not None
        is_theirs = owner is not None and owner.tenant == caller.tenant
        if number and is_guarded and not is_theirs and not caller.may_administer:
            message = f"{number:.100}: this key has no such answer, or the router has forgotten it"
            raise ApiError(404, message, code="not_found")
        return "" if owner is None else owner.worker

    async def _try(self, job: Job, worker: Worker, kept: Kept | None) -> web.StreamResponse:
        """Send the request to one worker.

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
                self._fleet.note_owner(peek.number, Owner(worker.name, job.caller.tenant))
            return response
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        finally:
            worker.num_live -= 1
            self._admission.rate_limit.charge(job.caller, peek.generated_tokens)
            self._ended(kept, status, peek)

    async def _exchange(
        self, job: Job, worker: Worker, kept: Kept | None, peek: Peek
    ) -> web.StreamResponse:
        request = job.request
        try:
            async with self._patience():
                upstream = await self._fleet.session.request(
                    request.method,
                    URL(worker.spec.url + request.rel_url.raw_path_qs, encoded=True),
                    data=job.body or None,
                    headers=headers_to_worker(request.headers, self._config),
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
        """Forward a response; its head is sent with its first bytes."""
        try:
            async with self._patience():
                piece = await upstream.content.readany()
                if upstream.status in _ANOTHER_MAY_DO:
                    piece += await upstream.content.read(_MOST_ERROR_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer.by(worker, error) from error
        headers = end_to_end(upstream.headers)
        headers.update(told_of(worker, kept, job.tells))
        if upstream.status in _ANOTHER_MAY_DO:
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
            await self._write(job, response, piece)
            try:
                async with self._patience():
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
            async with self._patience():
                await response.write(piece)
        except TimeoutError:
            if job.request.transport is not None:
                job.request.transport.abort()  # the client would never read what is buffered
            raise

    def _patience(self) -> asyncio.Timeout:
        """Return the limit of a silence; aiohttp's own ends with a malformed chunk."""
        return asyncio.timeout(self._config.silence_timeout_s)

    def _break_off(self, job: Job, worker: Worker) -> None:
        """Close a client's connection in the middle of an incomplete response."""
        self._metrics.broken_off.labels(worker.name).inc()
        if job.request.transport is not None:
            job.request.transport.close()

    def _ended(self, kept: Kept | None, status: str, peek: Peek) -> None:
        """Report to the router how a request ended."""
        if kept is None:
            return
        router, now = self._fleet.router, self._fleet.clock()
        kept.status, kept.cached_tokens = status, peek.cached_tokens
        if 0 < peek.status < 400:  # it began to answer, so its prompt was computed
            router.finished(kept.decision, now, kept.cached_tokens)
        else:
            router.failed(kept.decision, now)
        self._metrics.ended(kept)

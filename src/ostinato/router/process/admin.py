"""Administration of a router: its workers, joining and leaving, and explained decisions."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ostinato.core.errors import ConfigError
from ostinato.router.policy.plugged import PluggedPolicy
from ostinato.router.process.admission import Admission
from ostinato.router.process.config import WorkerSpec
from ostinato.router.process.decisions import MAX_RECORDS, DecisionLog, DecisionRecord
from ostinato.router.process.proxy import Proxy
from ostinato.router.process.public_prefixes import FleetPrefixes, copies_of
from ostinato.router.process.worker_pool import WorkerPool
from ostinato.server.access.callers import Caller, require_administrator
from ostinato.server.errors import ApiError

_MAX_BODY_BYTES = 2**16
_MAX_LISTED = 100
_MAX_ROUTED_S = 600.0
"""Seconds after which a request that was only routed counts as finished."""


class FleetAdmin:
    """Routes for administrators."""

    def __init__(
        self,
        fleet: WorkerPool,
        proxy: Proxy,
        admission: Admission,
        decisions: DecisionLog,
        prefixes: FleetPrefixes,
    ) -> None:
        self._prefixes = prefixes
        self._fleet = fleet
        self._proxy = proxy
        self._admission = admission
        self._decisions = decisions
        self._leaving: set[asyncio.Task[None]] = set()

    def _caller(self, request: web.Request) -> Caller:
        """Return the caller, if it is an administrator.

        Raises:
            ApiError: It is not (403), or is unknown (401).
        """
        return require_administrator(self._admission.identify(request))

    def guarded(self, handler: Handler) -> Handler:
        """Return a handler that refuses all callers but administrators."""

        async def check_and_handle(request: web.Request) -> web.StreamResponse:
            self._caller(request)
            return await handler(request)

        return check_and_handle

    async def list_workers(self, request: web.Request) -> web.Response:
        """Return workers, and what is known about them."""
        return web.json_response(self._workers())

    async def join(self, request: web.Request) -> web.Response:
        """Add a worker: ``{"url": ..., "name": ..., "events": ..., "replay": ...}``."""
        try:
            spec = msgspec.json.decode(await self._small_body(request), type=WorkerSpec)
            worker = self._fleet.join(spec)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        return web.json_response({"name": worker.name, "url": worker.spec.url}, status=201)

    async def leave(self, request: web.Request) -> web.Response:
        """Drain a worker: no new requests, and removal after the last one."""
        name = request.match_info["name"]
        worker = self._fleet.workers.get(name)
        if worker is None:
            raise ApiError(404, f"name={name!r:.200}: there is no such worker", code="no_worker")
        task = asyncio.create_task(self._fleet.leave(name))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return web.json_response({"name": name, "num_live": worker.num_live}, status=202)

    async def route(self, request: web.Request) -> web.Response:
        """Return the worker for a request, and why; the request is not forwarded.

        The body is that of the request. With ``?dry_run=1`` nothing is counted as assigned; else
        ``DELETE /route/NUMBER`` reports the end of the request.
        """
        caller = self._caller(request)
        path = request.query.get("path", "")
        prompt, route_request = await self._proxy.read(
            path, await request.read(), caller, request.headers
        )
        decision = await self._fleet.choose(route_request, prompt.model, set())
        if decision is None:
            raise ApiError(503, "no worker is well", code="no_worker")
        record = self._decisions.add(decision, caller.tenant)
        if request.query.get("dry_run") in ("1", "true"):
            record.status = "explained"
            self._fleet.router.failed(decision)
        else:
            asyncio.get_running_loop().call_later(_MAX_ROUTED_S, self._finish, record)
        return web.json_response(self._explained(record))

    async def prewarm(self, request: web.Request) -> web.Response:
        """Compute a prompt until ``?copies=`` workers have it.

        The body is that of a completion or a chat; each generates one token.
        """
        caller = self._caller(request)
        body = await request.read()
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the body is not a JSON object: {error}") from error
        copies = copies_of(request, 1)
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        _, route_request = await self._proxy.read(path, body, caller, request.headers)
        sent = msgspec.json.encode({**fields, "max_tokens": 1, "stream": False})
        records = [
            self._decisions.add(decision, caller.tenant)
            for decision in self._fleet.router.place(route_request, copies, self._fleet.clock())
        ]
        keys = request.headers
        await asyncio.gather(
            *(self._proxy.send_copy(record, path, sent, keys) for record in records)
        )
        return web.json_response({"sent": [record.row() for record in records]})

    async def publish(self, request: web.Request) -> web.Response:
        """Publish a prefix at ``?copies=`` workers, by default at all."""
        copies = copies_of(request, len(self._fleet.workers))
        name, body = request.match_info["name"], await request.read()
        return web.json_response({"workers": await self._prefixes.publish(name, body, copies)})

    async def unpublish(self, request: web.Request) -> web.Response:
        """Unpublish a prefix at all workers."""
        name, body = request.match_info["name"], await request.read()
        return web.json_response({"workers": await self._prefixes.unpublish(name, body)})

    async def explain(self, request: web.Request) -> web.Response:
        """Explain a decision by its number."""
        return web.json_response(self._explained(self._find(request)))

    async def end(self, request: web.Request) -> web.Response:
        """Report that a request which was only routed has finished."""
        record = self._find(request)
        if record.status != "running":
            raise ApiError(409, f"decision {record.decision.number} is {record.status} already")
        self._finish(record)
        return web.json_response(record.row())

    async def decisions(self, request: web.Request) -> web.Response:
        """Return the newest decisions."""
        rows = [record.row() for record in self._decisions.newest(_MAX_LISTED)]
        return web.json_response({"decisions": rows})

    async def state(self, request: web.Request) -> web.Response:
        """Return what the page shows."""
        decisions = [record.row() for record in self._decisions.newest(20)]
        return web.json_response({**self._workers(), "decisions": decisions})

    def _workers(self) -> dict[str, Any]:
        """Return the policy, all workers, and the hits of a policy of one's own beside it."""
        policy = self._fleet.router.policy
        return {
            "policy": self._fleet.config.policy,
            "workers": self.rows(),
            "plugged": policy.beside_built_in() if isinstance(policy, PluggedPolicy) else None,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each worker."""
        rows = []
        for status in self._fleet.router.workers():
            worker, fields = self._fleet.workers[status.name], msgspec.to_builtins(status)
            rows.append(
                {
                    **fields,
                    "url": worker.spec.url,
                    "is_well": worker.is_well,
                    "trouble": worker.trouble,
                    "models": list(worker.models),
                    "num_requests": worker.num_live,
                    "num_failed": worker.num_failed,
                    "num_replays": worker.feed.num_replays if worker.feed else 0,
                    "num_snapshots": worker.feed.num_snapshots if worker.feed else 0,
                }
            )
        return rows

    def _finish(self, record: DecisionRecord) -> None:
        if record.status == "running":
            record.status = "finished"
            self._fleet.router.finished(record.decision, self._fleet.clock())

    def _explained(self, record: DecisionRecord) -> dict[str, Any]:
        decision = record.decision
        worker = self._fleet.workers.get(decision.worker)
        return {
            **record.row(),
            "url": worker.spec.url if worker else None,
            "explanation": self._fleet.router.explain(decision),
            "candidates": record.candidate_rows(),
        }

    def _find(self, request: web.Request) -> DecisionRecord:
        number = request.match_info["decision"]
        record = self._decisions.find(int(number)) if number.isdigit() else None
        if record is None:
            raise ApiError(
                404,
                f"decision={number:.40}: no such decision is kept; the newest {MAX_RECORDS} are",
                code="unknown_decision",
            )
        return record

    async def _small_body(self, request: web.Request) -> bytes:
        body = await request.content.read(_MAX_BODY_BYTES)
        if not request.content.at_eof():
            raise ApiError(413, f"at most {_MAX_BODY_BYTES} bytes", code="body_too_large")
        return body

"""What operators ask of a router: its workers, who joins and leaves, and why a choice fell."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from ostinato.core.errors import ConfigError
from ostinato.fleet.config import WorkerSpec
from ostinato.fleet.decisions import Decisions, Kept, candidate_rows
from ostinato.fleet.fleet import Fleet
from ostinato.fleet.prompts import read_prompt
from ostinato.fleet.proxy import Proxy
from ostinato.server.callers import Caller
from ostinato.server.errors import ApiError

_MOST_BODY_BYTES = 2**16
_MOST_LISTED = 100
_MOST_ROUTED_S = 600.0
"""After this time a request that was only routed counts as ended, whether that was told or not."""


class FleetAdmin:
    """Routes for administrators alone."""

    def __init__(self, fleet: Fleet, proxy: Proxy, decisions: Decisions) -> None:
        """Administer a fleet."""
        self._fleet = fleet
        self._proxy = proxy
        self._decisions = decisions
        self._leaving: set[asyncio.Task[None]] = set()

    def check(self, request: web.Request) -> Caller:
        """Return who is calling, if they may administer.

        Raises:
            ApiError: They may not (403), or are not known (401).
        """
        caller = self._proxy.identify(request)
        if not caller.may_administer:
            raise ApiError(
                403,
                "this key does not administer: use one of a tenant whose entry says "
                '"administers": true',
                kind="permission_error",
                code="not_an_administrator",
            )
        return caller

    async def list_workers(self, request: web.Request) -> web.Response:
        """Return every worker's state."""
        self.check(request)
        return web.json_response({"policy": self._fleet.config.policy, "workers": self.rows()})

    async def join(self, request: web.Request) -> web.Response:
        """Take a worker in: ``{"url": ..., "name": ..., "events": ..., "replay": ...}``."""
        self.check(request)
        try:
            spec = msgspec.json.decode(await self._small_body(request), type=_Joining).spec()
            worker = self._fleet.join(spec)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        return web.json_response({"name": worker.name, "url": worker.spec.url}, status=201)

    async def leave(self, request: web.Request) -> web.Response:
        """Let a worker leave once its requests have ended; it gets no new ones from now on."""
        self.check(request)
        name = request.match_info["name"]
        worker = self._fleet.workers.get(name)
        if worker is None:
            raise ApiError(404, f"name={name!r:.200}: there is no such worker", code="no_worker")
        task = asyncio.create_task(self._fleet.leave(name))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return web.json_response({"name": name, "num_live": worker.num_live}, status=202)

    async def route(self, request: web.Request) -> web.Response:
        """Answer which worker a request should go to, and why; it is not sent anywhere.

        The body is the request's own. With ``?dry_run=1`` nothing is counted as assigned; else
        ``DELETE /route/NUMBER`` tells that the request has ended.
        """
        caller = self.check(request)
        path = request.query.get("path", "")
        prompt = read_prompt(path, await request.read())
        asked, _ = await self._proxy.ask(prompt, caller, request.headers)
        decision = self._fleet.choose(asked, prompt.model, set())
        if decision is None:
            raise ApiError(503, "no worker is well", "server_error", code="no_worker")
        kept = self._decisions.taken(decision, caller.tenant)
        if request.query.get("dry_run") in ("1", "true"):
            kept.status = "explained"
            self._fleet.router.failed(decision, self._fleet.clock())
        else:
            asyncio.get_running_loop().call_later(_MOST_ROUTED_S, self._finish, kept)
        return web.json_response(self._explained(kept))

    async def explain(self, request: web.Request) -> web.Response:
        """Return why a decision was taken, by its number."""
        self.check(request)
        return web.json_response(self._explained(self._kept(request)))

    async def end(self, request: web.Request) -> web.Response:
        """Note that a request which was only routed has ended."""
        self.check(request)
        kept = self._kept(request)
        if kept.status != "running":
            raise ApiError(409, f"decision {kept.decision.number} is {kept.status} already")
        self._finish(kept)
        return web.json_response(kept.row())

    async def decisions(self, request: web.Request) -> web.Response:
        """Return the newest decisions."""
        self.check(request)
        rows = [kept.row() for kept in self._decisions.newest(_MOST_LISTED)]
        return web.json_response({"decisions": rows})

    async def state(self, request: web.Request) -> web.Response:
        """Return what the page shows."""
        self.check(request)
        return web.json_response(
            {
                "policy": self._fleet.config.policy,
                "workers": self.rows(),
                "decisions": [kept.row() for kept in self._decisions.newest(20)],
            }
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each worker."""
        statuses = {s.name: s for s in self._fleet.router.workers(self._fleet.clock())}
        rows = []
        for worker in self._fleet.workers.values():
            status = statuses[worker.name]
            rows.append(
                {
                    "name": worker.name,
                    "url": worker.spec.url,
                    "is_well": worker.is_well,
                    "trouble": worker.trouble,
                    "is_draining": worker.is_draining,
                    "models": list(worker.models),
                    "state": status.state.value,
                    "reason": status.reason,
                    "num_requests": worker.num_live,
                    "num_failed": worker.num_failed,
                    "load_tokens": round(status.load_tokens),
                    "cached_tokens": status.cached_tokens,
                    "assigned": status.assigned,
                    "computed_tokens": status.assigned_tokens,
                    "hit_tokens": status.hit_tokens,
                    "next_batch": status.next_batch,
                    "lost_batches": status.lost_batches,
                    "num_replays": worker.feed.num_replays if worker.feed else 0,
                    "num_snapshots": worker.feed.num_snapshots if worker.feed else 0,
                }
            )
        return rows

    def _finish(self, kept: Kept) -> None:
        if kept.status == "running":
            kept.status = "finished"
            self._fleet.router.finished(kept.decision, self._fleet.clock())

    def _explained(self, kept: Kept) -> dict[str, Any]:
        decision = kept.decision
        worker = self._fleet.workers.get(decision.worker)
        return {
            **kept.row(),
            "url": worker.spec.url if worker else None,
            "explanation": self._fleet.router.explain(decision),
            "candidates": candidate_rows(decision),
        }

    def _kept(self, request: web.Request) -> Kept:
        number = request.match_info["decision"]
        kept = self._decisions.find(int(number)) if number.isdigit() else None
        if kept is None:
            raise ApiError(
                404,
                f"decision={number:.40}: no such decision is kept; the newest "
                f"{self._decisions.most} are",
                code="unknown_decision",
            )
        return kept

    async def _small_body(self, request: web.Request) -> bytes:
        body = await request.content.read(_MOST_BODY_BYTES)
        if not request.content.at_eof():
            raise ApiError(413, f"at most {_MOST_BODY_BYTES} bytes", code="body_too_large")
        return body


class _Joining(msgspec.Struct, forbid_unknown_fields=True):
    """The body that lets a worker join."""

    url: str
    name: str = ""
    events: str | None = None
    replay: str | None = None
    topic: str = ""

    def spec(self) -> WorkerSpec:
        return WorkerSpec(self.url, self.name, self.events, self.replay, self.topic)

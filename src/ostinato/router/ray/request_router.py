"""``PrefixRequestRouter``: ``ostinato.router`` as Ray Serve's request router.

It runs in each process that calls the deployment. Replicas announce the endpoints of their KV
events in their routing stats; until events arrive, prefixes sent to a replica are assumed to be
cached.

For other deployments, the prompt is the first argument with ``messages`` or ``prompt``, as an
attribute or a key, and is compared by characters::

    @serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="ostinato.router.ray:PrefixRequestRouter"))
    class Engine: ...
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ostinato.router.policy import Decision, Router, RouterConfig, RouteRequest
from ostinato.router.process.kv_feed import Endpoints, KVFeeds, WorkerSnapshot
from ostinato.router.process.routing_fields import RoutingFields
from ostinato.router.ray.call import DecisionLink, RayCall

logger = logging.getLogger("ostinato")

_SNAPSHOT_TIMEOUT_S = 30.0


class PrefixRequestRouter(RequestRouter):
    """Sends each call to the replica that has its prefix, unless that has too much to do."""

    def initialize_state(
        self, policy: str = "cache_state", max_tracked_tokens: int = 16_000_000
    ) -> None:
        """Start without replicas; Ray calls it with ``request_router_kwargs``.

        Raises:
            ConfigError: There is no such policy, or the number is not above 0.
        """
        self._library = Router(RouterConfig(policy, max_tracked_tokens))
        self._names: set[str] = set()
        self._feeds = KVFeeds(self._library)

    @property
    def library(self) -> Router:
        """The router library."""
        return self._library

    # --- replicas ---

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Add and remove replicas, and subscribe to their events."""
        super().update_replicas(replicas)
        now = {_name(replica.replica_id): replica for replica in replicas}
        for name in self._names - now.keys():
            self._remove(name)
        for name, replica in now.items():
            if name not in self._names:
                self._names.add(name)
                self._library.add_worker(name)
            stats = replica.routing_stats
            if name not in self._feeds.by_name and stats.get("kv_events"):
                self._listen(name, stats)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica at once."""
        super().on_replica_actor_died(replica_id)
        if _name(replica_id) in self._names:
            self._remove(_name(replica_id))

    def _remove(self, name: str) -> None:
        self._names.discard(name)
        self._library.remove(name)
        self._feeds.drop(name)

    def _listen(self, name: str, stats: dict[str, Any]) -> None:
        endpoints = Endpoints(stats["kv_events"], stats.get("kv_replay"))
        snapshot = partial(_snapshot, stats.get("kv_snapshot"))
        self._feeds.listen(name, endpoints, snapshot, stats["block_size"])

    # --- calls ---

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank replicas, the best first; without a prompt, the shortest queue decides."""
        prompt = None if pending_request is None else _find_prompt(pending_request.args)
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        by_name = {name: replica for name, replica in by_name.items() if name in self._names}
        if prompt is None or not by_name:
            return [candidate_replicas]
        request, progress = prompt
        decision = self._decide(request, self._names - by_name.keys(), progress)
        if progress is None:  # counted when it is routed
            self._library.failed(decision)
        first, *rest = decision.candidates
        rest.sort(key=lambda each: (each.score, each.load_tokens))
        return [[by_name[each.worker]] for each in (first, *rest)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Assign a call to its replica."""
        prompt = _find_prompt(pending_request.args)
        name = _name(replica_id)
        if prompt is None or name not in self._names:
            return
        request, progress = prompt
        if progress is not None and progress.decision and progress.decision.worker == name:
            return
        decision = self._decide(request, self._names - {name}, progress)
        if progress is None:
            report = self._reporter(decision)
            result.add_done_callback(lambda _: report("finished", None))

    def _decide(
        self, request: RouteRequest, others: Iterable[str], progress: DecisionLink | None
    ) -> Decision:
        """Decide, and undo an earlier decision for the same call."""
        if progress is not None and progress.decision is not None:
            self._library.failed(progress.decision)
        decision = self._library.route(request, time.monotonic(), others)
        assert decision is not None, "at least one replica is not excluded"
        if progress is not None:
            progress.decided(decision, self._reporter(decision))
        return decision

    def _reporter(self, decision: Decision) -> Any:
        """Return a callback that reports on a decision from any thread."""
        loop = asyncio.get_running_loop()
        return lambda what, cached: loop.call_soon_threadsafe(self._report, decision, what, cached)

    def _report(self, decision: Decision, what: str, cached_tokens: int | None) -> None:
        if what == "first_token":
            self._library.first_token(decision)
        elif what == "finished":
            self._library.finished(decision, time.monotonic(), cached_tokens)
        else:
            self._library.failed(decision)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _find_prompt(arguments: Iterable[Any]) -> tuple[RouteRequest, DecisionLink | None] | None:
    """Return the router's view of a call; None if no argument has a prompt."""
    for each in arguments:
        if isinstance(each, RayCall):
            return None if each.route_request is None else (each.route_request, each.progress)
        fields = each if isinstance(each, dict) else getattr(each, "__dict__", {})
        messages, text = fields.get("messages"), fields.get("prompt")
        if isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages):
            turns = [{"role": str(t.get("role")), "content": t.get("content")} for t in messages]
            return RouteRequest.of_text(RoutingFields(messages=turns).characters), None
        if isinstance(text, str):
            return RouteRequest.of_text(text), None
    return None


async def _snapshot(endpoint: str | None) -> WorkerSnapshot | None:
    """Fetch a snapshot from a replica."""
    if endpoint is None:
        return None
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.REQ)
    socket.connect(endpoint)
    try:
        async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
            await socket.send(b"")
            sequence, payload = await socket.recv_multipart()
            return WorkerSnapshot(int.from_bytes(sequence, "big"), payload)
    except TimeoutError:
        logger.warning("%s sent no snapshot within %g s", endpoint, _SNAPSHOT_TIMEOUT_S)
        return None
    finally:
        socket.close(linger=0)

"""``EngineReplica``: the server's application as a replica, without a socket of its own.

The application answers calls over Ray like HTTP requests, streams included. KV events, replays and
snapshots are published over ZeroMQ at the node's address.
"""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import ray
import zmq
import zmq.asyncio

from ostinato.router.ray.call import RayCall, ResponseHead
from ostinato.server.app import create_app
from ostinato.server.config import ServerConfig
from ostinato.server.lifecycle import open_state

_MAX_PIECES = 64
"""Pieces of an answer that are queued for Ray."""


class EngineReplica:
    """Serves a model; Ray Serve creates the replicas."""

    def __init__(self, model: str, engine: dict[str, Any], keys_file: str | None) -> None:
        """Load the model and publish its KV events.

        Args:
            model: Name, folder, GGUF file or name on the hub.
            engine: Settings, see ``EngineConfig``.
            keys_file: API keys; None admits all clients.

        Raises:
            ConfigError: A setting is out of range.
            ModelError: The model cannot be served.
        """
        anywhere = f"tcp://{_node_address()}:0"
        published = {"kv_events_endpoint": anywhere, "kv_events_replay_endpoint": anywhere}
        config = ServerConfig(model_names=(model,), keys_file=keys_file)
        self._state = open_state(model, {**published, **engine}, config)
        self._app = create_app(self._state)
        self._snapshots: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.REP)
        self._snapshots.bind(anywhere)
        self._serving: asyncio.Task[None] | None = None

    async def respond(self, call: RayCall) -> AsyncIterator[ResponseHead | bytes]:
        """Answer a call: first the head, then pieces of the body."""
        pieces: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(_MAX_PIECES)
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": call.body, "more_body": False})

        async def run() -> None:
            try:
                await self._app(_scope(call), incoming.get, pieces.put)
            finally:
                await pieces.put({"type": "end"})

        task = asyncio.create_task(run())
        try:
            while (message := await pieces.get())["type"] != "end":
                if message["type"] == "http.response.start":
                    yield ResponseHead(message["status"], list(message["headers"]))
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            incoming.put_nowait({"type": "http.disconnect"})
            task.cancel()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the endpoints of the KV events; Ray sends them to the request routers."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve_snapshots())
        engine = self._state.llm.engine
        assert engine.kv_events is not None, "the settings publish them"
        return {
            "kv_events": engine.kv_events.endpoint,
            "kv_replay": engine.kv_events.replay_endpoint,
            "kv_snapshot": self._snapshots.getsockopt_string(zmq.LAST_ENDPOINT),
            "block_size": engine.config.block_size,
        }

    async def check_health(self) -> None:
        """Check that the engine runs.

        Raises:
            EngineError: It has ended; Ray starts a new replica.
        """
        await self._state.llm.look(lambda engine: None)

    async def _serve_snapshots(self) -> None:
        """Answer each request with the number and the batch of a snapshot."""
        while True:
            await self._snapshots.recv()
            batch = await self._state.llm.look(lambda engine: engine.cache.snapshot())
            publisher = self._state.llm.engine.kv_events
            assert batch is not None and publisher is not None, "published events are kept"
            payload = await asyncio.to_thread(publisher.encode, batch)
            await self._snapshots.send_multipart([batch.sequence.to_bytes(8, "big"), payload])

    def __del__(self) -> None:
        """End the engine; called by Ray when it stops a replica."""
        if hasattr(self, "_state"):
            self._state.llm.shutdown()


def _node_address() -> str:
    address = str(ray.util.get_node_ip_address())
    return f"[{address}]" if ":" in address else address


def _scope(call: RayCall) -> dict[str, Any]:
    """Return the ASGI scope of a call."""
    parts = urlsplit(call.path)
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": call.headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }

"""The endpoints of KV events, and snapshots of the cache.

A router that missed more events than can be replayed loads a snapshot instead.
"""

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ostinato.engine.loop.kv_events_publisher import KVEventsPublisher
from ostinato.server.access.callers import ADMIN_ONLY
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState, StateDep

router = APIRouter(prefix="/admin/kv", tags=["administration"], dependencies=ADMIN_ONLY)

SEQUENCE_HEADER = "x-kv-events-sequence"
"""Sequence number of the first batch that a snapshot does not contain."""

INSTANCE_HEADER = "x-kv-events-instance"
"""Changes when the process restarts and sequence numbers begin at 0 again."""

_INSTANCE = uuid.uuid4().hex


@router.get("/events")
async def events(state: StateDep) -> dict[str, Any]:
    """Return the endpoints of events and replays, and the id of this process.

    Raises:
        ApiError: The server publishes no events (409).
    """
    publisher, config = _publisher(state), state.llm.engine.config
    return {
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "topic": config.kv_events_topic,
        "block_size": config.block_size,
        "instance": _INSTANCE,
    }


@router.get("/snapshot", response_class=Response)
async def snapshot(state: StateDep) -> Response:
    """Return one msgpack event batch that stores everything cached now.

    Copied between two steps, encoded in another thread.

    Raises:
        ApiError: The server publishes no events (409).
    """
    publisher = _publisher(state)
    batch = await state.llm.look(lambda engine: engine.cache.snapshot())
    assert batch is not None, "what is published is kept"
    body = await asyncio.to_thread(publisher.encode, batch)
    headers = {SEQUENCE_HEADER: str(batch.sequence), INSTANCE_HEADER: _INSTANCE}
    return Response(body, headers=headers, media_type="application/msgpack")


def _publisher(state: ServerState) -> KVEventsPublisher:
    publisher = state.llm.engine.kv_events
    if publisher is None:
        raise ApiError(
            409,
            "this server publishes no KV events: start it with --kv-events-endpoint, such as "
            "tcp://127.0.0.1:5557",
            code="no_kv_events",
        )
    return publisher

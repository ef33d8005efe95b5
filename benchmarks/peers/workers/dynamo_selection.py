"""Dynamo's ``SelectionService`` in a process of its own, asked line by line.

Runs in the environment of the other routers, which has nothing of this project. A line is a JSON
list; only ``route`` is answered. The replicas' events are published to the service over ZeroMQ in
vLLM's format, and what was published is taken to have arrived before the next request::

    ["route", number, tokens] ─► replica      ["first_token", number]      ["finished", number]
    ["events", replica, sequence, base64 of a batch]
"""

import asyncio
import base64
import json
import sys
import time

import zmq
from dynamo._core import SelectionService

ARRIVAL_S = 0.004
"""Between a batch of events and the next question; the service takes well under one millisecond."""


async def main() -> None:
    """Serve until the input ends; arguments are the replicas' number, block size and blocks."""
    num_replicas, block_size, num_blocks = map(int, sys.argv[1:])
    service, context = SelectionService(indexer_threads=1), zmq.Context()
    sockets = []
    for replica in range(num_replicas):
        socket = context.socket(zmq.PUB)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        worker = {"worker_id": replica, "endpoint": f"http://127.0.0.1:{replica + 1}"}
        worker |= {"kv_events_endpoint": f"tcp://127.0.0.1:{port}", "block_size": block_size}
        await service.upsert_worker({**worker, "total_kv_blocks": num_blocks})
        sockets.append(socket)
    await asyncio.sleep(1)  # subscriptions
    print("ready", flush=True)
    published_s = 0.0
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "route":
            number, tokens = rest
            await asyncio.sleep(max(0.0, published_s + ARRIVAL_S - time.monotonic()))
            request = {"selection_id": str(number), "token_ids": tokens}
            print((await service.select_and_reserve(request))["worker_id"], flush=True)
        elif what == "first_token":
            await service.prefill_complete(str(rest[0]))
        elif what == "finished":
            await service.free_reservation(str(rest[0]))
        else:
            replica, sequence, batch = rest
            frames = [b"", sequence.to_bytes(8, "big"), base64.b64decode(batch)]
            sockets[replica].send_multipart(frames)
            published_s = time.monotonic()


if __name__ == "__main__":
    asyncio.run(main())

"""The choice of a worker for each request: a library, by cached prefix and load.

Files in reading order:

* ``decision``: requests to the router, and its decisions
* ``events``: KV events of vLLM, SGLang and Ostinato, in one form
* ``prefix_tree``: prefixes by their tokens, and the workers that have them
* ``event_feed``: what one worker has cached by its events, and whether they are complete
* ``load``: load of a worker, and recent work
* ``evidence``: checks of a worker's events by the hits of its requests
* ``lookup``: how much of a prompt each worker has
* ``worker``: one worker
* ``policies``: ``prefix_hash``, ``session``, ``least_loaded``, ``round_robin``
* ``cache_state``: the default policy
* ``plugged``: a policy of one's own
* ``router``: ``Router``

Rules:

1. Nothing here waits, reads a clock or opens a socket.
2. The key of a prefix is its tokens, adapter, salt and images, never an engine's hash.
3. A worker is EXACT only while its events are complete and agree with what its requests find;
   otherwise it is DEGRADED or GUESSED, and every decision says which.
4. All state is bounded.
"""

from ostinato.router.policy.decision import (
    Candidate,
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.policy.load import WorkerPrices
from ostinato.router.policy.router import POLICIES, Router, RouterConfig

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "Resync",
    "RouteRequest",
    "Router",
    "RouterConfig",
    "WorkerPrices",
    "WorkerState",
    "WorkerStatus",
]  # fmt: skip

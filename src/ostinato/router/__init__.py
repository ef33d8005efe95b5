"""Which of many engines gets a request: the one where its prefix is, unless it has too much to do.

Files in reading order:

* ``decision``: what is asked of the router, and what it answers
* ``events``: KV events of vLLM, SGLang and our engine, as one form
* ``prefix_tree``: prefixes by their tokens, and which workers have which of them
* ``event_feed``: what one worker has cached by its events, and how far they can be believed
* ``load``: what a worker has to do, and what it did lately
* ``lookup``: what is known of one prompt
* ``worker``: one worker
* ``policies``: ``prefix_hash``, ``session``, ``least_loaded``, ``round_robin``
* ``cache_state``: the default policy
* ``explain``: a decision in words and numbers
* ``router``: all of it together

Rules:

1. Nothing here waits, reads a clock or opens a socket: the process around it does.
2. The key of a prefix is its tokens, adapter, salt and images, never an engine's hash.
3. A worker is EXACT only while its events are complete; what else is known of it counts as
   DEGRADED or GUESSED, and every decision says which.
4. Everything that is kept is bounded.
"""

from ostinato.router.decision import (
    Candidate,
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.router import POLICIES, Router, RouterConfig

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "Resync",
    "RouteRequest",
    "Router",
    "RouterConfig",
    "WorkerState",
    "WorkerStatus",
]

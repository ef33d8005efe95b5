"""Which of many engines gets a request: the one where its prefix is, unless it has too much to do.

Files in reading order:

* ``decision``: what is asked of the router, and what it answers
* ``events``: KV events of vLLM, SGLang and our engine, as one form
* ``router``: the router

Rules:

1. Nothing here waits, reads a clock or opens a socket: a process feeds it (rule of all policies).
2. The key of a prefix is its tokens, adapter, salt and images: never an engine's hash.
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

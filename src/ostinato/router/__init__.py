"""One address for many engines: which of them gets a request, and how it gets there.

Files in reading order:

* ``policy/``: the choice, by cached prefix and load; a library without sockets and clocks
* ``process/``: the process of ``ostinato route``: connections, health, keys and the choice
* ``ray/``: engines on Ray Serve, with the same choice as Ray's request router

Rules:

1. ``policy`` makes every choice, in the process and on Ray alike.
2. ``policy`` imports neither of the others, and no engine; ``process`` needs no torch.
"""

from ostinato.router.policy import (
    POLICIES,
    Candidate,
    Decision,
    Resync,
    Router,
    RouterConfig,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)

__all__ = [
    "POLICIES", "Candidate", "Decision", "Resync", "RouteRequest", "Router", "RouterConfig",
    "WorkerState", "WorkerStatus",
]  # fmt: skip

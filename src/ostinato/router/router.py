"""The router: which worker gets a request, by what each has cached and still has to do.

Pure and synchronous: no thread, no socket, no clock. Its caller passes the time, in seconds of any
steady clock, and hands over the workers' events as they arrive.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.router.decision import (
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.events import EventBatch

POLICIES = ("cache_state", "prefix_hash", "session", "least_loaded", "round_robin")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a router.

    Attributes:
        policy: Name, one of ``POLICIES``.
        max_tokens: Tokens of all prefixes known, over all workers; the least recently used go first.
        guess_ttl_s: Time after which a prefix sent to a worker without events counts as gone.
        silent_s: Time after which a worker that owes events counts as silent.
    """

    policy: str = "cache_state"
    max_tokens: int = 4_000_000
    guess_ttl_s: float = 120.0
    silent_s: float = 10.0


class Router:
    """Chooses workers. May be used by one thread at a time."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        """Start without workers."""
        self.config = config or RouterConfig()
        self._names: list[str] = []
        self._number = 0

    def add_worker(self, name: str, *, block_size: int = 16, sends_events: bool = False) -> None:
        """Let a worker join, or end its draining.

        Args:
            name: Any, such as its URL.
            block_size: Tokens per block, until its events tell.
            sends_events: It is GUESSED until they arrive, and silent if they do not.
        """
        self._names.append(name)

    def drain(self, name: str) -> None:
        """Send no new requests to a worker."""

    def remove(self, name: str) -> None:
        """Forget a worker; what runs there has failed."""
        self._names.remove(name)

    def route(
        self, request: RouteRequest, now: float, exclude: Iterable[str] = ()
    ) -> Decision | None:
        """Choose the worker for a request, and count it as assigned there.

        Args:
            request: Prompt and identity.
            now: Seconds.
            exclude: Workers that a retry must not use.

        Returns:
            None if there is no worker to choose from.
        """
        names = [name for name in self._names if name not in set(exclude)]
        if not names:
            return None
        self._number += 1
        n = len(request.tokens)
        return Decision(
            self._number,
            names[self._number % len(names)],
            self.config.policy,
            WorkerState.GUESSED,
            n,
            0,
            n,
            "in turn",
        )

    def first_token(self, decision: Decision, now: float) -> None:
        """Note that a request's prompt is computed."""

    def finished(self, decision: Decision, now: float, cached_tokens: int | None = None) -> None:
        """Note that a request ended; ``cached_tokens`` as its worker reported them, if it did."""

    def failed(self, decision: Decision, now: float) -> None:
        """Note that a request ended without an answer; its prefix is not taken to be cached."""

    def apply(self, name: str, batch: EventBatch, now: float) -> Resync | None:
        """Take a batch of a worker's events as it arrived; returns what is missing, if anything."""
        return None

    def replayed(self, name: str, batches: Iterable[EventBatch], now: float) -> Resync | None:
        """Take the batches that a replay brought; returns a snapshot request if they do not do."""
        return None

    def restore(self, name: str, sequence: int, batch: EventBatch, now: float) -> Resync | None:
        """Take a snapshot: stored events for all that is cached after batch ``sequence``."""
        return None

    def forget(self, name: str, now: float) -> None:
        """Give up what a worker is known to have: neither replay nor snapshot can be had."""

    def broken(self, name: str, reason: str, now: float) -> None:
        """Distrust a worker's events, which could not be decoded: it becomes GUESSED."""

    def overdue(self, now: float) -> list[Resync]:
        """Notice silent workers; returns what to fetch. Call it every few seconds."""
        return []

    def place(self, request: RouteRequest, copies: int, now: float) -> list[Decision]:
        """Choose workers that a prefix should be sent to, so that so many have it.

        Returns:
            One decision per copy that is missing: send each the prefix with ``max_tokens=1``.
        """
        return []

    def workers(self, now: float) -> list[WorkerStatus]:
        """Return all workers' state, in the order in which they joined."""
        return []

    def explain(self, decision: Decision) -> str:
        """Say in words and numbers why a decision was taken."""
        return decision.reason

    def check(self) -> None:
        """Assert the invariants."""

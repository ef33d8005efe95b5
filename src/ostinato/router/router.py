"""The router: which worker gets a request, by what each has cached and still has to do.

Pure and synchronous: no thread, no socket, no clock. Its caller passes the time, in seconds of any
steady clock, and hands over the workers' events as they arrive.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ostinato.core.errors import ConfigError
from ostinato.router.cache_state import CacheState
from ostinato.router.decision import (
    Candidate,
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.event_feed import EventFeed
from ostinato.router.events import EventBatch
from ostinato.router.explain import explain
from ostinato.router.load import Assigned, ReturnTimes
from ostinato.router.lookup import Found, expect, look_up
from ostinato.router.policies import (
    Choice,
    Fleet,
    LeastLoaded,
    Policy,
    PrefixHash,
    RoundRobin,
    SessionAffinity,
)
from ostinato.router.prefix_tree import PrefixTree
from ostinato.router.worker import Worker

_POLICIES: dict[str, type[Policy]] = {
    "cache_state": CacheState,
    "prefix_hash": PrefixHash,
    "session": SessionAffinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
POLICIES = tuple(_POLICIES)
"""Names of policies, the default first."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a router.

    Attributes:
        policy: Name, one of ``POLICIES``.
        max_tokens: Of all prefixes known, over all workers; the least recently used go first.
        guess_ttl_s: Time after which a prefix sent to a worker without events counts as gone.
        silent_s: Time after which a worker that owes events counts as silent.
    """

    policy: str = "cache_state"
    max_tokens: int = 4_000_000
    guess_ttl_s: float = 120.0
    silent_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.policy not in _POLICIES:
            raise ConfigError(f"policy={self.policy!r}: one of {', '.join(POLICIES)} is known")
        for name in ("max_tokens", "guess_ttl_s", "silent_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")


class Router:
    """Chooses workers. May be used by one thread at a time."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        """Start without workers.

        Raises:
            ConfigError: A setting is out of range.
        """
        self.config = config or RouterConfig()
        self._policy: Policy = _POLICIES[self.config.policy]()
        self._tree = PrefixTree(self.config.max_tokens, self._on_forget)
        self._workers: dict[str, Worker] = {}
        self._by_bit: dict[int, Worker] = {}
        self._running: dict[int, Assigned] = {}
        self._returns = ReturnTimes()
        self._number = 0

    # Workers

    def add_worker(
        self, name: str, *, block_size: int | None = None, sends_events: bool = False
    ) -> None:
        """Let a worker join; one that is known ends its draining, and may announce more.

        Args:
            name: Any, such as its URL.
            block_size: Tokens per block, until its events tell; 16 if it is not announced.
            sends_events: It is noticed if it never does.
        """
        worker = self._workers.get(name)
        if worker is None:
            bit = next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)
            feed = EventFeed(self._tree, bit, name, self._on_computed)
            worker = self._workers[name] = self._by_bit[bit] = Worker(name, bit, feed, 16)
        worker.is_draining = False
        worker.announced_size = block_size or worker.announced_size
        worker.feed.sends_events |= sends_events

    def drain(self, name: str) -> None:
        """Send no new requests to a worker."""
        self._workers[name].is_draining = True

    def remove(self, name: str) -> None:
        """Forget a worker; what runs there has failed."""
        bit = self._workers.pop(name).bit
        del self._by_bit[bit]
        self._tree.clear(bit)
        self._running = {at: work for at, work in self._running.items() if work.worker != bit}

    def restarted(self, name: str) -> Resync:
        """Forget what a worker had cached, if the process knows that it began anew."""
        worker = self._workers[name]
        worker.feed.start_over("restarted")
        return Resync(name, 0)

    def interrupted(self, name: str) -> Resync | None:
        """Note that a worker broke answers off, and may have begun anew.

        Guesses are forgotten; events are doubted until what is returned settles it.
        """
        feed = self._workers[name].feed
        if feed.state is WorkerState.GUESSED:
            feed.start_over("")
        return feed.doubt("answers broke off: it may have begun anew")

    def workers(self, now: float) -> list[WorkerStatus]:
        """Return all workers' state, in the order in which they joined."""
        return [worker.status() for worker in self._workers.values()]

    @property
    def num_tokens(self) -> int:
        """Of all prefixes known, which ``max_tokens`` bounds."""
        return self._tree.num_tokens

    # Requests

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
        workers, found, candidates = self._look_up(request, now, exclude)
        if not workers:
            return None
        choice = self._policy.choose(request, Fleet(candidates, [each.load for each in workers]))
        return self._assign(request, now, choice, (workers, found, candidates))

    def look_up(
        self, request: RouteRequest, now: float, exclude: Iterable[str] = ()
    ) -> list[Candidate]:
        """Return what each worker would have to do for a request, and assign it to none."""
        return self._look_up(request, now, exclude)[2]

    def place(self, request: RouteRequest, copies: int, now: float) -> list[Decision]:
        """Choose workers that a prefix should be sent to, so that so many have it.

        Returns:
            One decision per copy that is missing: send each the prefix with ``max_tokens=1``.
        """
        decisions: list[Decision] = []
        full: set[str] = set()
        for each in self.look_up(request, now):
            if each.cached_tokens + each.expected_tokens >= self._full_tokens(request, each.worker):
                full.add(each.worker)
        while len(full) < copies:
            decision = self.route(request, now, full)
            if decision is None:
                break
            decisions.append(replace(decision, reason=f"copy {len(full) + 1} of {copies}"))
            full.add(decision.worker)
        return decisions

    def first_token(self, decision: Decision, now: float) -> None:
        """Note that a request's prompt is computed."""
        work = self._running.get(decision.number)
        if work is not None:
            self._by_bit[work.worker].load.prefilled(work)

    def finished(self, decision: Decision, now: float, cached_tokens: int | None = None) -> None:
        """Note that a request ended; ``cached_tokens`` as its worker reported them, if it did."""
        work = self._end(decision)
        if work is None:
            return
        if work.session:
            self._returns.ended(work.session, now)
        worker = self._by_bit[work.worker]
        if work.nodes and worker.feed.sends_events and worker.owes_events_since is None:
            worker.owes_events_since = now
        if cached_tokens is not None and cached_tokens < decision.expected_cached_tokens:
            worker.overestimated_tokens += decision.expected_cached_tokens - cached_tokens

    def failed(self, decision: Decision, now: float) -> None:
        """Note that a request ended without an answer; its prefix is not taken to be cached."""
        work = self._end(decision)
        if work is not None:
            for node in reversed(work.nodes):
                self._tree.unexpect(node, work.worker, work.number)

    def explain(self, decision: Decision) -> str:
        """Say in words and numbers why a decision was taken."""
        return explain(decision)

    # Events

    def apply(self, name: str, batch: EventBatch, now: float) -> Resync | None:
        """Take a batch of a worker's events as it arrived; returns what is missing, if anything."""
        return self._heard(name, self._workers[name].feed.apply(batch))

    def replayed(self, name: str, batches: Iterable[EventBatch], now: float) -> Resync | None:
        """Take the batches that a replay brought; returns what is still missing."""
        return self._heard(name, self._workers[name].feed.replayed(batches))

    def restore(self, name: str, sequence: int, batch: EventBatch, now: float) -> Resync | None:
        """Take a snapshot: stored events for all that was cached before batch ``sequence``."""
        return self._heard(name, self._workers[name].feed.restore(sequence, batch))

    def forget(self, name: str, now: float) -> None:
        """Give up what a worker is known to have: neither replay nor snapshot can be had."""
        self._workers[name].feed.forget()

    def broken(self, name: str, reason: str, now: float) -> None:
        """Distrust a worker's events, which could not be decoded: it becomes GUESSED."""
        self._workers[name].feed.distrust(reason)

    def overdue(self, now: float) -> list[Resync]:
        """Notice silent workers; returns what to fetch. Call it every few seconds."""
        asked = [worker.overdue(now, self.config.silent_s) for worker in self._workers.values()]
        return [resync for resync in asked if resync is not None]

    def check(self) -> None:
        """Assert the invariants."""
        self._tree.check()
        for worker in self._workers.values():
            worker.feed.check()
            worker.load.check([w for w in self._running.values() if w.worker == worker.bit])

    def _look_up(
        self, request: RouteRequest, now: float, exclude: Iterable[str]
    ) -> tuple[list[Worker], list[Found], list[Candidate]]:
        left_out = set(exclude)
        workers = [
            worker
            for worker in self._workers.values()
            if not worker.is_draining and worker.name not in left_out
        ]
        for worker in workers:
            worker.load.decay(now, self._returns.mean_s)
        sizes = [(worker.bit, worker.compared_size(request)) for worker in workers]
        found = look_up(self._tree, request, sizes, now)
        candidates = [
            worker.candidate(request, each) for worker, each in zip(workers, found, strict=True)
        ]
        return workers, found, candidates

    def _assign(
        self,
        request: RouteRequest,
        now: float,
        choice: Choice,
        seen: tuple[list[Worker], list[Found], list[Candidate]],
    ) -> Decision:
        workers, found, candidates = seen
        for each, score in zip(candidates, choice.scores, strict=False):
            each.score = score
        worker, chosen = workers[choice.place], candidates.pop(choice.place)
        self._number += 1
        work = Assigned(self._number, worker.bit, request.session, chosen.tokens_to_compute, now)
        follows = self._leader(found[choice.place].sent_by)
        self._running[work.number] = work
        worker.load.assign(work)
        worker.take(chosen)
        self._returns.returned(request.session, now)
        ttl_s = self.config.guess_ttl_s
        size = worker.compared_size(request)
        expect(self._tree, request, size, found[choice.place], work, ttl_s)
        return Decision(
            work.number,
            worker.name,
            self.config.policy,
            chosen.state,
            len(request.tokens),
            chosen.cached_tokens + chosen.expected_tokens,
            chosen.tokens_to_compute,
            choice.reason,
            follows,
            (chosen, *candidates),
        )

    def _leader(self, number: int | None) -> int | None:
        """Return the decision itself if its prompt is still being computed."""
        work = None if number is None else self._running.get(number)
        return number if work is not None and work.prefill_tokens else None

    def _full_tokens(self, request: RouteRequest, name: str) -> int:
        size, most = self._workers[name].compared_size(request), len(request.tokens) - 1
        return min(most, len(request.tokens) // size * size)

    def _end(self, decision: Decision) -> Assigned | None:
        work = self._running.pop(decision.number, None)
        if work is not None:
            self._by_bit[work.worker].load.release(work)
        return work

    def _heard(self, name: str, resync: Resync | None) -> Resync | None:
        self._workers[name].owes_events_since = None
        self._tree.shrink()
        return resync

    def _on_computed(self, decision: int, num_tokens: int) -> None:
        """Note that a worker stored a block of a prompt that it is computing."""
        if (work := self._running.get(decision)) is not None:
            self._by_bit[work.worker].load.computed(work, num_tokens)

    def _on_forget(self, workers: int) -> None:
        for bit, worker in self._by_bit.items():
            if workers >> bit & 1:
                worker.feed.forgot()

"""The router: which worker gets a request, by what each has cached and still has to do.

Pure and synchronous: no thread, no socket, no clock. Its caller passes the time, in seconds of any
steady clock, and hands over the workers' events as they arrive.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, PrefixKey, salt_name
from ostinato.router.cache_state import CacheState
from ostinato.router.decision import (
    Candidate,
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.event_feed import NO_EVENTS, EventFeed
from ostinato.router.events import EventBatch
from ostinato.router.load import Assigned, Load, ReturnTimes
from ostinato.router.policies import (
    Fleet,
    LeastLoaded,
    Policy,
    PrefixHash,
    RoundRobin,
    SessionAffinity,
)
from ostinato.router.prefix_tree import Namespace, Node, PrefixTree, block_names

_POLICIES: dict[str, type[Policy]] = {
    "cache_state": CacheState,
    "prefix_hash": PrefixHash,
    "session": SessionAffinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
POLICIES = tuple(_POLICIES)
"""Names of policies, the default first."""

TIER_WORTH = (0.0, 0.2, 0.6)
"""Computing a token's worth that loading it takes, from device, host and slower memory."""


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


@dataclass(slots=True)
class _Worker:
    """One worker, and what runs there."""

    name: str
    bit: int
    feed: EventFeed
    block_size: int
    sends_events: bool
    joined_at: float | None = None
    is_draining: bool = False
    load: Load = field(default_factory=Load)
    owes_events_since: float | None = None
    assigned: int = 0
    assigned_tokens: int = 0
    hit_tokens: int = 0

    @property
    def size(self) -> int:
        """Tokens per block, as its events say, or as it was announced."""
        return self.feed.block_size or self.block_size


@dataclass(frozen=True, slots=True)
class _Found:
    """What the tree knows of a prompt at one worker.

    Attributes:
        cached_tokens: That its events say it has.
        expected_tokens: That it has, or was sent lately.
        load_worth: Tokens' worth of loading what is not in its device's memory.
        follows: Decision that the deepest expected block was sent by.
    """

    cached_tokens: int
    expected_tokens: int
    load_worth: float
    follows: int | None


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
        self._workers: dict[str, _Worker] = {}
        self._by_bit: dict[int, _Worker] = {}
        self._running: dict[int, Assigned] = {}
        self._returns = ReturnTimes()
        self._number = 0

    def add_worker(self, name: str, *, block_size: int = 16, sends_events: bool = False) -> None:
        """Let a worker join, or end its draining.

        Args:
            name: Any, such as its URL.
            block_size: Tokens per block, until its events tell.
            sends_events: It is GUESSED until they arrive, and silent if they do not.
        """
        if name in self._workers:
            self._workers[name].is_draining = False
            return
        bit = next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)
        worker = _Worker(name, bit, EventFeed(self._tree, bit, name), block_size, sends_events)
        self._workers[name] = self._by_bit[bit] = worker

    def drain(self, name: str) -> None:
        """Send no new requests to a worker."""
        self._workers[name].is_draining = True

    def remove(self, name: str) -> None:
        """Forget a worker; what runs there has failed."""
        worker = self._workers.pop(name)
        del self._by_bit[worker.bit]
        self._tree.clear(worker.bit)
        self._running = {
            at: each for at, each in self._running.items() if each.worker != worker.bit
        }

    def restarted(self, name: str) -> Resync:
        """Forget what a worker had cached: its connection was lost, or it said so itself."""
        feed = self._workers[name].feed
        feed.start_over("restarted")
        return Resync(name, 0)

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
        left_out = set(exclude)
        workers = [
            worker
            for worker in self._workers.values()
            if not worker.is_draining and worker.name not in left_out
        ]
        if not workers:
            return None
        for worker in workers:
            worker.load.decay(now, self._returns.mean_s)
        found = self._look_up(request, workers, now)
        candidates = [self._candidate(request, *each) for each in zip(workers, found, strict=True)]
        fleet = Fleet(
            candidates,
            [worker.load.num_running for worker in workers],
            [worker.load.recent_tokens for worker in workers],
        )
        place, reason = self._policy.choose(request, fleet)
        return self._assign(request, workers[place], found[place], candidates, place, reason, now)

    def _look_up(
        self, request: RouteRequest, workers: list[_Worker], now: float
    ) -> list[_Found]:
        by_size: dict[int, list[Node]] = {}
        for size in {worker.size for worker in workers}:
            root = self._tree.find_root(self._namespace(request, size))
            names = [] if root is None else self._names(request, size)
            by_size[size] = [] if root is None else self._tree.walk(root, names)
        return [self._found(worker, by_size[worker.size], now) for worker in workers]

    def _found(self, worker: _Worker, path: list[Node], now: float) -> _Found:
        """Follow a prompt's blocks as far as a worker has, or was sent, all of them."""
        bit, size = worker.bit, worker.size
        cached = expected = 0
        worth, is_cached, follows = 0.0, True, None
        for node in path:
            held = node.held
            if held[0] >> bit & 1:
                tier = 0
            elif held[1] >> bit & 1:
                tier = 1
            elif held[2] >> bit & 1:
                tier = 2
            else:
                sent = node.sent
                mark = None if sent is None else sent.get(bit)
                if mark is None or mark[0] < now:
                    break
                is_cached, follows, tier = False, mark[1], 0
            expected += size
            if is_cached:
                cached = expected
            worth += size * TIER_WORTH[tier]
        return _Found(cached, expected, worth, follows)

    def _candidate(self, request: RouteRequest, worker: _Worker, found: _Found) -> Candidate:
        n = len(request.tokens)
        expected = min(found.expected_tokens, max(0, n - 1))
        state = WorkerState.GUESSED if request.characters else worker.feed.state
        return Candidate(
            worker.name,
            state,
            min(found.cached_tokens, expected),
            expected - min(found.cached_tokens, expected),
            max(1, n - expected) + round(found.load_worth),
            worker.load.assigned_tokens,
            0.0,
        )

    def _assign(
        self,
        request: RouteRequest,
        worker: _Worker,
        found: _Found,
        candidates: list[Candidate],
        place: int,
        reason: str,
        now: float,
    ) -> Decision:
        self._number += 1
        chosen = candidates.pop(place)
        follows = found.follows if found.follows in self._running else None
        if follows is not None and not self._running[follows].prefill_tokens:
            follows = None
        work = Assigned(
            self._number,
            worker.bit,
            request.session,
            chosen.tokens_to_compute,
            min(request.max_tokens, 256),
            now,
        )
        self._running[self._number] = work
        worker.load.assign(work)
        worker.assigned += 1
        worker.assigned_tokens += chosen.tokens_to_compute
        worker.hit_tokens += chosen.cached_tokens + chosen.expected_tokens
        if request.session:
            self._returns.returned(request.session, now)
        self._expect(request, worker, work, now)
        return Decision(
            self._number,
            worker.name,
            self.config.policy,
            chosen.state,
            len(request.tokens),
            chosen.cached_tokens + chosen.expected_tokens,
            chosen.tokens_to_compute,
            reason,
            follows,
            (chosen, *candidates),
        )

    def _expect(self, request: RouteRequest, worker: _Worker, work: Assigned, now: float) -> None:
        """Take a prompt's blocks to be cached where it was sent, until events or time tell."""
        node = self._tree.root(self._namespace(request, worker.size))
        until, bit = now + self.config.guess_ttl_s, worker.bit
        for name in self._names(request, worker.size):
            node = self._tree.child(node, name)
            if not node.holders >> bit & 1:
                self._tree.expect(node, bit, until, work.number)
                work.nodes.append(node)
        self._tree.shrink()

    def _namespace(self, request: RouteRequest, block_size: int) -> Namespace:
        salt = salt_name(request.salt.encode()) if request.salt else ""
        return Namespace(request.adapter, salt, request.characters, block_size)

    def _names(self, request: RouteRequest, block_size: int) -> list[bytes]:
        if not request.images:
            return block_names(request.tokens, block_size)
        key = PrefixKey(Identity(), request.tokens, request.images)

        def extra(start: int, stop: int) -> bytes:
            found = key.extra(start, stop)
            return b"" if found is None else found.encoded

        return block_names(request.tokens, block_size, extra)

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
        worker = self._by_bit[work.worker]
        if work.session:
            self._returns.ended(work.session, work.worker, now)
        if decision.tokens_to_compute > worker.size and worker.owes_events_since is None:
            worker.owes_events_since = now

    def failed(self, decision: Decision, now: float) -> None:
        """Note that a request ended without an answer; its prefix is not taken to be cached."""
        work = self._end(decision)
        for node in [] if work is None else reversed(work.nodes):
            assert work is not None
            self._tree.unexpect(node, work.worker, work.number)

    def _end(self, decision: Decision) -> Assigned | None:
        work = self._running.pop(decision.number, None)
        if work is not None:
            self._by_bit[work.worker].load.release(work)
        return work

    def apply(self, name: str, batch: EventBatch, now: float) -> Resync | None:
        """Take a batch of a worker's events as it arrived; returns what is missing, if anything."""
        worker = self._workers[name]
        worker.owes_events_since, worker.sends_events = None, True
        resync = worker.feed.apply(batch, now)
        self._tree.shrink()
        return resync

    def replayed(self, name: str, batches: Iterable[EventBatch], now: float) -> Resync | None:
        """Take the batches that a replay brought; returns a request for a snapshot if they do not do."""
        self._workers[name].owes_events_since = None
        resync = self._workers[name].feed.replayed(batches, now)
        self._tree.shrink()
        return resync

    def restore(self, name: str, sequence: int, batch: EventBatch, now: float) -> Resync | None:
        """Take a snapshot: stored events for all that was cached before batch ``sequence``."""
        self._workers[name].owes_events_since = None
        resync = self._workers[name].feed.restore(sequence, batch, now)
        self._tree.shrink()
        return resync

    def forget(self, name: str, now: float) -> None:
        """Give up what a worker is known to have: neither replay nor snapshot can be had."""
        self._workers[name].feed.forget()

    def broken(self, name: str, reason: str, now: float) -> None:
        """Distrust a worker's events, which could not be decoded: it becomes GUESSED."""
        self._workers[name].feed.distrust(reason)

    def overdue(self, now: float) -> list[Resync]:
        """Notice silent workers; returns what to fetch. Call it every few seconds."""
        asked = []
        for worker in self._workers.values():
            since = worker.owes_events_since
            if worker.sends_events and since is not None and now - since > self.config.silent_s:
                worker.owes_events_since = None
                reason = f"silent for {now - since:.0f} s after a request that stored blocks"
                if (resync := worker.feed.doubt(reason)) is not None:
                    asked.append(resync)
        return asked

    def place(self, request: RouteRequest, copies: int, now: float) -> list[Decision]:
        """Choose workers that a prefix should be sent to, so that so many have it.

        Returns:
            One decision per copy that is missing: send each the prefix with ``max_tokens=1``.
        """
        return []

    def _on_forget(self, workers: int) -> None:
        for bit, worker in self._by_bit.items():
            if workers >> bit & 1:
                worker.feed.forgot()

    def workers(self, now: float) -> list[WorkerStatus]:
        """Return all workers' state, in the order in which they joined."""
        return [_status(worker) for worker in self._workers.values()]

    def explain(self, decision: Decision) -> str:
        """Say in words and numbers why a decision was taken."""
        return "\n".join([decision.reason, *map(str, decision.candidates)])

    def check(self) -> None:
        """Assert the invariants."""
        self._tree.check()
        for worker in self._workers.values():
            worker.feed.check()
            mine = [each for each in self._running.values() if each.worker == worker.bit]
            assert worker.load.num_running == len(mine)
            assert worker.load.prefill_tokens == sum(each.prefill_tokens for each in mine)
            assert worker.load.decode_tokens == sum(each.decode_tokens for each in mine)


def _status(worker: _Worker) -> WorkerStatus:
    feed = worker.feed
    return WorkerStatus(
        worker.name,
        feed.state,
        feed.reason,
        worker.is_draining,
        worker.load.num_running,
        worker.load.assigned_tokens,
        feed.cached_tokens,
        worker.assigned,
        worker.assigned_tokens,
        worker.hit_tokens,
        feed.next,
        feed.lost_batches,
    )

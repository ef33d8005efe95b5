"""``Router``: chooses the worker of a request by what each has cached and still has to do.

Pure and synchronous: no thread, no socket, no clock. Its caller passes the time, in seconds of any
steady clock, and the workers' events as they arrive.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_settings, setting
from ostinato.former_names import accept_old_names
from ostinato.plugins.loading import is_plugin
from ostinato.router.policy import policies
from ostinato.router.policy.cache_state import CacheState
from ostinato.router.policy.decision import (
    Candidate,
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.policy.event_feed import EventFeed
from ostinato.router.policy.events import EventBatch
from ostinato.router.policy.load import Assigned, ReturnTimes, WorkerPrices
from ostinato.router.policy.lookup import Steps, WorkerPrefix, exhaust, expect, look_up
from ostinato.router.policy.plugged import make_policy
from ostinato.router.policy.prefix_tree import PrefixTree
from ostinato.router.policy.worker import Worker

_POLICIES: dict[str, type[policies.Policy]] = {
    "cache_state": CacheState,
    "prefix_hash": policies.PrefixHash,
    "session": policies.SessionAffinity,
    "least_loaded": policies.LeastLoaded,
    "round_robin": policies.RoundRobin,
}
POLICIES = tuple(_POLICIES)
"""Names of policies, the default first."""


def check_policy_name(value: str) -> None:
    """Raise ConfigError unless a value names a built-in policy, or may name a class."""
    if value not in _POLICIES and not is_plugin(value):
        known = ", ".join(POLICIES)
        raise ConfigError(f"policy={value!r}: one of {known} is known, or a class as FILE.py:Class")


@accept_old_names
@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a router's choice."""

    policy: str = setting(POLICIES[0], page="learn.md")
    """How workers are chosen: ``cache_state``, ``prefix_hash``, ``session``, ``least_loaded`` or
    ``round_robin``, or by a class of your own as ``FILE.py:Class``."""
    max_tracked_tokens: int = setting(4_000_000, minimum=1, old_names=("max_tokens",))
    """Maximum tokens of known prefixes, over all workers."""
    guess_ttl_s: float = setting(120.0, above=0)
    """Seconds after which a prefix sent to a worker without events counts as evicted."""
    silent_s: float = setting(10.0, above=0)
    """Seconds after which a worker whose events are due counts as silent."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a setting is out of range."""
        check_settings(self)
        check_policy_name(self.policy)


@dataclass(frozen=True, slots=True)
class _Option:
    """A worker that can be chosen, and what it has of the prompt."""

    worker: Worker
    lookup: WorkerPrefix
    candidate: Candidate


class Router:
    """Chooses workers. For one thread at a time."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.policy: policies.Policy = make_policy(self.config.policy, _POLICIES)
        self._tree = PrefixTree(self.config.max_tracked_tokens, self._on_evict)
        self._workers: dict[str, Worker] = {}
        self._by_bit: dict[int, Worker] = {}
        self._running: dict[int, Assigned] = {}
        self._returns = ReturnTimes()
        self._number = 0

    # Workers

    def add_worker(
        self, name: str, *, block_size: int | None = None, sends_events: bool = False
    ) -> None:
        """Add a worker, or resume and update a known one.

        Args:
            name: Any name, such as its URL.
            block_size: Tokens per block, until its events say; 16 by default.
            sends_events: Whether to expect events, and to notice if none arrive.
        """
        worker = self._workers.get(name)
        if worker is None:
            bit = next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)
            feed = EventFeed(self._tree, bit, name, self._on_computed)
            worker = self._workers[name] = self._by_bit[bit] = Worker(name, bit, feed, 16)
        worker.is_draining = False
        worker.announced_size = block_size or worker.announced_size
        worker.feed.sends_events |= sends_events

    def set_prices(self, name: str, prices: WorkerPrices | None) -> None:
        """Set what a worker publishes of its steps; None if it publishes nothing."""
        self._workers[name].prices = prices

    def drain(self, name: str) -> None:
        """Send no new requests to a worker."""
        self._workers[name].is_draining = True

    def remove(self, name: str) -> None:
        """Remove a worker; its unfinished requests have failed."""
        bit = self._workers.pop(name).bit
        del self._by_bit[bit]
        self._tree.clear(bit)
        self._running = {at: work for at, work in self._running.items() if work.worker != bit}

    def restarted(self, name: str) -> Resync:
        """Clear the blocks of a worker that has restarted."""
        worker = self._workers[name]
        worker.feed.start_over("restarted")
        worker.evidence.clear()
        worker.trial = ""
        return Resync(name, 0)

    def interrupted(self, name: str) -> Resync | None:
        """Handle a response that broke off: the worker may have restarted.

        Guesses are cleared, and events are doubted until the returned batches arrive.
        """
        feed = self._workers[name].feed
        if feed.state is WorkerState.GUESSED:
            feed.start_over("")
        return feed.doubt("answers broke off: it may have restarted")

    def workers(self) -> list[WorkerStatus]:
        """Return the state of all workers, in the order in which they joined."""
        return [worker.status() for worker in self._workers.values()]

    @property
    def num_tokens(self) -> int:
        """Tokens of all tracked prefixes; at most ``max_tracked_tokens``."""
        return self._tree.num_tokens

    # Requests

    def route(
        self, request: RouteRequest, now: float, exclude: Iterable[str] = ()
    ) -> Decision | None:
        """Choose the worker for a request, and count it as assigned there.

        Args:
            request: The request.
            now: Seconds.
            exclude: Workers that must not be chosen.

        Returns:
            None if there is no worker to choose from.
        """
        return exhaust(self.route_in_slices(request, now, exclude))

    def route_in_slices(
        self, request: RouteRequest, now: float, exclude: Iterable[str] = ()
    ) -> Steps[Decision | None]:
        """Do as ``route``, as a generator that yields after each part of a long prompt.

        If it is closed early, nothing is assigned.
        """
        options = yield from self._look_up(request, now, exclude)
        if not options:
            return None
        fleet = policies.Candidates(
            [x.candidate for x in options], [x.worker.load for x in options]
        )
        choice = self.policy.choose(request, fleet)
        decision, work = self._assign(request, now, options, choice)
        try:
            lookup = options[choice.place].lookup
            yield from expect(self._tree, request, lookup, work, self.config.guess_ttl_s)
        except GeneratorExit:
            self.failed(decision)
            raise
        return decision

    def look_up(
        self, request: RouteRequest, now: float, exclude: Iterable[str] = ()
    ) -> list[Candidate]:
        """Return the cost of a request at each worker, without assigning it."""
        return [option.candidate for option in exhaust(self._look_up(request, now, exclude))]

    def place(self, request: RouteRequest, copies: int, now: float) -> list[Decision]:
        """Choose workers to compute a prefix, until ``copies`` workers have it.

        Returns:
            One decision per missing copy: send the prefix there with ``max_tokens=1``.
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

    def first_token(self, decision: Decision) -> None:
        """Record that a request's prompt is computed."""
        work = self._running.get(decision.number)
        if work is not None:
            self._by_bit[work.worker].load.prefilled(work)

    def finished(self, decision: Decision, now: float, cached_tokens: int | None = None) -> None:
        """Record the end of a request, with the hits that its worker reported, if any."""
        work = self._end(decision)
        if work is None:
            return
        if work.session:
            self._returns.ended(work.session, now)
        worker = self._by_bit[work.worker]
        worker.computed_tokens += work.assigned_tokens
        worker.hit_tokens += decision.expected_cached_tokens
        worker.check(work, decision, cached_tokens, now)
        if work.nodes and worker.feed.sends_events and worker.events_due_since is None:
            worker.events_due_since = now
        if cached_tokens is not None and cached_tokens < decision.expected_cached_tokens:
            worker.overestimated_tokens += decision.expected_cached_tokens - cached_tokens

    def failed(self, decision: Decision) -> None:
        """Record that a request failed, so that its prefix is not assumed to be cached."""
        work = self._end(decision)
        if work is not None:
            self._by_bit[work.worker].load.withdraw(work, self._returns.mean_s)
            for node in reversed(work.nodes):
                self._tree.unexpect(node, work.worker, work.number)

    def explain(self, decision: Decision) -> str:
        """Return why a decision was made, with a table of all candidates."""
        return decision.explain()

    # Events

    def apply(self, name: str, batch: EventBatch) -> Resync | None:
        """Apply a batch of a worker's events; returns what is missing, if anything."""
        self._workers[name].evidence.num_silences = 0
        return self._resync(name, self._workers[name].feed.apply(batch))

    def begin(self, name: str, batches: Iterable[EventBatch]) -> Resync | None:
        """Start over with all batches that a worker replays; returns what is still missing."""
        return self._resync(name, self._workers[name].feed.begin(batches))

    def replayed(self, name: str, batches: Iterable[EventBatch]) -> Resync | None:
        """Apply replayed batches; returns what is still missing."""
        return self._resync(name, self._workers[name].feed.replayed(batches))

    def restore(self, name: str, sequence: int, batch: EventBatch) -> Resync | None:
        """Apply a snapshot: stored events of all blocks cached before batch ``sequence``."""
        return self._resync(name, self._workers[name].feed.restore(sequence, batch))

    def forget(self, name: str) -> None:
        """Clear a worker's blocks: neither a replay nor a snapshot is available."""
        self._workers[name].feed.skip_missing()

    def broken(self, name: str, reason: str) -> None:
        """Stop using a worker's events, which could not be decoded, until a resync."""
        self._workers[name].feed.distrust(reason)

    def overdue(self, now: float) -> list[Resync]:
        """Return what to fetch from workers that are silent, or were not believed.

        Call it every few seconds. A worker whose events contradict its requests becomes GUESSED.
        """
        due = [worker.overdue(now, self.config.silent_s) for worker in self._workers.values()]
        return [resync for resync in due if resync is not None]

    def check(self) -> None:
        """Assert the invariants."""
        self._tree.check()
        for worker in self._workers.values():
            worker.feed.check()
            worker.load.check([w for w in self._running.values() if w.worker == worker.bit])

    def _look_up(
        self, request: RouteRequest, now: float, exclude: Iterable[str]
    ) -> Steps[list[_Option]]:
        excluded = set(exclude)
        workers = [worker for name, worker in self._workers.items() if name not in excluded]
        workers = [worker for worker in workers if not worker.is_draining]
        sizes = [(worker.bit, worker.compared_size(request)) for worker in workers]
        lookups = yield from look_up(self._tree, request, sizes, now)
        for worker in workers:
            worker.load.decay(now, self._returns.mean_s)
        mean_token_s = self._mean_token_s
        return [
            _Option(worker, each, worker.candidate(request, each, mean_token_s))
            for worker, each in zip(workers, lookups, strict=True)
            if not worker.is_draining and self._workers.get(worker.name) is worker
        ]

    @property
    def _mean_token_s(self) -> float:
        """Mean price of a token, over the workers that publish one; 1 if none does."""
        prices = [worker.prices.token_s for worker in self._workers.values() if worker.prices]
        return fmean(prices) if prices else 1.0

    def _assign(
        self, request: RouteRequest, now: float, options: Sequence[_Option], choice: policies.Choice
    ) -> tuple[Decision, Assigned]:
        for option, score in zip(options, choice.scores, strict=False):
            option.candidate.score = score
        worker, lookup = options[choice.place].worker, options[choice.place].lookup
        chosen = options[choice.place].candidate
        others = [option.candidate for option in options if option.candidate is not chosen]
        self._number += 1
        cost = chosen.tokens_to_compute
        work = Assigned(self._number, worker.bit, request.session, cost, cost, now)
        is_told = not (request.characters or request.held)  # events name public prefixes otherwise
        if is_told and worker.feed.state is WorkerState.EXACT:
            work.num_removals = worker.feed.num_removals
            if lookup.expected_tokens:
                work.untold = lookup.path[lookup.cached_tokens // lookup.block_size]
        follows = self._leader(lookup.sent_by)
        self._running[work.number] = work
        worker.load.assign(work)
        worker.assigned += 1
        self._returns.returned(request.session, now)
        decision = Decision(
            work.number,
            worker.name,
            self.config.policy,
            chosen.state,
            len(request.tokens),
            chosen.cached_tokens + chosen.expected_tokens,
            chosen.tokens_to_compute,
            choice.reason,
            follows,
            (chosen, *others),
        )
        return decision, work

    def _leader(self, number: int | None) -> int | None:
        """Return the decision if its prompt is still being computed."""
        work = None if number is None else self._running.get(number)
        return number if work is not None and work.prefill_tokens else None

    def _full_tokens(self, request: RouteRequest, name: str) -> int:
        size, limit = self._workers[name].compared_size(request), len(request.tokens) - 1
        return min(limit, len(request.tokens) // size * size)

    def _end(self, decision: Decision) -> Assigned | None:
        work = self._running.pop(decision.number, None)
        if work is not None:
            self._by_bit[work.worker].load.remove(work)
        return work

    def _resync(self, name: str, resync: Resync | None) -> Resync | None:
        self._workers[name].events_due_since = None
        self._tree.shrink()
        return resync

    def _on_computed(self, decision: int, num_tokens: int) -> None:
        """Record that a worker has computed part of a prompt."""
        if (work := self._running.get(decision)) is not None:
            self._by_bit[work.worker].load.computed(work, num_tokens)

    def _on_evict(self, workers: int) -> None:
        for bit, worker in self._by_bit.items():
            if workers >> bit & 1:
                worker.feed.evicted()

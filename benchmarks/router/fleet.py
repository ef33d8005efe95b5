"""Replays a load in time on several replicas behind a router.

Each replica is the real scheduler and cache, with its own clock
(``ostinato.lab.simulate.timed_replay``);
all events of the fleet are processed in order of time::

    arrival ──► router ──► replica: plan ─ cost ─► commit ──► first token, finished ──► router
                  ▲                                   └── KV events, late by so much ─────┘

A router learns of a step when it ends, never before. It sees only what ``Dispatcher`` is told;
``LibraryDispatcher`` is ours.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from ostinato.core.config import SchedulerConfig
from ostinato.lab.simulate.timed_replay import TimedReplica, spell
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.work.cost_model import StepCost
from ostinato.observe import events as observed
from ostinato.observe.events import EventBatch
from ostinato.router import Decision, Router, RouterConfig, RouteRequest
from ostinato.router.policy import WorkerPrices
from ostinato.router.policy import events as routed
from ostinato.sched.sequence import SequenceUpdate
from ostinato.settings import PrefixCacheConfig


class Dispatcher(Protocol):
    """A router in the simulation; requests are numbers of the trace."""

    def route(self, number: int, now_s: float) -> int:
        """Return the replica for a request."""

    def first_token(self, number: int, now_s: float) -> None:
        """Note that a request's prompt is computed."""

    def finished(self, number: int, now_s: float) -> None:
        """Note that a request ended."""

    def failed(self, number: int, now_s: float) -> None:
        """Note that a request's replica was lost; it is routed anew."""

    def events(self, replica: int, batch: EventBatch, now_s: float) -> None:
        """Take a replica's KV events."""

    def lost(self, replica: int, now_s: float) -> None:
        """Note that a replica is gone."""

    def back(self, replica: int, now_s: float) -> None:
        """Note that a replica is back, with nothing cached."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica that is lost for a while."""

    replica: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Settings that all replicas of a run share.

    Attributes:
        num_replicas: At least 1.
        cache: Cache settings of each.
        scheduling: Scheduler settings of each.
        cost: Cost model of each.
        slowdown: Factor on the gaps between arrivals.
        late_s: Delay of KV events, from a step's end to the router.
        outages: Times in which a replica is lost.
    """

    num_replicas: int
    cache: PrefixCacheConfig
    scheduling: SchedulerConfig
    cost: StepCost
    slowdown: float = 1.0
    late_s: float = 0.0
    outages: Sequence[Outage] = ()


@dataclass(slots=True)
class FleetResult:
    """What a run of the fleet found.

    Attributes:
        first_token_s: From arrival to the first token, by request; NaN for those refused.
        replica: Replica that served each request.
        hit_tokens: Prompt tokens that hit, by request.
        input_tokens: Tokens of all prompts served.
        computed_tokens: Computed tokens of prompts, by replica.
        busy_s: Seconds in which a step ran, by replica.
        num_retries: Requests routed anew.
    """

    first_token_s: list[float]
    replica: list[int]
    hit_tokens: list[int]
    input_tokens: int = 0
    computed_tokens: list[int] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    num_retries: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that hit."""
        return sum(self.hit_tokens) / self.input_tokens if self.input_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Most computed tokens of a replica, over the mean."""
        return max(self.computed_tokens) / float(np.mean(self.computed_tokens))

    def percentile(self, share: float) -> float:
        """Return a percentile of the time to first token; ``share`` is in percent."""
        return float(np.nanpercentile(self.first_token_s, share))

    @property
    def mean_first_token_s(self) -> float:
        """Mean time to the first token."""
        return float(np.nanmean(self.first_token_s))


def replay_fleet(trace: BlockTrace, fleet: FleetConfig, dispatcher: Dispatcher) -> FleetResult:
    """Serve a trace at its times from several replicas behind a router."""
    return _FleetReplay(trace, fleet, dispatcher).run()


class _FleetReplay:
    """One run: a heap of what happens when."""

    def __init__(self, trace: BlockTrace, fleet: FleetConfig, dispatcher: Dispatcher) -> None:
        self._trace, self._fleet, self._dispatcher = trace, fleet, dispatcher
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._replicas = [self._new_replica(place) for place in range(fleet.num_replicas)]
        self._running: list[set[int]] = [set() for _ in self._replicas]
        n = len(trace)
        self._arrivals: list[float] = (trace.arrival_s * fleet.slowdown).tolist()
        self._result = FleetResult([float("nan")] * n, [-1] * n, [0] * n)
        self._result.computed_tokens = [0] * fleet.num_replicas
        self._result.busy_s = [0.0] * fleet.num_replicas

    def run(self) -> FleetResult:
        """Process all events in order of time."""
        for number, arrival_s in enumerate(self._arrivals):
            self._at(arrival_s, lambda now_s, number=number: self._arrive(number, now_s))
        for outage in self._fleet.outages:
            self._at(outage.from_s, lambda now_s, place=outage.replica: self._lose(place, now_s))
            self._at(
                outage.until_s,
                lambda now_s, place=outage.replica: self._dispatcher.back(place, now_s),
            )
        while self._agenda:
            now_s, _, happen = heapq.heappop(self._agenda)
            happen(now_s)
        for place, replica in enumerate(self._replicas):
            self._result.busy_s[place] += replica.busy_s
        return self._result

    def _at(self, time_s: float, happen: Callable[..., None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), happen))

    def _new_replica(self, place: int) -> TimedReplica:
        fleet = self._fleet
        replica = TimedReplica(self._trace, fleet.cache, fleet.scheduling, fleet.cost)
        if replica.cache.events is not None:
            replica.cache.events.subscribe(lambda batch: self._publish(place, replica, batch))
        return replica

    def _publish(self, place: int, replica: TimedReplica, batch: EventBatch) -> None:
        def arrive(now_s: float) -> None:
            if self._replicas[place] is replica:
                self._dispatcher.events(place, batch, now_s)

        self._at(replica.now_s + self._fleet.late_s, arrive)

    def _arrive(self, number: int, now_s: float) -> None:
        place = self._dispatcher.route(number, now_s)
        replica, result = self._replicas[place], self._result
        num_tokens = replica.add(number)
        if num_tokens is None:
            self._dispatcher.finished(number, now_s)
            return
        if result.replica[number] < 0:
            result.input_tokens += num_tokens
        result.replica[number] = place
        self._running[place].add(number)
        self._begin(place, replica, now_s)

    def _begin(self, place: int, replica: TimedReplica, now_s: float) -> None:
        if not replica.is_stepping and replica.begin(now_s):
            self._at(replica.now_s, lambda now_s: self._end(place, replica, now_s))

    def _end(self, place: int, replica: TimedReplica, now_s: float) -> None:
        if self._replicas[place] is not replica:
            return  # it was lost during the step
        for update in replica.end():
            self._take(place, update, now_s)
        self._begin(place, replica, now_s)

    def _take(self, place: int, update: SequenceUpdate, now_s: float) -> None:
        sequence, number = update.sequence, int(update.sequence.request.request_id)
        result = self._result
        if sequence.num_output_tokens == 1:
            hit = sequence.num_shared_tokens + sequence.num_copied_tokens
            result.first_token_s[number] = now_s - self._arrivals[number]
            result.hit_tokens[number] = hit
            result.computed_tokens[place] += int(self._trace.input_tokens[number]) - hit
            self._dispatcher.first_token(number, now_s)
        if sequence.finish_reason is not None:
            self._running[place].discard(number)
            self._dispatcher.finished(number, now_s)

    def _lose(self, place: int, now_s: float) -> None:
        self._result.busy_s[place] += self._replicas[place].busy_s
        self._replicas[place] = self._new_replica(place)
        lost, self._running[place] = self._running[place], set()
        for number in sorted(lost):
            self._dispatcher.failed(number, now_s)
        self._dispatcher.lost(place, now_s)
        for number in sorted(lost):
            self._result.num_retries += 1
            self._arrive(number, now_s)


class LibraryDispatcher:
    """One router, or several side by side that do not see each other's requests."""

    def __init__(
        self,
        trace: BlockTrace,
        num_replicas: int,
        config: RouterConfig,
        num_routers: int = 1,
        prices: WorkerPrices | None = None,
    ) -> None:
        """Let all replicas join.

        Args:
            trace: Whose requests are routed, by number.
            num_replicas: Workers are named by their numbers.
            config: Settings of each router.
            num_routers: Requests take turns.
            prices: What replicas publish of their steps; None for engines that publish nothing.
        """
        self._trace, self._prices = trace, prices
        self._routers = [Router(config) for _ in range(num_routers)]
        self._decisions: dict[int, Decision] = {}
        self._sessions: dict[int, str] = {}  # by the block that ended a prompt
        for replica in range(num_replicas):
            self.back(replica, 0.0)

    def _router(self, number: int) -> Router:
        return self._routers[number % len(self._routers)]

    def route(self, number: int, now_s: float) -> int:
        """Return the replica for a request."""
        prompt = spell(self._trace, number)
        decision = self._router(number).route(
            RouteRequest(prompt, session=self._session(number)), now_s
        )
        assert decision is not None, "some replica is always there"
        self._decisions[number] = decision
        return int(decision.worker)

    def _session(self, number: int) -> str:
        """Return the session that a request goes on with: it begins with all of an earlier one."""
        path = self._trace.path(number).tolist()
        known = (self._sessions[block] for block in reversed(path) if block in self._sessions)
        session = next(known, str(number))
        if path:
            self._sessions[path[-1]] = session
        return session

    def first_token(self, number: int, now_s: float) -> None:
        """Note that a request's prompt is computed."""
        self._router(number).first_token(self._decisions[number])

    def finished(self, number: int, now_s: float) -> None:
        """Note that a request ended."""
        self._router(number).finished(self._decisions.pop(number), now_s)

    def failed(self, number: int, now_s: float) -> None:
        """Note that a request's replica was lost."""
        self._router(number).failed(self._decisions.pop(number))

    def events(self, replica: int, batch: EventBatch, now_s: float) -> None:
        """Take a replica's KV events."""
        heard = routed.EventBatch(batch.sequence, batch.time_s, tuple(map(_heard, batch.events)))
        for router in self._routers:
            router.apply(str(replica), heard)

    def lost(self, replica: int, now_s: float) -> None:
        """Note that a replica is gone."""
        for router in self._routers:
            router.remove(str(replica))

    def back(self, replica: int, now_s: float) -> None:
        """Note that a replica is back, with nothing cached."""
        for router in self._routers:
            router.add_worker(str(replica), block_size=self._trace.block_tokens)
            router.set_prices(str(replica), self._prices)


def _heard(event: observed.Event) -> routed.Event:
    """Return an event as the router takes it."""
    if isinstance(event, observed.BlockStored):
        blocks = event.digests, event.parent, event.tokens, event.block_size
        return routed.Stored(*blocks, group=event.group, is_window=event.group > 0)
    if isinstance(event, observed.BlockRemoved):
        return routed.Removed(event.digests, group=event.group)
    return routed.Cleared()

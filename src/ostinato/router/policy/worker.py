"""One worker, as the router sees it."""

from dataclasses import dataclass, field

from ostinato.router.policy.decision import (
    CHARACTERS_PER_TOKEN,
    Candidate,
    Decision,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.policy.event_feed import EventFeed
from ostinato.router.policy.evidence import Evidence
from ostinato.router.policy.load import Assigned, WorkerLoad, WorkerPrices
from ostinato.router.policy.lookup import WorkerPrefix

_SILENT = "silent for {:g} s after a request that stored blocks"

_FIRST_RETRY_S, _MAX_RETRY_S = 30.0, 480.0
"""Time between attempts to get the events of a guessed worker, the first at once; it doubles."""

_CALM_S = 60.0
"""Time since an attempt after which an agreement makes the next one the first again."""


@dataclass(slots=True)
class Worker:
    """A worker's cached blocks and load.

    Attributes:
        name: Its name.
        bit: Its bit in the tree's masks.
        feed: Its events.
        announced_size: Tokens per block, until its events say.
        is_draining: Whether it gets no new requests.
        load: What it has to do.
        prices: What it publishes of its steps; None if nothing.
        evidence: Checks of its events.
        trial: Why its events were not believed, until enough checks agree; empty if they are.
        events_due_since: When a request that must have stored blocks ended, if no event came since.
        assigned: Requests assigned so far.
        computed_tokens: Tokens to compute of all finished prompts.
        hit_tokens: Expected hits of all finished prompts.
        overestimated_tokens: Expected hits that it did not report.
    """

    name: str
    bit: int
    feed: EventFeed
    announced_size: int
    is_draining: bool = False
    load: WorkerLoad = field(default_factory=WorkerLoad)
    prices: WorkerPrices | None = None
    evidence: Evidence = field(default_factory=Evidence)
    trial: str = ""
    events_due_since: float | None = None
    assigned: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    overestimated_tokens: int = 0
    _trial_live: int = 0
    _num_retries: int = 0
    _retry_at: float = 0.0
    _is_reported: bool = False

    @property
    def state(self) -> WorkerState:
        """How its cache is known; guessed as long as its events are on trial."""
        return WorkerState.GUESSED if self.trial else self.feed.state

    @property
    def reason(self) -> str:
        """Why it is not known exactly; empty if exact."""
        return self.feed.reason or (f"on trial again: {self.trial}" if self.trial else "")

    @property
    def block_size(self) -> int:
        """Tokens per block, by its events or as announced."""
        return self.feed.block_size or self.announced_size

    def compared_size(self, request: RouteRequest) -> int:
        """Return the number of tokens, or characters, that are compared as one block."""
        return self.block_size * (CHARACTERS_PER_TOKEN if request.characters else 1)

    def candidate(
        self, request: RouteRequest, lookup: WorkerPrefix, mean_token_s: float
    ) -> Candidate:
        """Return the cost of a prompt here; a worker without prices has the fleet's mean price."""
        num_tokens = len(request.tokens)
        limit = max(0, num_tokens - 1)  # the last token is always computed
        cached = min(max(lookup.cached_tokens, request.held.get(self.name, 0)), limit)
        expected = min(lookup.expected_tokens, limit - cached)
        left, prices, price = max(1, num_tokens - cached - expected), self.prices, 1.0
        tokens_to_compute, queued = left + lookup.load_tokens, float(self.load.prefill_tokens)
        if prices is not None:
            price = prices.seconds(cached + expected, left) / (left * mean_token_s)
            if prices.is_shortest_first:
                queued = self.load.tokens_before(tokens_to_compute)
            queued *= prices.token_s / mean_token_s
        return Candidate(
            self.name,
            WorkerState.GUESSED if request.characters else self.state,
            cached,
            expected,
            tokens_to_compute,
            self.load.prefill_tokens,
            tokens_to_compute * price,
            queued,
        )

    def check(
        self, work: Assigned, decision: Decision, reported_tokens: int | None, now: float
    ) -> None:
        """Check its events by a finished request, if they were complete all the time."""
        feed = self.feed
        if work.num_removals is None or feed.state is not WorkerState.EXACT:
            return
        if reported_tokens is not None and work.num_removals == feed.num_removals:
            reason = self.evidence.compare(decision, reported_tokens, self.block_size)
            self._conclude(reason, now)
        self.evidence.await_event(work, now, feed.num_live)

    def overdue(self, now: float, silent_s: float) -> Resync | None:
        """Doubt its events if they contradict requests or are late; returns what to fetch."""
        feed, since = self.feed, self.events_due_since
        if feed.state is WorkerState.EXACT:
            self._conclude(self.evidence.judge(self.bit, now, silent_s, feed.num_live), now)
        is_silent = since is not None and now - since > silent_s
        if is_silent:
            self.events_due_since = None
            if feed.state is not WorkerState.DEGRADED:
                self._conclude(self.evidence.silent(silent_s), now)
        if feed.state is WorkerState.GUESSED:
            if is_silent and feed.has_no_events:
                feed.doubt(_SILENT.format(silent_s))
            return self._retry(now)
        return feed.doubt(_SILENT.format(silent_s)) if is_silent else None

    def _conclude(self, reason: str, now: float) -> None:
        """Believe its events no longer for a reason, or again without one."""
        if reason:
            self.trial, self._trial_live = reason, self.feed.num_live
            self.feed.distrust(reason)
            self.evidence.clear()
        elif self.evidence.is_convincing and self.feed.num_live > self._trial_live:
            self.trial = ""
            if now - self._retry_at > _CALM_S:
                self._num_retries, self._is_reported = 0, False

    def _retry(self, now: float) -> Resync | None:
        """Return what to fetch of a worker without usable events: all, now and then."""
        pause_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** (self._num_retries - 1))
        is_due = not self._num_retries or now - self._retry_at >= pause_s
        if not is_due or not self.feed.sends_events:
            return None
        self._num_retries += 1
        self._retry_at = now
        reason = "" if self._is_reported or self.feed.has_no_events else self.feed.reason
        self._is_reported |= bool(reason)
        return Resync(self.name, 0, begins=True, reason=reason)

    def status(self) -> WorkerStatus:
        """Return its state."""
        return WorkerStatus(
            self.name,
            self.state,
            self.reason,
            self.is_draining,
            self.load.num_running,
            self.load.prefill_tokens,
            self.feed.cached_tokens,
            self.assigned,
            self.computed_tokens,
            self.hit_tokens,
            self.overestimated_tokens,
            self.feed.next,
            self.feed.lost_batches,
        )

"""One worker, as the router sees it."""

from dataclasses import dataclass, field

from ostinato.router.decision import (
    CHARACTERS_PER_TOKEN,
    Candidate,
    Resync,
    RouteRequest,
    WorkerState,
    WorkerStatus,
)
from ostinato.router.event_feed import EventFeed
from ostinato.router.load import Load
from ostinato.router.lookup import Found


@dataclass(slots=True)
class Worker:
    """What it has cached, and what runs there.

    Attributes:
        name: Given by the process.
        bit: In the tree's masks.
        feed: Its events.
        announced_size: Tokens per block, until events tell.
        is_draining: Gets no new requests.
        load: What it has to do.
        owes_events_since: When a request ended that must have stored blocks, if no event came yet.
        assigned: Requests so far.
        assigned_tokens: Computed by them, as expected.
        hit_tokens: Of their prompts, expected to be cached.
        overestimated_tokens: Expected to be cached, and reported not to be.
    """

    name: str
    bit: int
    feed: EventFeed
    announced_size: int
    is_draining: bool = False
    load: Load = field(default_factory=Load)
    owes_events_since: float | None = None
    assigned: int = 0
    assigned_tokens: int = 0
    hit_tokens: int = 0
    overestimated_tokens: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per block, as its events say, or as it was announced."""
        return self.feed.block_size or self.announced_size

    def compared_size(self, request: RouteRequest) -> int:
        """Return the size of the pieces that a prompt is compared by: a block's worth of text."""
        return self.block_size * (CHARACTERS_PER_TOKEN if request.characters else 1)

    def candidate(self, request: RouteRequest, found: Found) -> Candidate:
        """Return what it would have to do for a prompt; no event can tell of characters."""
        num_tokens = len(request.tokens)
        most = max(0, num_tokens - 1)  # the last token is always computed
        cached = min(max(found.cached_tokens, request.held.get(self.name, 0)), most)
        expected = min(found.expected_tokens, most - cached)
        return Candidate(
            self.name,
            WorkerState.GUESSED if request.characters else self.feed.state,
            cached,
            expected,
            max(1, num_tokens - cached - expected) + found.load_tokens,
            self.load.prefill_tokens,
            0.0,
        )

    def take(self, candidate: Candidate) -> None:
        """Count a request that was assigned."""
        self.assigned += 1
        self.assigned_tokens += candidate.tokens_to_compute
        self.hit_tokens += candidate.cached_tokens + candidate.expected_tokens

    def overdue(self, now: float, silent_s: float) -> Resync | None:
        """Doubt its events, if it is silent for too long; returns what settles it."""
        since = self.owes_events_since
        if since is None or now - since <= silent_s:
            return None
        self.owes_events_since = None
        return self.feed.doubt(f"silent for {now - since:.0f} s after a request that stored blocks")

    def status(self) -> WorkerStatus:
        """Return it as metrics and pages show it."""
        return WorkerStatus(
            self.name,
            self.feed.state,
            self.feed.reason,
            self.is_draining,
            self.load.num_running,
            self.load.prefill_tokens,
            self.feed.cached_tokens,
            self.assigned,
            self.assigned_tokens,
            self.hit_tokens,
            self.overestimated_tokens,
            self.feed.next,
            self.feed.lost_batches,
        )

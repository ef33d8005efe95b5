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
    """A worker's cached blocks and load.

    Attributes:
        name: Its name.
        bit: Its bit in the tree's masks.
        feed: Its events.
        announced_size: Tokens per block, until its events say.
        is_draining: Whether it gets no new requests.
        load: What it has to do.
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
    load: Load = field(default_factory=Load)
    events_due_since: float | None = None
    assigned: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    overestimated_tokens: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per block, by its events or as announced."""
        return self.feed.block_size or self.announced_size

    def compared_size(self, request: RouteRequest) -> int:
        """Return the number of tokens, or characters, that are compared as one block."""
        return self.block_size * (CHARACTERS_PER_TOKEN if request.characters else 1)

    def candidate(self, request: RouteRequest, found: Found) -> Candidate:
        """Return the cost of a prompt here."""
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

    def overdue(self, now: float, silent_s: float) -> Resync | None:
        """Doubt its events if it was silent for too long; returns what to fetch."""
        since = self.events_due_since
        if since is None or now - since <= silent_s:
            return None
        self.events_due_since = None
        return self.feed.doubt(f"silent for {now - since:.0f} s after a request that stored blocks")

    def status(self) -> WorkerStatus:
        """Return its state."""
        return WorkerStatus(
            self.name,
            self.feed.state,
            self.feed.reason,
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

"""Load of a worker: assigned and unfinished work, and recent work.

All figures are in tokens to compute; ``WorkerPrices`` says what they cost at a worker. Blocks of a
prompt that the worker's events report are done, so the progress of a long prompt is known. A
session is idle between its turns, but it returns: *recent* work decays over the measured time that
sessions take to return, so that a worker does not look idle because its agents think.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from ostinato.router.policy.prefix_tree import Node

MAX_SESSIONS = 100_000
"""Sessions whose last turn is remembered."""


LONGER_SHARE = 1 / 3
"""What longer prompts compute beside a shorter one, of its own: they share a quarter of a step."""


@dataclass(frozen=True, slots=True)
class WorkerPrices:
    """What a worker publishes of its steps.

    Attributes:
        token_s: Seconds per token.
        pair_s: Seconds per pair of a query and a key.
        is_shortest_first: Whether prompts with less to compute go before those with more.
    """

    token_s: float
    pair_s: float = 0.0
    is_shortest_first: bool = False

    def seconds(self, start: int, num_tokens: int) -> float:
        """Return what tokens after ``start`` others cost."""
        return num_tokens * (self.token_s + self.pair_s * (start + num_tokens / 2))


@dataclass(slots=True)
class Assigned:
    """An unfinished request.

    Attributes:
        number: Number of its decision.
        worker: Bit of its worker.
        session: Its session; empty if unknown.
        prefill_tokens: Prompt tokens left to compute; 0 after its first token.
        assigned_tokens: Prompt tokens to compute when it was assigned.
        at: Time of its assignment.
        nodes: Blocks that are expected because of it.
        untold: First block of its prompt that was sent to its worker before, without an event.
        num_removals: Removals by its worker's events before it, if those were complete; else None.
    """

    number: int
    worker: int
    session: str
    prefill_tokens: int
    assigned_tokens: int
    at: float
    nodes: list[Node] = field(default_factory=list)
    untold: Node | None = None
    num_removals: int | None = None


class ReturnTimes:
    """Mean time of sessions from the end of one turn to the next."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, float] = OrderedDict()
        self.mean_s = 30.0

    def ended(self, session: str, now: float) -> None:
        """Record the end of a turn."""
        self._ended[session] = now
        self._ended.move_to_end(session)
        if len(self._ended) > MAX_SESSIONS:
            self._ended.popitem(last=False)

    def returned(self, session: str, now: float) -> None:
        """Record the start of a turn."""
        ended = self._ended.get(session)
        if ended is not None:
            self.mean_s += (max(0.0, now - ended) - self.mean_s) / 32


@dataclass(slots=True)
class WorkerLoad:
    """Load of one worker.

    Attributes:
        prefill_tokens: Tokens left to compute of assigned prompts.
        running: Unfinished requests, by the numbers of their decisions.
        recent_tokens: Assigned work, decayed, as of ``decayed_at``.
        recent_variance: Its variance if requests arrived by chance, in tokens squared.
        decayed_at: Time of the last decay.
    """

    prefill_tokens: int = 0
    running: dict[int, Assigned] = field(default_factory=dict)
    recent_tokens: float = 0.0
    recent_variance: float = 0.0
    decayed_at: float = 0.0

    @property
    def num_running(self) -> int:
        """Unfinished requests."""
        return len(self.running)

    def tokens_before(self, num_tokens: int) -> float:
        """Return the tokens queued ahead of ``num_tokens``, where the shortest goes first."""
        queue = [work.prefill_tokens for work in self.running.values()]
        shorter = sum(queued for queued in queue if queued <= num_tokens)
        return shorter + min(self.prefill_tokens - shorter, LONGER_SHARE * num_tokens)

    def decay(self, now: float, time_s: float) -> None:
        """Decay recent work, to 1/e in ``time_s``."""
        kept = exp(min(0.0, (self.decayed_at - now) / max(time_s, 1.0)))
        self.recent_tokens *= kept
        self.recent_variance *= kept * kept
        self.decayed_at = now

    def assign(self, work: Assigned) -> None:
        """Add a request."""
        self.running[work.number] = work
        self.prefill_tokens += work.prefill_tokens
        self.recent_tokens += work.prefill_tokens
        self.recent_variance += work.prefill_tokens**2

    def computed(self, work: Assigned, num_tokens: int) -> None:
        """Record that part of a prompt is computed; one token stays until the first token."""
        done = min(num_tokens, max(0, work.prefill_tokens - 1))
        work.prefill_tokens -= done
        self.prefill_tokens -= done

    def prefilled(self, work: Assigned) -> None:
        """Record a request's first token."""
        self.prefill_tokens -= work.prefill_tokens
        work.prefill_tokens = 0

    def remove(self, work: Assigned) -> None:
        """Remove a request."""
        self.prefilled(work)
        del self.running[work.number]

    def withdraw(self, work: Assigned, time_s: float) -> None:
        """Subtract the work of a request that failed from recent work."""
        left = work.assigned_tokens * exp(min(0.0, (work.at - self.decayed_at) / max(time_s, 1.0)))
        self.recent_tokens = max(0.0, self.recent_tokens - left)
        self.recent_variance = max(0.0, self.recent_variance - left**2)

    def check(self, running: Sequence[Assigned]) -> None:
        """Assert that the sums are those of the unfinished requests."""
        assert list(self.running.values()) == running
        assert self.prefill_tokens == sum(work.prefill_tokens for work in running)

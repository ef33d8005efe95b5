"""How much a worker has to do: assigned and not yet done, and what it is about to get again.

All figures are in tokens to compute. Of a prompt that is being computed, the blocks that its
worker's events tell of are done, so that what waits behind a long one is known. A paced session
does nothing between its turns, but it comes back: its worker's *recent* work decays over as long
as sessions take to return, which is measured, so that a worker never looks idle just because its
agents think.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from ostinato.router.prefix_tree import Node

MAX_SESSIONS = 100_000
"""Sessions whose last turn is remembered, the latest."""


@dataclass(slots=True)
class Assigned:
    """A request that runs somewhere.

    Attributes:
        number: Of its decision.
        worker: Its bit.
        session: Of the request; empty if unknown.
        prefill_tokens: Left to compute of its prompt; 0 from its first token on.
        at: When it was assigned.
        nodes: Blocks that are expected because of it.
    """

    number: int
    worker: int
    session: str
    prefill_tokens: int
    at: float
    nodes: list[Node] = field(default_factory=list)


class ReturnTimes:
    """How long sessions take from the end of one turn to the next."""

    def __init__(self) -> None:
        """Start with a guess, which measurements replace."""
        self._ended: OrderedDict[str, float] = OrderedDict()
        self.mean_s = 30.0

    def ended(self, session: str, now: float) -> None:
        """Note that a turn ended."""
        self._ended[session] = now
        self._ended.move_to_end(session)
        if len(self._ended) > MAX_SESSIONS:
            self._ended.popitem(last=False)

    def returned(self, session: str, now: float) -> None:
        """Note that a turn began."""
        ended = self._ended.get(session)
        if ended is not None:
            self.mean_s += (max(0.0, now - ended) - self.mean_s) / 32


@dataclass(slots=True)
class Load:
    """Of one worker.

    Attributes:
        prefill_tokens: Left to compute of prompts assigned.
        num_running: Requests.
        recent_tokens: Work assigned, decayed, as of ``decayed_at``.
        recent_variance: What it varies by where requests come by chance, in tokens squared.
    """

    prefill_tokens: int = 0
    num_running: int = 0
    recent_tokens: float = 0.0
    recent_variance: float = 0.0
    decayed_at: float = 0.0

    def decay(self, now: float, time_s: float) -> None:
        """Let recent work fade: to a third in ``time_s``."""
        kept = exp(min(0.0, (self.decayed_at - now) / max(time_s, 1.0)))
        self.recent_tokens *= kept
        self.recent_variance *= kept * kept
        self.decayed_at = now

    def assign(self, work: Assigned) -> None:
        """Take on a request."""
        self.num_running += 1
        self.prefill_tokens += work.prefill_tokens
        self.recent_tokens += work.prefill_tokens
        self.recent_variance += work.prefill_tokens**2

    def computed(self, work: Assigned, num_tokens: int) -> None:
        """Note that part of a prompt is computed; one token is left until the first token."""
        done = min(num_tokens, max(0, work.prefill_tokens - 1))
        work.prefill_tokens -= done
        self.prefill_tokens -= done

    def prefilled(self, work: Assigned) -> None:
        """Note a request's first token."""
        self.prefill_tokens -= work.prefill_tokens
        work.prefill_tokens = 0

    def release(self, work: Assigned) -> None:
        """Be done with a request."""
        self.prefilled(work)
        self.num_running -= 1

    def check(self, running: Sequence[Assigned]) -> None:
        """Assert that the sums are those of the requests that run."""
        assert self.num_running == len(running)
        assert self.prefill_tokens == sum(work.prefill_tokens for work in running)

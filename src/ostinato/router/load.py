"""How much a worker has to do: assigned and not yet done, and what it is about to get again.

All figures are in tokens to compute. A paced session does nothing between its turns, but it comes
back: its worker's *recent* work decays over as long as sessions take to return, which is measured,
so that a worker never looks idle just because its agents think.
"""

from collections import OrderedDict
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
        decode_tokens: Expected of its answer.
        at: When it was assigned.
        nodes: Blocks that are expected because of it.
        is_single_flight: Nothing was known of its prompt's end when it was routed.
    """

    number: int
    worker: int
    session: str
    prefill_tokens: int
    decode_tokens: int
    at: float
    nodes: list[Node] = field(default_factory=list)


class ReturnTimes:
    """How long sessions take from one turn's end to the next, and on which worker they were."""

    def __init__(self, first_guess_s: float = 30.0) -> None:
        """Start with a guess, which measurements replace."""
        self._ended: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self.mean_s = first_guess_s

    def ended(self, session: str, worker: int, now: float) -> None:
        """Note that a turn ended."""
        self._ended[session] = now, worker
        self._ended.move_to_end(session)
        if len(self._ended) > MAX_SESSIONS:
            self._ended.popitem(last=False)

    def returned(self, session: str, now: float) -> int | None:
        """Note that a session's next turn came; returns its worker, None if it is new."""
        last = self._ended.get(session)
        if last is None:
            return None
        self.mean_s += (max(0.0, now - last[0]) - self.mean_s) / 32
        return last[1]


@dataclass(slots=True)
class Load:
    """Of one worker.

    Attributes:
        prefill_tokens: Left to compute of prompts assigned.
        decode_tokens: Expected of answers that run.
        num_running: Requests.
        recent_tokens: Work assigned, decayed, as of ``decayed_at``.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_running: int = 0
    recent_tokens: float = 0.0
    decayed_at: float = 0.0

    @property
    def assigned_tokens(self) -> int:
        """Not yet done."""
        return self.prefill_tokens + self.decode_tokens

    def decay(self, now: float, time_s: float) -> None:
        """Let recent work fade."""
        self.recent_tokens *= exp(min(0.0, (self.decayed_at - now) / max(time_s, 1e-3)))
        self.decayed_at = now

    def assign(self, work: Assigned) -> None:
        """Take on a request."""
        self.num_running += 1
        self.prefill_tokens += work.prefill_tokens
        self.decode_tokens += work.decode_tokens
        self.recent_tokens += work.prefill_tokens + work.decode_tokens

    def prefilled(self, work: Assigned) -> None:
        """Note a request's first token."""
        self.prefill_tokens -= work.prefill_tokens
        work.prefill_tokens = 0

    def release(self, work: Assigned) -> None:
        """Be done with a request."""
        self.prefilled(work)
        self.num_running -= 1
        self.decode_tokens -= work.decode_tokens

"""Requests to the router and its decisions: values, and their explanation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ostinato.core.identity import ImageSpan

CHARACTERS_PER_TOKEN = 4
"""Rough ratio of English text, used to count and to compare texts without tokens."""


class WorkerState(Enum):
    """How the router knows what a worker has cached."""

    EXACT = "exact"
    """Its events are complete: exactly its cached blocks are known."""

    DEGRADED = "degraded"
    """Events were missed: some blocks may be missing or unknown."""

    GUESSED = "guessed"
    """No events: recently sent prefixes are assumed to be cached."""


_KNOWN = {
    WorkerState.EXACT: "exact",
    WorkerState.DEGRADED: "events were missed",
    WorkerState.GUESSED: "guessed",
}


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request, as far as the choice of its worker depends on it.

    Attributes:
        tokens: Prompt ids from position 0; code points of its text if ``characters``.
        characters: The workers' tokenizer is unknown, so events cannot be used.
        adapter: As the workers' events name it; empty without one.
        salt: Cache salt of the tenant; empty for the shared namespace.
        images: Images by digest, with the placeholder tokens they fill.
        session: Conversation of the request; empty if unknown.
        tenant: For the caller's counters; not used for the choice.
        max_tokens: Maximum tokens of the answer; not used for the choice.
        held: Tokens of the prompt that are cached for all tenants, by worker.
    """

    tokens: Sequence[int]
    characters: bool = False
    adapter: str = ""
    salt: str = ""
    images: tuple[ImageSpan, ...] = ()
    session: str = ""
    tenant: str = ""
    max_tokens: int = 256
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens; an estimate if ``characters``."""
        return len(self.tokens) // (CHARACTERS_PER_TOKEN if self.characters else 1)

    @classmethod
    def of_text(cls, text: str, session: str = "") -> "RouteRequest":
        """Return a request for a text without a tokenizer, compared by characters."""
        return cls([ord(letter) for letter in text], True, session=session)


@dataclass(slots=True)
class Candidate:
    """The cost of a request at a worker.

    Attributes:
        worker: Name.
        state: How the worker's cache is known, for this request.
        cached_tokens: Prompt tokens that are cached by its events.
        expected_tokens: Prompt tokens after those that were sent there, without an event so far.
        tokens_to_compute: The rest, at least 1, and the cost of loading from slower tiers.
        load_tokens: Tokens to compute of the worker's unfinished prompts.
        work: What there is to compute, by the worker's prices: in tokens of the fleet's mean price.
        queued: What goes before it there, likewise.
        score: The policy's score, lower is better; 0 if the policy has none.
    """

    worker: str
    state: WorkerState
    cached_tokens: int
    expected_tokens: int
    tokens_to_compute: int
    load_tokens: int
    work: float
    queued: float
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker of a request, and why.

    Attributes:
        number: Identifies it in ``first_token``, ``finished`` and ``failed``.
        worker: Name.
        policy: Name of the policy.
        state: How the worker's cache is known, for this request.
        num_tokens: Prompt tokens.
        expected_cached_tokens: Prompt tokens that are expected to hit.
        tokens_to_compute: The rest, at least 1, and the cost of loading from slower tiers.
        reason: Why this worker, in a few words.
        follows: Decision that is computing the same prefix, for which this one waits.
        candidates: All workers that could have served it, the chosen one first.
    """

    number: int
    worker: str
    policy: str
    state: WorkerState
    num_tokens: int
    expected_cached_tokens: int
    tokens_to_compute: int
    reason: str
    follows: int | None = None
    candidates: tuple[Candidate, ...] = ()

    def explain(self) -> str:
        """Return why the request went where it went, with a table of all candidates."""
        lines = [
            f"{self.worker} by {self.policy}: {self.reason}",
            f"{self.num_tokens:,} prompt tokens, {self.expected_cached_tokens:,} expected to "
            f"be cached ({_KNOWN[self.state]}), {self.tokens_to_compute:,} to compute",
        ]
        if self.follows is not None:
            lines.append(f"waits for request {self.follows}, which computes the same prefix")
        width = max(len("worker"), *(len(each.worker) for each in self.candidates))
        heads = ("cached", "sent", "compute", "queued")
        lines.append(f"{'worker':{width}}  {' '.join(f'{x:>9}' for x in heads)} {'score':>11}")
        for each in self.candidates:
            counts = (each.cached_tokens, each.expected_tokens, each.tokens_to_compute)
            columns = " ".join(f"{count:>9,}" for count in (*counts, each.load_tokens))
            known = _KNOWN[each.state]
            lines.append(f"{each.worker:{width}}  {columns} {each.score:>11.4g}  {known}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Resync:
    """Missing events of a worker, for the process to fetch.

    Attributes:
        worker: Name.
        replay_from: First batch to request from the replay socket (``replayed``).
        snapshot: The replay is too short: request a snapshot (``restore``), or ``forget``.
        begins: Nothing is known: request a snapshot (``restore``), or a replay (``begin``).
        reason: Why the worker's events were not believed, to be logged; empty if known already.
    """

    worker: str
    replay_from: int
    snapshot: bool = False
    begins: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of a worker, for metrics and pages.

    Attributes:
        name: Name.
        state: How its cache is known.
        reason: Why not exactly; empty if exact.
        is_draining: Whether it gets no new requests.
        num_requests: Unfinished requests that this router assigned.
        load_tokens: Tokens to compute of assigned prompts.
        cached_tokens: Tokens cached by its events.
        assigned: Requests assigned so far.
        computed_tokens: Tokens to compute of all finished prompts.
        hit_tokens: Expected hits of all finished prompts.
        overestimated_tokens: Expected hits that the worker did not report.
        next_batch: Number of the next batch of events; 0 without events.
        lost_batches: Batches missed and not replayed.
    """

    name: str
    state: WorkerState
    reason: str
    is_draining: bool
    num_requests: int
    load_tokens: int
    cached_tokens: int
    assigned: int
    computed_tokens: int
    hit_tokens: int
    overestimated_tokens: int
    next_batch: int
    lost_batches: int

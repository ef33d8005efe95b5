"""What is asked of the router, and what it answers: values without behaviour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ostinato.core.identity import ImageSpan

CHARACTERS_PER_TOKEN = 4
"""Of English text, roughly: for counts, and for how finely texts without tokens are compared."""


class WorkerState(Enum):
    """How the router knows what a worker has cached."""

    EXACT = "exact"
    """Its events are complete: every block it has is known, and none that it has not."""

    DEGRADED = "degraded"
    """Events were missed: some blocks may be gone, or unknown."""

    GUESSED = "guessed"
    """No events: what was sent there lately is taken to be cached."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request, as far as the choice of its worker depends on it.

    Attributes:
        tokens: Of the prompt from position 0; code points of its text if ``characters``.
        characters: The workers' tokenizer is unknown: events say nothing about this request.
        adapter: As the workers' events name it; empty without one.
        salt: Cache salt of the tenant; empty for the shared namespace.
        images: By digest, with the placeholder tokens they fill.
        session: Conversation that the request belongs to; empty if unknown.
        tenant: For the caller's counts; no choice depends on it.
        max_tokens: Most tokens of the answer, likewise.
        held: Tokens of the prompt that workers have cached for all tenants, by name.
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
        """Of the prompt; of a text without a tokenizer, what it has roughly."""
        return len(self.tokens) // (CHARACTERS_PER_TOKEN if self.characters else 1)

    @classmethod
    def of_text(cls, text: str, session: str = "") -> "RouteRequest":
        """Return the request for a text without a tokenizer: its code points are its tokens."""
        return cls([ord(letter) for letter in text], True, session=session)


@dataclass(slots=True)
class Candidate:
    """What a worker would have had to do for a request.

    Attributes:
        worker: Name.
        state: How its cache is known, for this request.
        cached_tokens: Of the prompt, that its events say it has.
        expected_tokens: Of the prompt, behind those: sent there lately, without an event so far.
        tokens_to_compute: The rest, at least 1, and the loading of slower tiers as tokens' worth.
        load_tokens: To compute of the prompts ahead of it.
        score: The policy's figure, lower is better; 0 where the policy has none.
    """

    worker: str
    state: WorkerState
    cached_tokens: int
    expected_tokens: int
    tokens_to_compute: int
    load_tokens: int
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    Attributes:
        number: Names it in ``first_token``, ``finished`` and ``failed``.
        worker: Name.
        policy: That chose it.
        state: How the worker's cache is known, for this request.
        num_tokens: Of the prompt.
        expected_cached_tokens: Of the prompt.
        tokens_to_compute: The rest, at least 1, and the loading of slower tiers as tokens' worth.
        reason: Why this worker, in a few words.
        follows: Number of the decision whose prefix, still being computed, this one waits for.
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


@dataclass(frozen=True, slots=True)
class Resync:
    """What a worker's events lack; the process fetches it and hands it over.

    Attributes:
        worker: Name.
        replay_from: Number of the first batch to ask the replay socket for (``replayed``).
        snapshot: The replay is too short: ask for a snapshot (``restore``), or ``forget``.
    """

    worker: str
    replay_from: int
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker, for metrics and pages.

    Attributes:
        name: Of the worker.
        state: How its cache is known.
        reason: Why not exact; empty if it is.
        is_draining: Gets no new requests.
        num_requests: Running there, as far as this router knows.
        load_tokens: To compute of prompts assigned.
        cached_tokens: Known to be cached, or guessed.
        assigned: Requests so far.
        assigned_tokens: To be computed by them, as expected.
        hit_tokens: Of their prompts, expected to be cached.
        overestimated_tokens: Expected to be cached, and reported not to be.
        next_batch: Number of the batch of events to come; 0 without events.
        lost_batches: Missed and not replayed.
    """

    name: str
    state: WorkerState
    reason: str
    is_draining: bool
    num_requests: int
    load_tokens: int
    cached_tokens: int
    assigned: int
    assigned_tokens: int
    hit_tokens: int
    overestimated_tokens: int
    next_batch: int
    lost_batches: int

"""Policies: which of the candidates gets a request.

A policy sees the cost of the request at every worker, and their load. The default, ``cache_state``,
has its own file.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ostinato.router.policy.decision import Candidate, RouteRequest
from ostinato.router.policy.load import MAX_SESSIONS, WorkerLoad

LOAD_FACTOR = 1.25
"""Ratio to the mean number of requests, above which a worker gets no more by affinity."""

PREFIX_TOKENS = 256
"""Number of prompt tokens that ``prefix_hash`` hashes."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a policy chooses from.

    Attributes:
        candidates: One per worker that may be chosen, at least one.
        loads: Load of each.
    """

    candidates: Sequence[Candidate]
    loads: Sequence[WorkerLoad]

    @property
    def max_running(self) -> int:
        """Maximum requests of a worker, the next one included: 1.25 times the mean."""
        running = sum(load.num_running for load in self.loads)
        return ceil(LOAD_FACTOR * (running + 1) / len(self.loads))

    def has_room(self, place: int) -> bool:
        """Whether a worker may get one more request."""
        return self.loads[place].num_running < self.max_running

    def least_loaded(self) -> int:
        """Return the place with the least load; among equals, the least recent work."""
        return min(
            range(len(self.loads)),
            key=lambda at: (
                self.loads[at].prefill_tokens,
                self.loads[at].num_running,
                self.loads[at].recent_tokens,
            ),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a policy.

    Attributes:
        place: Index of the candidate.
        reason: Why, in a few words.
        scores: Scores of all candidates, lower is better; empty if the policy has none.
    """

    place: int
    reason: str
    scores: Sequence[float] = ()


class Policy(Protocol):
    """Chooses a worker."""

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the candidate for a request."""


class RoundRobin:
    """Each worker in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the next."""
        self._turn += 1
        return Choice(self._turn % len(fleet.candidates), "the next in turn")


class LeastLoaded:
    """The worker with the least to do."""

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the least loaded."""
        return Choice(fleet.least_loaded(), "it has the least to do")


class PrefixHash:
    """Prompts with the same first tokens go to one worker: consistent hashing with bounded load.

    Workers are ordered by a hash of the prefix and their name (rendezvous hashing), so that a
    worker that joins or leaves moves only its own share; the first with room gets the request.
    Source: consistent hashing with bounded loads, arXiv 1608.01350.
    """

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the first in the prefix's order that has room."""
        prefix = array("I", request.tokens[:PREFIX_TOKENS]).tobytes()
        identity = f"{len(request.adapter)}:{request.adapter}{request.salt}\0".encode()
        key = hashlib.blake2b(identity + prefix).digest()
        order = sorted(range(len(fleet.candidates)), key=lambda at: _rank(key, fleet, at))
        skipped, place = next(each for each in enumerate(order) if fleet.has_room(each[1]))
        passed = f", past {skipped} with no room" if skipped else ""
        return Choice(place, f"the hash of its first {PREFIX_TOKENS} tokens{passed}")


class SessionAffinity:
    """A session stays on its worker while that has room; a new one goes to the least loaded."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, str] = OrderedDict()
        self._without_session = PrefixHash()

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the session's worker; without a session, as ``prefix_hash`` does."""
        if not request.session:
            return self._without_session.choose(request, fleet)
        names = [candidate.worker for candidate in fleet.candidates]
        home = self._workers.get(request.session)
        if home in names and fleet.has_room(names.index(home)):
            choice = Choice(names.index(home), "its session is there")
        elif home:
            why = "it has the least to do; the session's worker has no room or has left"
            choice = Choice(fleet.least_loaded(), why)
        else:
            choice = Choice(fleet.least_loaded(), "a new session; it has the least to do")
        self._workers[request.session] = names[choice.place]
        self._workers.move_to_end(request.session)
        if len(self._workers) > MAX_SESSIONS:
            self._workers.popitem(last=False)
        return choice


def _rank(key: bytes, fleet: Candidates, place: int) -> bytes:
    name = fleet.candidates[place].worker.encode()
    return hashlib.blake2b(name, key=key, digest_size=8).digest()

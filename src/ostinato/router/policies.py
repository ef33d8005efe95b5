"""Policies by name: which of the candidates gets a request.

A policy sees what every worker would have to do for the request and has to do already; what it
does not need it ignores. ``cache_state`` is in a file of its own.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ostinato.router.decision import Candidate, RouteRequest
from ostinato.router.load import MAX_SESSIONS

LOAD_FACTOR = 1.25
"""Of the mean number of requests, above which a worker gets none for affinity's sake."""

PREFIX_TOKENS = 256
"""First tokens of a prompt that ``prefix_hash`` goes by."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a policy chooses from.

    Attributes:
        candidates: One per worker that may be chosen, at least one.
        num_running: Requests per candidate.
        recent_tokens: Decayed work per candidate.
    """

    candidates: Sequence[Candidate]
    num_running: Sequence[int]
    recent_tokens: Sequence[float]

    @property
    def most_running(self) -> int:
        """Requests that a worker may have with the next one: its share and a quarter."""
        return ceil(LOAD_FACTOR * (sum(self.num_running) + 1) / len(self.num_running))


class Policy(Protocol):
    """Chooses."""

    def choose(self, request: RouteRequest, fleet: Fleet) -> tuple[int, str]:
        """Return a candidate's place, and why it was chosen."""


class RoundRobin:
    """Each worker in turn."""

    def __init__(self) -> None:
        """Start anywhere."""
        self._turn = -1

    def choose(self, request: RouteRequest, fleet: Fleet) -> tuple[int, str]:
        """Return the next."""
        self._turn += 1
        return self._turn % len(fleet.candidates), "the next in turn"


class LeastLoaded:
    """The worker with the least to do."""

    def choose(self, request: RouteRequest, fleet: Fleet) -> tuple[int, str]:
        """Return the least loaded; of equals, the one with least recent work."""
        place = least_loaded(fleet, range(len(fleet.candidates)))
        return place, "the least assigned work"


class PrefixHash:
    """Prompts that begin alike go to one worker, by consistent hashing with bounded load.

    Workers are ordered by a hash of the prefix and their name (rendezvous hashing), so that one
    that joins or leaves moves only its own share; the first with room gets the request.
    Source: consistent hashing with bounded loads, arXiv 1608.01350.
    """

    def choose(self, request: RouteRequest, fleet: Fleet) -> tuple[int, str]:
        """Return the first in the prefix's order that has room."""
        prefix = array("I", request.tokens[:PREFIX_TOKENS]).tobytes()
        key = hashlib.blake2b(
            b"\0".join([request.adapter.encode(), request.salt.encode(), prefix])
        ).digest()
        return _first_with_room(key, fleet, "the hash of its first tokens")


class SessionAffinity:
    """A session stays on its worker while that has room; new ones go where least is to do."""

    def __init__(self) -> None:
        """Start without sessions."""
        self._workers: OrderedDict[str, str] = OrderedDict()

    def choose(self, request: RouteRequest, fleet: Fleet) -> tuple[int, str]:
        """Return the session's worker; without one, as ``prefix_hash`` does."""
        if not request.session:
            return PrefixHash().choose(request, fleet)
        names = [candidate.worker for candidate in fleet.candidates]
        home = self._workers.get(request.session)
        if home in names and fleet.num_running[names.index(home)] < fleet.most_running:
            place, why = names.index(home), "its session's worker"
        else:
            place = least_loaded(fleet, range(len(names)))
            why = "its session's worker is full or gone" if home else "a new session"
        self._workers[request.session] = names[place]
        self._workers.move_to_end(request.session)
        if len(self._workers) > MAX_SESSIONS:
            self._workers.popitem(last=False)
        return place, why


def least_loaded(fleet: Fleet, places: Sequence[int]) -> int:
    """Return the place with the least assigned work; of equals, the least recent work."""
    return min(places, key=lambda at: (fleet.candidates[at].load_tokens, fleet.recent_tokens[at]))


def _first_with_room(key: bytes, fleet: Fleet, why: str) -> tuple[int, str]:
    order = sorted(
        range(len(fleet.candidates)),
        key=lambda at: hashlib.blake2b(
            fleet.candidates[at].worker.encode(), key=key, digest_size=8
        ).digest(),
    )
    most = fleet.most_running
    for skipped, place in enumerate(order):
        if fleet.num_running[place] < most:
            return place, f"{why}, {skipped} full ones passed over" if skipped else why
    raise AssertionError("not every worker can have more than its share")

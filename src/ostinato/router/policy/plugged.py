"""A routing policy of one's own, as ``FILE.py:Class``, beside what the default would have chosen.

A class with ``choose(num_tokens, workers)`` sees one ``WorkerView`` per worker and returns a place
among them. What it cannot be used for goes to the least loaded worker, and is counted. If its
module has a function ``reason(num_tokens, worker)``, decisions say what it returns.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ostinato.core.errors import ConfigError
from ostinato.plugins.child import pass_contract
from ostinato.plugins.faults import FaultCounter
from ostinato.plugins.loading import is_plugin, load_plugin
from ostinato.router.policy.cache_state import CacheState
from ostinato.router.policy.decision import Candidate, RouteRequest, WorkerState
from ostinato.router.policy.load import WorkerLoad
from ostinato.router.policy.policies import Candidates, Choice, Policy


@dataclass(slots=True)
class WorkerView:
    """What a policy sees of a worker, for one prompt; all in tokens but the name.

    Attributes:
        name: Its name.
        cached: Leading prompt tokens that it has cached.
        expected: Tokens after those that are being computed there for an earlier request.
        queued: Tokens still to be computed of prompts that were sent there before.
        recent: Tokens that it was sent lately, decayed.
    """

    name: str
    cached: int
    expected: int
    queued: int
    recent: float


class PluggedPolicy:
    """Asks a class of one's own, and the default beside it."""

    def __init__(self, value: str) -> None:
        """Load a class by a setting's value.

        Raises:
            ConfigError: It cannot be loaded.
        """
        self.name = value.rpartition("/")[2]
        cls: Any = load_plugin("policy", value)
        self._chooser = cls()
        self._reason: Any = getattr(sys.modules.get(cls.__module__), "reason", None)
        self._default = CacheState()
        self.faults = FaultCounter(value)
        self._num_requests = self._num_tokens = self._num_hits = self._num_built_in_hits = 0

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the worker that the class chooses."""
        place = self._place(request, fleet)
        beside = self._default.choose(request, fleet).place
        self._num_requests += 1
        self._num_tokens += len(request.tokens)
        self._num_hits += _hit(fleet.candidates[place])
        self._num_built_in_hits += _hit(fleet.candidates[beside])
        return Choice(place, self._why(request, fleet, place))

    def beside_built_in(self) -> dict[str, Any]:
        """Return the expected hits of all choices beside the default's, as JSON.

        Those of the default are with the workers as they were at each moment.
        """
        total = max(1, self._num_tokens)
        return {
            "names": [self.name],
            "requests": self._num_requests,
            "own_ratio": self._num_hits / total,
            "built_in_ratio": self._num_built_in_hits / total,
            "faults": self.faults.num_faults,
        }

    def _why(self, request: RouteRequest, fleet: Candidates, place: int) -> str:
        """Return what the file's function ``reason`` says, if it has one."""
        otherwise = f"{self.name} chose it"
        if self._reason is None:
            return otherwise
        view, num_tokens = views_of(fleet)[place], len(request.tokens)
        return self.faults.call("reason", lambda: str(self._reason(num_tokens, view)), otherwise)

    def _place(self, request: RouteRequest, fleet: Candidates) -> int:
        """Return the class's answer, or the least loaded worker if it is none."""
        views, num_tokens = views_of(fleet), len(request.tokens)
        place: object = self.faults.call(
            "choose", lambda: self._chooser.choose(num_tokens, views), None
        )
        is_place = isinstance(place, int) and not isinstance(place, bool)
        if is_place and isinstance(place, int) and 0 <= place < len(views):
            return place
        self.faults.note("choose", f"returns {place!r:.60} for {len(views)} workers")
        return fleet.least_loaded()


def views_of(fleet: Candidates) -> list[WorkerView]:
    """Return what a small policy sees of each worker."""
    return [
        WorkerView(
            each.worker, each.cached_tokens, each.expected_tokens, each.load_tokens,
            load.recent_tokens,
        )
        for each, load in zip(fleet.candidates, fleet.loads, strict=True)
    ]  # fmt: skip


def _hit(candidate: Candidate) -> int:
    return candidate.cached_tokens + candidate.expected_tokens


def make_policy(value: str, built_in: dict[str, type[Policy]]) -> Policy:
    """Return a built-in policy, or one that was checked and loaded.

    Raises:
        ConfigError: It cannot be loaded, or breaks its contract.
    """
    if not is_plugin(value):
        return built_in[value]()
    check_policy(value)
    return PluggedPolicy(value)


def check_policy(value: str) -> None:
    """Check a policy in a process of its own.

    Raises:
        ConfigError: It cannot be loaded or breaks its contract; the message has the counterexample.
    """
    pass_contract("policy", "ostinato.router.policy.plugged:failure_of", [value])


def failure_of(value: str) -> str:
    """Return why a policy breaks its contract; empty if it passes.

    It names one of the workers, for one to three of them in any state.
    """
    try:
        policy = PluggedPolicy(value)
    except ConfigError as error:
        return str(error)
    states = [(0, 0, 0), (96, 0, 0), (0, 64, 500), (99, 0, 2000)]
    for count in (1, 2, 3):
        for chosen in product(states, repeat=count):
            fleet = _fleet(chosen)
            before = views_of(fleet)
            policy.choose(RouteRequest([1] * 100), fleet)
            if policy.faults.num_faults:
                return f"{policy.faults.first}; workers: {_shown(before)}"
    return ""


def _fleet(states: Sequence[tuple[int, int, int]]) -> Candidates:
    """Return workers with the given numbers of tokens cached, expected and queued."""
    candidates, loads = list[Candidate](), list[WorkerLoad]()
    for number, (cached, expected, queued) in enumerate(states):
        left = max(1, 100 - cached - expected)
        name = f"worker {number}"
        cost = left, queued, float(left), float(queued)
        candidates.append(Candidate(name, WorkerState.EXACT, cached, expected, *cost))
        loads.append(WorkerLoad(queued, recent_tokens=float(queued)))
    return Candidates(candidates, loads)


def _shown(views: Sequence[WorkerView]) -> str:
    return "; ".join(
        f"{view.cached} cached, {view.expected} expected, {view.queued} queued" for view in views
    )

"""Evidence for a worker's events: what its requests found, against what its events said.

Events can be complete and wrong: of another server, of prompts that the router tokenizes otherwise,
or with live ones that never arrive. So each finished request is checked twice:

* the hits that the worker reports are those of its events, within a tolerance;
* its events tell of the prompt that was computed, within ``silent_s`` or two.

A check without hits says nothing of the first kind, and is not counted.
"""

from collections import deque
from dataclasses import dataclass, field

from ostinato.router.policy.decision import Decision
from ostinato.router.policy.load import Assigned
from ostinato.router.policy.prefix_tree import Node

TOLERANCE_BLOCKS = 2
TOLERANCE_SHARE = 0.2
"""Reported hits may differ from the events' by this many blocks, or this share of the prompt."""

NUM_CHECKS = 8
MIN_DISAGREEMENTS = 4
MIN_DISAGREEING_SHARE = 0.75
"""Events are no longer used once this number and this share of the last checks disagree."""

NUM_AGREEMENTS = 4
"""Checks that agree before events are believed again."""

MAX_SILENCES = 3
"""Requests in a row without an event before the worker counts as one that sends none."""


_NEVER_TOLD = (
    "its events do not tell of the blocks of prompts that it computed: is --tokenizer the "
    "workers', and are the events its own?"
)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A computed prompt, and its first block of which no event told so far.

    Attributes:
        node: The block.
        sent_by: Decision that expects it.
        ended_at: When the request ended.
        num_live: Live batches until then.
    """

    node: Node
    sent_by: int | None
    ended_at: float
    num_live: int


@dataclass(slots=True)
class Evidence:
    """The newest checks of one worker's events.

    Attributes:
        checks: Whether each of the last checks agreed.
        num_silences: Requests without an event since the last event.
    """

    checks: deque[bool] = field(default_factory=lambda: deque(maxlen=NUM_CHECKS))
    num_silences: int = 0
    _prompts: deque[_Prompt] = field(default_factory=lambda: deque(maxlen=NUM_CHECKS))

    def clear(self) -> None:
        """Forget all checks."""
        self.checks.clear()
        self._prompts.clear()
        self.num_silences = 0

    def compare(self, decision: Decision, reported_tokens: int, block_size: int) -> str:
        """Check the hits of a request; returns why events are no longer to be used, or nothing.

        Too few hits say nothing, and neither do those that were only expected, without an event.
        """
        cached, likely = decision.candidates[0].cached_tokens, decision.expected_cached_tokens
        tolerance = max(TOLERANCE_BLOCKS * block_size, TOLERANCE_SHARE * decision.num_tokens)
        agrees = cached - tolerance <= reported_tokens <= likely + tolerance
        if max(likely, reported_tokens) <= tolerance or (
            agrees and reported_tokens > cached + tolerance
        ):
            return ""
        return self._note(
            agrees,
            f"{likely:,} of {decision.num_tokens:,} prompt tokens were expected to be cached, and "
            f"{reported_tokens:,} were: is --tokenizer the workers', and are the events its own?",
        )

    def await_event(self, work: Assigned, now: float, num_live: int) -> None:
        """Expect an event of a request's prompt, which was computed."""
        node = work.untold or next(iter(work.nodes), None)
        if node is not None:
            mark = (node.sent or {}).get(work.worker)
            self._prompts.append(_Prompt(node, mark and mark[1], now, num_live))

    def judge(self, worker: int, now: float, silent_s: float, num_live: int) -> str:
        """Check the prompts that events must have told of by now; returns as ``compare``."""
        while self._prompts:
            prompt = self._prompts[0]
            patience_s = silent_s if num_live > prompt.num_live else 2 * silent_s
            if now - prompt.ended_at <= patience_s:
                break
            self._prompts.popleft()
            agrees = _is_told(prompt, worker)
            if agrees is not None and (reason := self._note(agrees, _NEVER_TOLD)):
                return reason
        return ""

    def silent(self, silent_s: float) -> str:
        """Note a request without an event; returns as ``compare``."""
        self.num_silences += 1
        if self.num_silences < MAX_SILENCES:
            return ""
        return (
            f"no event came within {silent_s:g} s of {self.num_silences} requests that stored "
            "blocks: can the endpoint of its events be reached?"
        )

    @property
    def is_convincing(self) -> bool:
        """Whether enough of the last checks agreed."""
        return sum(self.checks) >= NUM_AGREEMENTS

    def _note(self, agrees: bool, what: str) -> str:
        self.checks.append(agrees)
        num_against = len(self.checks) - sum(self.checks)
        if num_against < max(MIN_DISAGREEMENTS, MIN_DISAGREEING_SHARE * len(self.checks)):
            return ""
        return f"{num_against} of the last {len(self.checks)} checks of its events failed: {what}"


def _is_told(prompt: _Prompt, worker: int) -> bool | None:
    """Whether events told of a prompt; None if it is forgotten or was removed since."""
    if not prompt.node.is_live:
        return None
    if prompt.node.holders >> worker & 1:
        return True
    mark = (prompt.node.sent or {}).get(worker)
    return False if mark is not None and mark[1] == prompt.sent_by else None

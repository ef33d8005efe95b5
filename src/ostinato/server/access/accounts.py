"""Usage counters of one tenant: totals, the last minutes per second, the latest requests.

Memory is bounded; the accounts of several tenants can be merged into one.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import randrange

from ostinato.engine.requests.outputs import RequestOutput

HISTORY_S = 300
"""How many of the last seconds have counters of their own."""

RECENT_REQUESTS = 512
"""How many times to first token are kept for a tenant."""

ENDED_REQUESTS = 12
"""How many finished requests are listed for a tenant."""

GAPS_PER_SECOND = 64
"""Inter-token latencies kept per second; beyond that, a uniform sample."""


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens by the origin of their KV.

    Attributes:
        computed: Computed by the model.
        cached: Found in the cache in whole blocks.
        copied: Copied from a cached block of which only the beginning matches.
        waited: Computed by another request while this one waited (single flight).
    """

    computed: int = 0
    cached: int = 0
    copied: int = 0
    waited: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> "PromptTokens":
        """Count a request's prompt tokens."""
        hit, copied = output.num_cached_tokens, output.num_copied_tokens
        waited = output.num_waited_tokens
        computed = len(output.prompt_token_ids) - hit
        return cls(computed, hit - copied - waited, copied, waited)

    @property
    def total(self) -> int:
        """Number of prompt tokens."""
        return self.computed + self.cached + self.copied + self.waited

    @property
    def hit(self) -> int:
        """Prompt tokens that this request did not compute."""
        return self.cached + self.copied + self.waited

    @property
    def hit_share(self) -> float:
        """Share of hits, from 0 to 1."""
        hit = self.cached + self.copied + self.waited
        return hit / (hit + self.computed) if hit else 0.0

    def add(self, other: "PromptTokens") -> None:
        """Add other counts to these."""
        self.computed += other.computed
        self.cached += other.cached
        self.copied += other.copied
        self.waited += other.waited


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's time to first token.

    Attributes:
        at_s: When the token was sampled, by the usage clock.
        took_s: Seconds since the request's arrival.
        hit_share: Share of its prompt that hit.
        request_id: Id for ``explain``.
    """

    at_s: float
    took_s: float
    hit_share: float
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A finished request in the list of the latest ones, as the page shows it.

    Attributes:
        id: Id for ``explain``.
        tenant: Its tenant's name.
        adapter: Name of its LoRA adapter; empty for the base model.
        at_s: When it ended, by the usage clock.
        prompt: Prompt tokens.
        hit: Those of them that hit.
        first_token_s: Seconds from its arrival to its first token.
        output: Generated tokens.
        took_s: Seconds from its arrival to its end.
        ended: Finish reason; ``error``; ``gone`` if the client disconnected.
    """

    id: str
    tenant: str
    adapter: str
    at_s: float
    prompt: int
    hit: int
    first_token_s: float
    output: int
    took_s: float
    ended: str


@dataclass(slots=True)
class Second:
    """Counters of one second.

    Attributes:
        number: Seconds of the usage clock, rounded down.
        prompt: Prompt tokens of requests whose first token falls into it.
        generated: Tokens generated in it.
        gaps_s: Seconds between two outputs of a request, at most ``GAPS_PER_SECOND`` of them.
        num_gaps: Number of gaps, sampled or not.
    """

    number: int
    prompt: PromptTokens = field(default_factory=PromptTokens)
    generated: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_gaps: int = 0

    def add_gap(self, gap_s: float) -> None:
        """Add a gap to the sample (reservoir sampling)."""
        self.num_gaps += 1
        if len(self.gaps_s) < GAPS_PER_SECOND:
            self.gaps_s.append(gap_s)
        elif (place := randrange(self.num_gaps)) < GAPS_PER_SECOND:
            self.gaps_s[place] = gap_s

    def add(self, other: "Second") -> None:
        """Add another tenant's second."""
        self.prompt.add(other.prompt)
        self.generated += other.generated
        self.num_gaps += other.num_gaps
        self.gaps_s += other.gaps_s


@dataclass(slots=True)
class Account:
    """Usage counters of one tenant.

    Attributes:
        num_requests: Requests that got a first token.
        prompt: Their prompt tokens.
        output_tokens: Generated tokens of requests that have ended.
        seconds: The last seconds with any activity, by number.
        first_tokens: Times to first token of the last requests, oldest first.
        ended: The last finished requests, oldest first.
    """

    num_requests: int = 0
    prompt: PromptTokens = field(default_factory=PromptTokens)
    output_tokens: int = 0
    seconds: dict[int, Second] = field(default_factory=dict)
    first_tokens: deque[FirstToken] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    ended: deque[EndedRequest] = field(default_factory=lambda: deque(maxlen=ENDED_REQUESTS))

    def book(self, prompt: PromptTokens, first: FirstToken) -> None:
        """Count a request's first token."""
        self.num_requests += 1
        self.prompt.add(prompt)
        self.first_tokens.append(first)
        self.second(first.at_s).prompt.add(prompt)

    def second(self, at_s: float) -> Second:
        """Return the counters of a moment's second; drops the oldest beyond ``HISTORY_S``."""
        number = int(at_s)
        if number not in self.seconds:
            self.seconds[number] = Second(number)
            if len(self.seconds) > HISTORY_S:
                del self.seconds[min(self.seconds)]
        return self.seconds.get(number) or Second(number)


def merge(accounts: Iterable[Account]) -> Account:
    """Sum accounts, second by second."""
    total, firsts, ended = Account(), list[FirstToken](), list[EndedRequest]()
    for account in accounts:
        total.num_requests += account.num_requests
        total.output_tokens += account.output_tokens
        total.prompt.add(account.prompt)
        firsts += account.first_tokens
        ended += account.ended
        for number, second in account.seconds.items():
            total.seconds.setdefault(number, Second(number)).add(second)
    total.seconds = dict(sorted(total.seconds.items()))
    total.first_tokens.extend(sorted(firsts, key=lambda first: first.at_s))
    total.ended.extend(sorted(ended, key=lambda request: request.at_s))
    return total

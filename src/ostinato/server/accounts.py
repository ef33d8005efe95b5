"""The books of one tenant. Sums, the last minutes second by second, the latest requests.

All of it is bounded; accounts can be merged into that of all tenants together.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import randrange

from ostinato.engine.outputs import RequestOutput

HISTORY_S = 300
"""Seconds that are kept one by one."""

RECENT_REQUESTS = 512
"""Requests of a tenant whose times to first token are kept."""

ENDED_REQUESTS = 12
"""Requests of a tenant that are listed when they have ended."""

GAPS_PER_SECOND = 64
"""Waits for the next token that are kept of a second; of more, a fair sample is."""


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens by where their keys and values came from.

    Attributes:
        computed: They went through the model.
        cached: They were in the cache in whole blocks.
        copied: They were copied out of a cached block that the prompt leaves in its middle.
        waited: Another request computed them while this one waited (single flight).
    """

    computed: int = 0
    cached: int = 0
    copied: int = 0
    waited: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> "PromptTokens":
        """Tell a request's prompt tokens apart."""
        hit, copied = output.num_cached_tokens, output.num_copied_tokens
        waited = output.num_waited_tokens
        computed = len(output.prompt_token_ids) - hit
        return cls(computed, hit - copied - waited, copied, waited)

    @property
    def total(self) -> int:
        """All of them."""
        return self.computed + self.hit

    @property
    def hit(self) -> int:
        """Those that did not go through the model for their request."""
        return self.cached + self.copied + self.waited

    @property
    def hit_share(self) -> float:
        """Share of hits, from 0 to 1."""
        return self.hit / self.total if self.total else 0.0

    def add(self, other: "PromptTokens") -> None:
        """Add another's tokens."""
        self.computed += other.computed
        self.cached += other.cached
        self.copied += other.copied
        self.waited += other.waited


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How long one request's first token took.

    Attributes:
        at_s: When it was there, by the ledger's clock.
        took_s: Seconds from the request's arrival.
        hit_share: Share of its prompt that hit.
        request_id: By which it can be explained.
    """

    at_s: float
    took_s: float
    hit_share: float
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request in a list of the latest ones.

    Attributes:
        request_id: By which it can be explained.
        tenant: Its tenant's name.
        at_s: When it ended, by the ledger's clock.
        prompt: Its prompt tokens.
        first_token_s: Seconds from its arrival to its first token.
        output_tokens: Generated tokens.
        took_s: Seconds from its arrival to its end.
        ended: ``stop``, ``length`` and so on; ``error``; ``gone`` if its reader left.
        adapter: Name of its LoRA adapter; empty for the base model.
    """

    request_id: str
    tenant: str
    at_s: float
    prompt: PromptTokens
    first_token_s: float
    output_tokens: int
    took_s: float
    ended: str
    adapter: str = ""


@dataclass(slots=True)
class Second:
    """What one second brought.

    Attributes:
        number: Seconds of the ledger's clock, rounded down.
        prompt: Prompt tokens of requests whose first token came in it.
        generated: Tokens generated in it.
        gaps_s: Seconds between two outputs of a request, at most ``GAPS_PER_SECOND`` of them.
        num_gaps: How many there were.
    """

    number: int
    prompt: PromptTokens = field(default_factory=PromptTokens)
    generated: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_gaps: int = 0

    def add_gap(self, gap_s: float) -> None:
        """Keep a gap, or one of those before it (reservoir sampling)."""
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
    """One tenant's lines.

    Attributes:
        num_requests: Requests that got a first token.
        prompt: Their prompt tokens.
        output_tokens: Generated tokens of requests that have ended.
        seconds: The last seconds that brought anything, by number.
        first_tokens: Of the last requests, oldest first.
        ended: The last requests that ended, oldest first.
    """

    num_requests: int = 0
    prompt: PromptTokens = field(default_factory=PromptTokens)
    output_tokens: int = 0
    seconds: dict[int, Second] = field(default_factory=dict)
    first_tokens: deque[FirstToken] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    ended: deque[EndedRequest] = field(default_factory=lambda: deque(maxlen=ENDED_REQUESTS))

    def book(self, prompt: PromptTokens, first: FirstToken) -> None:
        """Book a request's first token."""
        self.num_requests += 1
        self.prompt.add(prompt)
        self.first_tokens.append(first)
        self.second(first.at_s).prompt.add(prompt)

    def second(self, at_s: float) -> Second:
        """Return the second of a moment; forgets the oldest when there are too many."""
        number = int(at_s)
        if number not in self.seconds:
            self.seconds[number] = Second(number)
            if len(self.seconds) > HISTORY_S:
                del self.seconds[min(self.seconds)]
        return self.seconds.get(number) or Second(number)


def merge(accounts: Iterable[Account]) -> Account:
    """Sum up accounts, second by second."""
    found, firsts, ended = Account(), list[FirstToken](), list[EndedRequest]()
    for account in accounts:
        found.num_requests += account.num_requests
        found.output_tokens += account.output_tokens
        found.prompt.add(account.prompt)
        firsts += account.first_tokens
        ended += account.ended
        for number, second in account.seconds.items():
            found.seconds.setdefault(number, Second(number)).add(second)
    found.seconds = dict(sorted(found.seconds.items()))
    found.first_tokens.extend(sorted(firsts, key=lambda first: first.at_s))
    found.ended.extend(sorted(ended, key=lambda request: request.at_s))
    return found

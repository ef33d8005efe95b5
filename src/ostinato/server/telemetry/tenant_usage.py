"""Usage counters of all tenants.

An observer that counts every request for its tenant: origins of prompt tokens, times to first
token, and the last minutes per second. So a tenant can see its own usage, and only the
administrator the total. The accounts of several tenants can be merged into one. Memory is bounded:
tenants after the first ``MAX_TENANTS`` are counted as ``OTHERS``.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import randrange

from ostinato.core.identity import tenant_of
from ostinato.server.telemetry.observer import Observer, PromptTokens, ServedRequest

HISTORY_S = 300
"""How many of the last seconds have counters of their own."""

RECENT_REQUESTS = 512
"""How many times to first token are kept for a tenant."""

ENDED_REQUESTS = 12
"""How many finished requests are listed for a tenant."""

GAPS_PER_SECOND = 64
"""Inter-token latencies kept per second; beyond that, a uniform sample."""


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
class TenantCounters:
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


def merge(accounts: Iterable[TenantCounters]) -> TenantCounters:
    """Sum accounts, second by second."""
    total, firsts, ended = TenantCounters(), list[FirstToken](), list[EndedRequest]()
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


MAX_TENANTS = 64
"""Tenants with counters of their own."""

OTHERS = "(others)"
"""The name that all further tenants are counted under."""

UNNAMED = "(unnamed)"
"""The owner of a salt of which no request is known, such as a public prefix's."""


@dataclass(slots=True)
class Progress:
    """How much of a request's output is counted.

    Attributes:
        record: The request.
        at_s: Time of the last counted output.
        num_gaps: Counted gaps.
        num_tokens: Counted tokens.
    """

    record: ServedRequest
    at_s: float
    num_gaps: int = 0
    num_tokens: int = 0


class TenantUsage(Observer):
    """An observer that keeps accounts per tenant.

    Attributes:
        accounts: Accounts by tenant.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without accounts."""
        self.accounts: dict[str, TenantCounters] = {}
        self._names: dict[bytes, str] = {}  # tenants by salt
        self._clock = clock
        self._unfinished: dict[str, Progress] = {}

    def now_s(self) -> float:
        """Return the clock's seconds."""
        return self._clock()

    def name_of(self, salt: bytes) -> str:
        """Return the owner of a salt; salts are secrets, and never shown."""
        return self._names.get(tenant_of(salt), UNNAMED)

    def accepted(self, record: ServedRequest) -> None:
        """Remember the owner of a salt."""
        if len(self._names) < MAX_TENANTS:
            self._names[tenant_of(record.salt.encode())] = record.tenant_name

    def first_token(self, record: ServedRequest) -> None:
        """Count a prompt and its first token."""
        took_s = record.time_to_first_token_s
        prompt = record.prompt
        if prompt is None or took_s is None:
            return
        first = FirstToken(self._clock(), took_s, prompt.hit_share, record.request_id)
        account = self._account(record)
        account.book(prompt, first)
        progress = self._unfinished[record.request_id] = Progress(record, first.at_s)
        self._count_new(progress, account)

    def finished(self, record: ServedRequest) -> None:
        """Count the generated tokens."""
        progress = self._unfinished.pop(record.request_id, None)
        if record.output is None:
            return
        account = self._account(record)
        account.output_tokens += record.num_generated
        if progress is not None:
            self._count_new(progress, account)
            account.ended.append(_ended(record, self._clock()))

    def catch_up(self) -> None:
        """Count what unfinished requests have generated so far."""
        for progress in self._unfinished.values():
            self._count_new(progress, self._account(progress.record))

    def _count_new(self, progress: Progress, account: TenantCounters) -> None:
        """Count new tokens and gaps, each in its second."""
        record, gaps = progress.record, progress.record.gaps_s[progress.num_gaps :]
        new_tokens = record.num_generated - progress.num_tokens
        outputs = len(gaps) + (progress.num_tokens == 0)
        if progress.num_tokens == 0:
            account.second(progress.at_s).generated += new_tokens / outputs
        for gap_s in gaps:
            progress.at_s += gap_s
            second = account.second(progress.at_s)
            second.generated += new_tokens / outputs
            second.add_gap(gap_s)
        if outputs:
            progress.num_tokens += new_tokens
        progress.num_gaps += len(gaps)

    def erase(self, tenant: str) -> bool:
        """Erase a tenant's counters; return whether there were any."""
        self._names = {salt: name for salt, name in self._names.items() if name != tenant}
        return self.accounts.pop(tenant, None) is not None

    def _account(self, record: ServedRequest) -> TenantCounters:
        name = record.tenant_name
        if name not in self.accounts and len(self.accounts) >= MAX_TENANTS:
            name = OTHERS
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = TenantCounters()
        return account


def _ended(record: ServedRequest, now_s: float) -> EndedRequest:
    """Summarize a finished request that had a first token."""
    first_token_s = record.time_to_first_token_s
    prompt = record.prompt
    assert prompt is not None and first_token_s is not None
    return EndedRequest(
        id=record.request_id,
        tenant=record.tenant_name,
        adapter=record.call.prompt.adapter,
        at_s=now_s,
        prompt=prompt.total,
        hit=prompt.hit,
        first_token_s=first_token_s,
        output=record.num_generated,
        took_s=first_token_s + sum(record.gaps_s),
        ended=record.outcome,
    )

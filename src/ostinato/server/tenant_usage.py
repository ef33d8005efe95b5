"""What did the cache do for whom?

An observer that books every request of the one path by the name of its caller's tenant: where
its prompt tokens came from, how long its first token took, and the last minutes second by second.
So a tenant can be shown its own lines, and only the administrator the sum of all. Memory is
bounded: whoever comes after the first ``MAX_TENANTS`` is booked under ``OTHERS``.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ostinato.core.tenancy import owner_of
from ostinato.engine.outputs import RequestOutput
from ostinato.server.call import GenerateCall
from ostinato.server.callers import Caller
from ostinato.server.errors import ApiError
from ostinato.server.observer import ServedRequest

MAX_TENANTS = 64
"""Tenants with lines of their own."""

OTHERS = "(others)"
"""Whom all further tenants are booked under."""

UNNAMED = "(unnamed)"
"""Whose blocks are those of a salt that no request came with: a public head's, for one."""

HISTORY_S = 300
"""Seconds that are kept one by one."""

RECENT_REQUESTS = 512
"""Requests of a tenant whose times to first token are kept."""


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
        at_s: When it was there, by its clock.
        took_s: Seconds from the request's arrival.
        hit_share: Share of its prompt that hit.
    """

    at_s: float
    took_s: float
    hit_share: float


@dataclass(slots=True)
class Second:
    """What one second brought.

    Attributes:
        number: Seconds of its clock, rounded down.
        prompt: Prompt tokens of requests whose first token came in it.
    """

    number: int
    prompt: PromptTokens = field(default_factory=PromptTokens)


@dataclass(slots=True)
class Account:
    """One tenant's lines.

    Attributes:
        num_requests: Requests that got a first token.
        prompt: Their prompt tokens.
        output_tokens: Generated tokens of requests that have ended.
        seconds: The last seconds that brought anything, oldest first.
        first_tokens: Of the last requests, oldest first.
    """

    num_requests: int = 0
    prompt: PromptTokens = field(default_factory=PromptTokens)
    output_tokens: int = 0
    seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=HISTORY_S))
    first_tokens: deque[FirstToken] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))

    def book(self, prompt: PromptTokens, first: FirstToken) -> None:
        """Book a request's first token."""
        self.num_requests += 1
        self.prompt.add(prompt)
        self.first_tokens.append(first)
        if not self.seconds or self.seconds[-1].number < int(first.at_s):
            self.seconds.append(Second(int(first.at_s)))
        self.seconds[-1].prompt.add(prompt)


class TenantUsage:
    """An observer that keeps the accounts.

    Attributes:
        accounts: By tenant.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Open without accounts."""
        self.accounts: dict[str, Account] = {}
        self._names: dict[bytes, str] = {}  # tenants by their salt
        self._clock = clock
        self._also: list[Callable[[], None]] = []

    def now_s(self) -> float:
        """Return the clock's seconds."""
        return self._clock()

    def name_of(self, salt: bytes) -> str:
        """Say whose a salt is; salts themselves are secrets, and are never shown."""
        return self._names.get(owner_of(salt), UNNAMED)

    def accepted(self, record: ServedRequest) -> None:
        """Learn which salt is whose."""
        if len(self._names) < MAX_TENANTS:
            self._names[owner_of(record.salt.encode())] = _name_of(record)

    def first_token(self, record: ServedRequest) -> None:
        """Book where a prompt came from."""
        took_s = record.time_to_first_token_s
        if record.output is None or took_s is None:
            return
        prompt = PromptTokens.of(record.output)
        first = FirstToken(self._clock(), took_s, prompt.hit_share)
        self._account(record).book(prompt, first)

    def finished(self, record: ServedRequest) -> None:
        """Book what was generated."""
        if record.output is not None:
            count = sum(len(part.token_ids) for part in record.output.outputs)
            self._account(record).output_tokens += count

    def refused(self, caller: Caller, call: GenerateCall, error: ApiError) -> None:
        """Book nothing: no token was looked up."""

    def when_forgetting(self, also: Callable[[], None]) -> None:
        """Have something else forgotten whenever a tenant is: what was seen of its prefixes."""
        self._also.append(also)

    def forget(self, tenant: str) -> bool:
        """Erase a tenant's lines; returns whether there were any."""
        for also in self._also:
            also()
        self._names = {salt: name for salt, name in self._names.items() if name != tenant}
        return self.accounts.pop(tenant, None) is not None

    def _account(self, record: ServedRequest) -> Account:
        name = _name_of(record)
        if name not in self.accounts and len(self.accounts) >= MAX_TENANTS:
            name = OTHERS
        return self.accounts.setdefault(name, Account())


def _name_of(record: ServedRequest) -> str:
    """Return the tenant's name; of anonymous callers, a label of the salt that they chose."""
    return record.caller.tenant or ("" if record.caller.salt else salt_label(record.salt))


def salt_label(salt: str) -> str:
    """Return what is shown instead of a salt: who knows a salt can read its tenant's cache."""
    return f"salt {hashlib.sha256(salt.encode()).hexdigest()[:8]}" if salt else ""


def merge(accounts: Iterable[Account]) -> Account:
    """Sum up accounts, second by second."""
    found, seconds = Account(), dict[int, Second]()
    firsts: list[FirstToken] = []
    for account in accounts:
        found.num_requests += account.num_requests
        found.output_tokens += account.output_tokens
        found.prompt.add(account.prompt)
        firsts += account.first_tokens
        for second in account.seconds:
            seconds.setdefault(second.number, Second(second.number)).prompt.add(second.prompt)
    found.first_tokens.extend(sorted(firsts, key=lambda first: first.at_s))
    found.seconds.extend(seconds[number] for number in sorted(seconds))
    return found

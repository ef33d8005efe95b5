"""Usage counters of all tenants.

An observer that counts every request for its tenant: origins of prompt tokens, times to first
token, and the last minutes per second. So a tenant can see its own usage, and only the
administrator the total. Memory is bounded: tenants after the first ``MAX_TENANTS`` are counted as
``OTHERS``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.core.identity import tenant_of
from ostinato.server.access.accounts import Account, EndedRequest, FirstToken
from ostinato.server.telemetry.observer import Observer, ServedRequest

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
        self.accounts: dict[str, Account] = {}
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

    def _count_new(self, progress: Progress, account: Account) -> None:
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

    def _account(self, record: ServedRequest) -> Account:
        name = record.tenant_name
        if name not in self.accounts and len(self.accounts) >= MAX_TENANTS:
            name = OTHERS
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account()
        return account


def _ended(record: ServedRequest, now_s: float) -> EndedRequest:
    """Summarize a finished request that had a first token."""
    first_token_s = record.time_to_first_token_s
    prompt = record.prompt
    assert prompt is not None and first_token_s is not None
    return EndedRequest(
        id=record.request_id,
        tenant=record.tenant_name,
        adapter=record.call.adapter,
        at_s=now_s,
        prompt=prompt.total,
        hit=prompt.hit,
        first_token_s=first_token_s,
        output=record.num_generated,
        took_s=first_token_s + sum(record.gaps_s),
        ended=record.outcome,
    )

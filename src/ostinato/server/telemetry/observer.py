"""The port of request observers.

Metrics, spans, recorders and quotas observe every completion. An observer is called in the event
loop: it takes notes and returns, and never blocks.
"""

import hashlib
from dataclasses import dataclass, field

from ostinato.engine.requests.outputs import RequestOutput
from ostinato.server.access.callers import Caller
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.tenants.terms import LeaseReceipt


def salt_label(salt: str) -> str:
    """Return a label for a salt, which itself would give access to its tenant's cache."""
    return f"salt {hashlib.sha256(salt.encode()).hexdigest()[:8]}" if salt else ""


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


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request, as observers see it.

    Attributes:
        request_id: The engine's request id.
        call: The request to the engine.
        caller: Its sender.
        salt: The effective salt.
        accepted_s: When it was accepted, by ``time.monotonic``.
        output: Its newest output; None before the first token.
        prompt: Its prompt's tokens by origin; None before the first token.
        time_to_first_token_s: Seconds from its arrival to its first output; None before.
        gaps_s: Seconds from each output to the next one.
        error: The error it ended with, if any.
        is_gone: Whether its client disconnected early.
        lease: Receipt of the lease on its prompt; None if none was requested.
        num_generated: Tokens generated so far, for all continuations, and beams that ended.
        tenant_name: The tenant's name; for anonymous callers, a label of their salt.
    """

    request_id: str
    call: GenerateCall
    caller: Caller
    salt: str
    accepted_s: float
    output: RequestOutput | None = None
    prompt: PromptTokens | None = None
    time_to_first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    error: ApiError | None = None
    is_gone: bool = False
    lease: LeaseReceipt | None = None
    num_generated: int = 0
    tenant_name: str = field(init=False)
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        """Name the tenant."""
        own_label = "" if self.caller.salt else salt_label(self.salt)
        self.tenant_name = self.caller.tenant or own_label

    def note(self, output: RequestOutput, now_s: float) -> bool:
        """Keep the newest output and its time; return whether it is the first."""
        is_first, self.output = self.output is None, output
        self.num_generated = output.num_beam_tokens
        if not output.num_beam_tokens:
            for part in output.outputs:
                self.num_generated += len(part.token_ids)
        if is_first:
            self.time_to_first_token_s = now_s - self.accepted_s
            self.prompt = PromptTokens.of(output)
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        return is_first

    @property
    def outcome(self) -> str:
        """The finish reason of its first continuation; ``error``; ``gone`` if its client left."""
        if self.error is not None:
            return "error"
        if self.is_gone or self.output is None or not self.output.outputs:
            return "gone"
        return self.output.outputs[0].finish_reason or "gone"


class Observer:
    """Observes requests: one call of ``accepted`` and one of ``finished`` for each.

    A subclass overrides the methods it needs; the others do nothing.
    """

    def accepted(self, record: ServedRequest) -> None:
        """A request was accepted."""

    def first_token(self, record: ServedRequest) -> None:
        """Its first output has arrived; not called if it fails before."""

    def finished(self, record: ServedRequest) -> None:
        """It ended, normally, with an error or because the client disconnected."""

    def refused(self, caller: Caller, call: GenerateCall, error: ApiError) -> None:
        """A request was refused: the queue is full, or a limit is reached."""

    def erase(self, tenant: str) -> bool:
        """Erase a tenant's data; return whether there was any."""
        return False

"""A request, and what observers of the cache learn of it."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.core.identity import Identity, ImageSpan
from ostinato.core.ids import RequestId
from ostinato.core.plan import Search, TokenConstraint
from ostinato.core.sampling_params import SamplingParams

IDLE_WORK = "idle work "
"""How the names of the engine's own requests begin, which it runs while it is idle."""


class FinishReason(StrEnum):
    """Why a continuation ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """``max_tokens``, the model's context or the pool's size was reached."""
    ABORT = "abort"
    """The caller cancelled it."""
    ERROR = "error"
    """The step that computed it failed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is to be continued."""

    request_id: RequestId  # unique among live requests
    prompt_token_ids: "array[int]"  # packed ids, shape (num_prompt_tokens,), at least one
    params: SamplingParams
    identity: Identity = field(default_factory=Identity)
    images: tuple[ImageSpan, ...] = ()  # images among the prompt's tokens
    priority: int = 0  # lower goes first, as in nice(1)
    cache_read: bool = True
    """Whether cached KV may be used; with prompt log-probs, once they are computed."""
    cache_write: bool = True  # whether computed KV may be found by others
    eos_token_ids: frozenset[int] = frozenset()  # the model's end-of-sequence ids
    constraint: TokenConstraint | None = None
    """Restricts each continuation, in its first state; each works on a copy."""
    search: Search | None = None
    """Chooses its sequences after each of their tokens; it is of this request alone."""
    prompt_sections: tuple[tuple[str, str], ...] = ()
    """Names and texts of the messages and fields that the prompt was made of, in order; used in
    explanations only."""
    num_kept_tokens: int = 0
    """Prompt tokens that stand as they were generated; used in explanations only."""


@dataclass(slots=True)
class RequestContext:
    """Facts of an admitted request that observers of the cache receive."""

    name: str = ""  # the request's id
    off: str = ""  # the setting that keeps it from reading the cache; empty if it reads
    prompt_sections: tuple[tuple[str, str], ...] = ()
    num_kept_tokens: int = 0
    num_known_tokens: int | None = None
    """Tokens in whole blocks that were cached when it arrived; None if no lookup was made."""
    waits_for: str = ""  # name of the request that it waited for, if any
    is_sibling: bool = False
    """Whether the first of its ``n`` continuations looked the prompt up already."""
    is_readmission: bool = False
    """Whether its prompt was admitted before, for it or for a sibling; counted apart."""

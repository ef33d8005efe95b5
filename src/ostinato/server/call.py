"""A request to the engine, independent of the API it came through."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.core.identity import derive_salt
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.server.access.callers import Caller
from ostinato.tenants.terms import LeaseTerms


@dataclass(frozen=True, slots=True)
class Covered:
    """The part of a prompt that a mark covers.

    Attributes:
        num_tokens: Tokens from the beginning of the prompt.
        num_images: Images among them.
        terms: Terms of the lease.
    """

    num_tokens: int
    num_images: int
    terms: LeaseTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One prompt and its parameters.

    Attributes:
        endpoint: Path of its route.
        params: Sampling parameters.
        prompt: The prompt, from ``sender``: it names its sender's salt and public prefixes.
        priority: Lower is scheduled first.
        retention: Lease of the prompt once it is computed; None for no lease.
        kept: Beginnings of the prompt that are leased as well.
        cache_key: ``prompt_cache_key``, for the record.
        user: The client's end user, for the record.
        request_id: The engine's request id.
        leased: Set by ``serve``: how many tokens of each of ``kept`` are leased.
        num_retained_tokens: Set by ``serve``: number of leased tokens, if a lease was requested.
    """

    endpoint: str
    params: SamplingParams
    prompt: Prompt
    priority: int = 0
    retention: LeaseTerms | None = None
    kept: tuple[Covered, ...] = ()
    cache_key: str | None = None
    user: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    leased: list[tuple[Covered, int]] = field(default_factory=list, compare=False)
    num_retained_tokens: list[int] = field(default_factory=list, compare=False)


def sender(caller: Caller, cache_salt: str = "", **fields: Any) -> Prompt:
    """Return a prompt that identifies its sender.

    Args:
        caller: Its sender.
        cache_salt: The request's own; only requests of the same salt share blocks.
        **fields: Other fields of the prompt.
    """
    return Prompt(
        cache_salt=derive_salt(caller.salt, cache_salt),
        public_prefixes=caller.public_prefixes,
        **fields,
    )


def with_content(prompt: Prompt, content: str | Sequence[int]) -> Prompt:
    """Return a sender's prompt of a text or of token ids."""
    if isinstance(content, str):
        return replace(prompt, text=content)
    return replace(prompt, token_ids=content)

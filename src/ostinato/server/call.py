"""A request to the engine, independent of the API it came through."""

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.core.identity import derive_salt
from ostinato.engine.ledger.continuation import TurnReport
from ostinato.engine.ledger.turns import OpenTurn
from ostinato.engine.requests.prompts import Prompt, TokenIds
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.text.known_texts import TokenizedText
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
        text: The prompt as text; or
        token_ids: as token ids.
        images: Images, in the order of their placeholders.
        adapter: Name of a loaded LoRA adapter; empty for the base model.
        cache_salt: Only requests of the same salt share blocks; added to the caller's.
        cache_read: Whether cached KV may be used.
        cache_write: Whether computed KV is published.
        keep_tokens: Whether known text keeps the tokens it was generated with.
        priority: Lower is scheduled first.
        retention: Lease of the prompt once it is computed; None for no lease.
        kept: Beginnings of the prompt that are leased as well.
        cache_key: ``prompt_cache_key``, for the record.
        user: The client's end user, for the record.
        sections: Names and texts of the prompt's parts, in order; for explanations.
        begun: Where its answer is noted in the ledger of turns; None if it is not.
        report: What the ledger did to the prompt.
        request_id: The engine's request id.
        num_retained_tokens: Set by ``serve``: number of leased tokens, if a lease was requested.
    """

    endpoint: str
    params: SamplingParams
    text: str | None = None
    token_ids: TokenIds | None = None
    images: tuple[Any, ...] = ()
    adapter: str = ""
    cache_salt: str = ""
    cache_read: bool = True
    cache_write: bool = True
    keep_tokens: bool = True
    priority: int = 0
    retention: LeaseTerms | None = None
    kept: tuple[Covered, ...] = ()
    cache_key: str | None = None
    user: str | None = None
    sections: tuple[tuple[str, str], ...] = ()
    begun: OpenTurn | None = None
    report: TurnReport | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_retained_tokens: list[int] = field(default_factory=list, compare=False)

    def sender(self, caller: Caller) -> Prompt:
        """Return what its prompt is cached under: salt, public prefixes, adapter and images."""
        return Prompt(
            cache_salt=derive_salt(caller.salt, self.cache_salt),
            public_prefixes=caller.public_prefixes,
            adapter=self.adapter,
            images=self.images,
        )

    def prompt(self, caller: Caller) -> Prompt:
        """Return the engine's prompt."""
        return replace(
            self.sender(caller),
            text=self.text,
            token_ids=self.token_ids,
            cache_read=self.cache_read,
            cache_write=self.cache_write,
            keep_tokens=self.keep_tokens,
            sections=self.sections,
            known=self.token_ids if isinstance(self.token_ids, TokenizedText) else None,
            report=self.report,
        )

"""A request to the engine, whichever API it came through."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.engine.prompts import PromptDict, TokenIds
from ostinato.engine.sampling_params import SamplingParams
from ostinato.tenants.terms import LeaseTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One prompt, and how it is to be continued.

    Attributes:
        endpoint: Path of the route that it came through.
        params: How to sample.
        text: The prompt; or
        token_ids: its ids.
        images: In the order of their placeholders.
        adapter: Name of a loaded LoRA adapter; empty for the base model.
        cache_salt: Only requests of the same salt share blocks; narrows the caller's.
        cache_read: Whether cached KV may be used.
        cache_write: Whether computed KV may be found by others.
        keep_tokens: Whether text that is known keeps its tokens.
        priority: Lower goes first.
        retention: For how long the prompt is kept once it is computed; None as for all others.
        cache_key: ``prompt_cache_key``: which requests are meant to meet, for the record.
        user: Whom the client acts for, for the record.
        sections: Names and texts of what the prompt was made of, in order; for explanations.
        request_id: Of the engine.
        num_retained_tokens: Noted by ``serve``: how many tokens are kept, if any were to be.
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
    cache_key: str | None = None
    user: str | None = None
    sections: tuple[tuple[str, str], ...] = ()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_retained_tokens: list[int] = field(default_factory=list, compare=False)

    def prompt(self, salt: str, public_prefixes: Sequence[str] = ()) -> PromptDict:
        """Return the prompt as the engine takes it.

        Args:
            salt: That was settled on.
            public_prefixes: Names of published prefixes that its caller may read.
        """
        prompt = PromptDict(
            cache_salt=salt,
            cache_read=self.cache_read,
            cache_write=self.cache_write,
            public_prefixes=public_prefixes,
            adapter=self.adapter,
            keep_tokens=self.keep_tokens,
            sections=self.sections,
        )
        if self.images:
            prompt["multi_modal_data"] = {"image": self.images}
        if self.token_ids is not None:
            prompt["prompt_token_ids"] = self.token_ids
        else:
            prompt["prompt"] = self.text or ""
        return prompt

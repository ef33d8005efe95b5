"""Token counts of a response."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ostinato.engine.requests.outputs import RequestOutput
from ostinato.protocol.answers import UsageBody


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response.

    Attributes:
        num_prompt_tokens: Tokens of all prompts; a prompt with n continuations counts once.
        num_cached_tokens: Prompt tokens that hit the cache.
        num_completion_tokens: Tokens of all continuations.
        num_kept_tokens: Prompt tokens of earlier answers, kept as generated.
        loaded_tokens: Cached tokens from tiers, as ``disk_tokens`` and ``remote_tokens``.
        num_written_tokens: Prompt tokens that were computed and published.
        num_drafted_tokens: Rows computed for drafts.
        num_accepted_tokens: Tokens of the answers that were drafted.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_kept_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    num_written_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], writes: bool = True) -> "Usage":
        """Add up outputs, of requests that publish what they compute or do not."""
        prompt = cached = generated = kept = drafted = accepted = 0
        loaded = Counter[str]()
        for output in outputs:
            prompt += len(output.prompt_token_ids)
            cached += output.num_cached_tokens
            for part in output.outputs:
                generated += len(part.token_ids)
            kept += output.num_kept_tokens
            for place, number in output.cached_tokens_from.items():
                if place != "pool" and number:
                    loaded[f"{place}_tokens"] += number
            drafted += output.num_drafted_tokens
            accepted += output.num_accepted_tokens
        written = prompt - cached if writes else 0
        return cls(prompt, cached, generated, kept, loaded, written, drafted, accepted)

    def as_openai(
        self, retained: Sequence[int] = (), num_reasoning_tokens: int | None = None
    ) -> UsageBody:
        """Return OpenAI's ``usage``.

        Args:
            retained: Leased tokens of each prompt for which a lease was requested.
            num_reasoning_tokens: Generated reasoning tokens; None if reasoning is not parsed.
        """
        details = {
            "cached_tokens": self.num_cached_tokens,
            "cache_write_tokens": self.num_written_tokens,
            **self.loaded_tokens,
        }
        if self.num_kept_tokens:
            details["kept_tokens"] = self.num_kept_tokens
        if retained:
            details["retained_tokens"] = sum(retained)
        counts = UsageBody(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=details,
        )
        parts = {} if num_reasoning_tokens is None else {"reasoning_tokens": num_reasoning_tokens}
        if self.num_drafted_tokens:
            rejected = self.num_drafted_tokens - self.num_accepted_tokens
            parts["accepted_prediction_tokens"] = self.num_accepted_tokens
            parts["rejected_prediction_tokens"] = rejected
        if parts:
            counts["completion_tokens_details"] = parts
        return counts

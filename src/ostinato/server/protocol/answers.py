"""Response bodies, for the API's description only, and their token counts.

Only the fields that clients read are listed; responses may have more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from ostinato.engine.requests.outputs import RequestOutput


class ErrorDetail(BaseModel):
    """An error's message, type, parameter and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | None = None


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Completion(BaseModel):
    """Continued prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class AnswerMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: None


class ChatChoice(BaseModel):
    """One continuation."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(BaseModel):
    """A continued conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ResponseBody(BaseModel):
    """A response: items of messages, calls and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    error: None


class ItemList(BaseModel):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """A deleted response."""

    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class MessageBody(BaseModel):
    """A message in Anthropic's shape."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class Counted(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int


class InputTokens(BaseModel):
    """Tokens of a prompt of the responses API."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ModelCard(BaseModel):
    """A model under one of its names, or an adapter: ``parent`` is its base model then."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None = None
    adapter: str | None = None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    """Token ids of a text, with the text of each on request."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The text of ids."""

    prompt: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response.

    Attributes:
        num_prompt_tokens: Tokens of all prompts; a prompt with n continuations counts once.
        num_cached_tokens: Prompt tokens that hit the cache.
        num_completion_tokens: Tokens of all continuations.
        num_kept_tokens: Prompt tokens of earlier answers, kept as generated.
        cached_tokens_from: Cached tokens by the place their KV came from.
        num_written_tokens: Prompt tokens that were computed and published.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_kept_tokens: int = 0
    cached_tokens_from: Counter[str] = field(default_factory=Counter)
    num_written_tokens: int = 0

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], writes: bool = True) -> "Usage":
        """Add up outputs, of requests that publish what they compute or do not."""
        known = list(outputs)
        computed = sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in known)
        return cls(
            sum(len(output.prompt_token_ids) for output in known),
            sum(output.num_cached_tokens for output in known),
            sum(len(part.token_ids) for output in known for part in output.outputs),
            sum(output.num_kept_tokens for output in known),
            sum((Counter(output.cached_tokens_from) for output in known), Counter()),
            computed if writes else 0,
        )

    @property
    def loaded_tokens(self) -> dict[str, int]:
        """Cached tokens from tiers, as ``disk_tokens`` and ``remote_tokens``."""
        return {f"{k}_tokens": n for k, n in self.cached_tokens_from.items() if k != "pool"}

    def as_openai(
        self, retained: Sequence[int] = (), num_reasoning_tokens: int | None = None
    ) -> dict[str, Any]:
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
        counts: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": details,
        }
        if num_reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
        return counts

"""Response bodies, for the API's description only, and their token counts.

Only the fields that clients read are listed; responses may have more.
"""

from typing import Any, Literal

from pydantic import BaseModel


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

"""Response bodies, as typed dictionaries: the routes build them, and OpenAPI describes them.

A body of a stream (``ChatChunk``) is written for every step of the engine, so nothing is validated
at run time; mypy checks the fields where they are built. Decision 0060 has the reasons.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """An error's message, type, parameter and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class UsageBody(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: NotRequired[dict[str, int]]


class AnswerHead(TypedDict):
    """What completions, chats and their chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(TypedDict):
    """One continuation, or its new part."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any]]


class Completion(AnswerHead):
    """Continued prompts, or new parts of them in a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[UsageBody | None]


class CalledFunction(TypedDict):
    """A function's name and arguments; a stream has the arguments alone in later parts."""

    name: NotRequired[str]
    arguments: str


class ToolCallBody(TypedDict):
    """A call of a tool, or a part of it."""

    function: CalledFunction
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    index: NotRequired[int]


class AnswerMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatChoice(TypedDict):
    """One continuation."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(AnswerHead):
    """A continued conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any]]


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to a message."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    tool_calls: list[ToolCallBody]


class ChunkChoice(TypedDict):
    """The new part of one continuation."""

    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]


class ChatChunk(AnswerHead):
    """An event of a streamed conversation."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[UsageBody | None]


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(TypedDict):
    """A response: items of messages, calls and reasoning; with the settings that it echoes."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    incomplete_details: dict[str, str] | None
    error: None


class ItemList(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    """A deleted response."""

    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class CacheCreation(TypedDict):
    """Tokens newly kept, by the time that they are kept for."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    """Token counts in Anthropic's shape; the three of the input add up to the prompt."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    cache_read_disk_tokens: NotRequired[int]
    cache_read_remote_tokens: NotRequired[int]
    kept_tokens: NotRequired[int]


class StopReason(TypedDict):
    """Why a message ended; null while it continues."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageBody(StopReason):
    """A message in Anthropic's shape."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    usage: MessageUsage


class Counted(TypedDict):
    """Tokens of a prompt."""

    input_tokens: int


class InputTokens(TypedDict):
    """Tokens of a prompt of the responses API."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ModelCard(TypedDict):
    """A model under one of its names, or an adapter: ``parent`` is its base model then."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    default_sampling_params: dict[str, float]
    parent: str | None
    adapter: str | None


class ModelList(TypedDict):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """Token ids of a text, with the text of each on request."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of ids."""

    prompt: str

"""The body of ``/v1/chat/completions``."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ostinato.protocol.body import MAX_MESSAGES, Items, OpenBody, TextOrImageUrl
from ostinato.protocol.conversation import Tool, ToolUse, add_reasoning, parts_of, use_tools
from ostinato.protocol.dialects import CHAT
from ostinato.protocol.marks import Breakpoint, CacheControl, MarkedPart, breakpoints_of
from ostinato.protocol.sampling import (
    EFFORT,
    KEEP_REASONING,
    Effort,
    Form,
    SamplingFields,
    ShortText,
    template_effort,
)
from ostinato.protocol.tools import (
    MAX_TOOLS,
    CallBody,
    CallId,
    ChatTool,
    HostedTool,
    NamedTool,
    ResponseFormat,
    ToolBody,
    ToolChoice,
)
from ostinato.settings import KeepReasoning
from ostinato.tenants.terms import LeaseTerms


class TextPart(MarkedPart):
    """A text part."""

    type: Literal["text"]
    text: str

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return {"type": "text", "text": self.text}


IMAGE_URL = "A data URI; files and http(s) URLs where the operator allows them."
IMAGE_DETAIL = "Images are resized as the model's processor says."


class ImageUrl(OpenBody):
    """The location of an image."""

    url: str = Field(min_length=1, description=IMAGE_URL)
    detail: ShortText | None = Field(default=None, description=IMAGE_DETAIL)


class ImagePart(MarkedPart):
    """An image part."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def part(self) -> dict[str, Any]:
        """Return it with only its URL."""
        return {"type": "image_url", "image_url": {"url": self.image_url.url}}


class RefusalPart(MarkedPart):
    """What the assistant said instead of an answer: a text like any other."""

    type: Literal["refusal"]
    refusal: str

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return {"type": "text", "text": self.refusal}


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]


class ChatMessage(OpenBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Annotated[Part, TextOrImageUrl]] | None = None
    tool_calls: Items[CallBody] | None = Field(default=None, description="Of the assistant.")
    tool_call_id: CallId | None = Field(default=None, description="Which call this answers.")
    name: ShortText | None = None
    reasoning: str | None = Field(default=None, description="The assistant's reasoning.")
    reasoning_content: str | None = Field(default=None, description="Older name of reasoning.")
    refusal: str | None = Field(default=None, description="Shown where there is no content.")
    cache_control: CacheControl | None = Field(
        default=None, description="Keep the prompt up to the end of this message."
    )

    @model_validator(mode="after")
    def _fits_its_role(self) -> "ChatMessage":
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls in a message of role={self.role!r}: only assistants call")
        if (self.reasoning or self.reasoning_content) and self.role != "assistant":
            raise ValueError(
                f"reasoning in a message of role={self.role!r}: only assistants reason"
            )
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id says which call a message of role='tool' answers")
        images = [] if isinstance(self.content, str) else self.content or []
        may_have_images = self.role in ("user", "tool")
        if not may_have_images and any(isinstance(part, ImagePart) for part in images):
            raise ValueError(
                f"an image in a message of role={self.role!r}: users and tools send images"
            )
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"content is missing: a message of role={self.role!r} needs one")
        return self

    def marks(self, ttl: str) -> list[LeaseTerms | None]:
        """Return for how long the prompt is kept up to each part; a text is one part."""
        terms: list[LeaseTerms | None] = [None]
        if isinstance(self.content, list) and self.content:
            terms = [part.terms(ttl) for part in self.content]
        if self.cache_control is not None:
            terms[-1] = self.cache_control.terms
        return terms

    def first_parts(self, number: int) -> "ChatMessage":
        """Return the message with its first parts only."""
        parts = self.content
        if not isinstance(parts, list) or number >= len(parts):
            return self
        return self.model_copy(update={"content": parts[:number]})

    def rendered(self) -> dict[str, Any]:
        """Return the message for templates: texts joined, ``developer`` as ``system``."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {
            "role": role,
            "content": parts_of(self.content or self.refusal or ""),
        }
        if self.name is not None:
            message["name"] = self.name
        add_reasoning(message, self.reasoning or self.reasoning_content)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _only_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse names of fields; the server refuses those of other arguments of a template."""
    for name in values:
        if name in ("add_generation_prompt", "continue_final_message"):
            raise ValueError(f"{name!r} is not a variable of a chat template, but a field")
    return values


TemplateValue = bool | int | float | ShortText
TemplateValues = Annotated[
    dict[ShortText, TemplateValue], Field(max_length=32), AfterValidator(_only_variables)
]


class TemplateFields(OpenBody):
    """Options of the chat template."""

    add_generation_prompt: bool = Field(default=True, description="Open the assistant's turn.")
    continue_final_message: bool = Field(
        default=False, description="Continue the last message instead of opening a new one."
    )
    keep_reasoning: KeepReasoning | None = KEEP_REASONING
    chat_template_kwargs: TemplateValues = Field(
        default_factory=dict, description="Variables of the chat template, such as enable_thinking."
    )

    @model_validator(mode="after")
    def _opens_or_continues(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message: set "
                "add_generation_prompt=false with it"
            )
        return self

    def template(self) -> dict[str, Any]:
        """Return the options of the chat template."""
        values: dict[str, Any] = dict(self.chat_template_kwargs)
        values["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            values["continue_final_message"] = True
        return values


def functions_of(tools: list[ChatTool]) -> list[Tool]:
    """Return the tools that the prompt shows."""
    return [tool.function.tool() for tool in tools if isinstance(tool, ToolBody)]


class ChatBody(TemplateFields, SamplingFields):
    """Continue a conversation."""

    dialect: ClassVar = CHAT
    id_prefix: ClassVar = "chatcmpl-"
    ANSWER_FIELD: ClassVar = "response_format"
    BUDGET_IS_HINT: ClassVar = False

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(
        default=None, ge=1, description="Older name of max_completion_tokens."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    reasoning_effort: Effort | None = Field(default=None, description=EFFORT)
    thinking_token_budget: int | None = Field(
        default=None,
        ge=-1,
        description="Tokens of reasoning, after which its end is forced; -1: no bound.",
    )
    include_reasoning: bool = Field(default=True, description="Whether reasoning is sent.")
    modalities: list[Literal["text"]] = Field(default=["text"], min_length=1)
    response_format: ResponseFormat | None = None
    tools: Items[ChatTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _no_contradictions(self) -> "ChatBody":
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} and "
                f"max_completion_tokens={self.max_completion_tokens}: they mean the same, give one"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} without logprobs: set logprobs=true"
            )
        return self

    def breakpoints(self) -> list[Breakpoint]:
        """Return the last marks, in order; none without ``cache.write``."""
        ttl = self.mark_ttl
        marks = [mark for message in self.messages for mark in message.marks(ttl)]
        return breakpoints_of(marks) if self.cache.write and any(marks) else []

    def conversation(self, num_parts: int | None = None) -> list[dict[str, Any]]:
        """Return messages for chat templates: all, or those of the first parts."""
        messages, left = [], num_parts
        for message in self.messages:
            shown = message
            if left is not None:
                if left <= 0:
                    break
                shown = message.first_parts(left)
                left -= len(message.marks(self.mark_ttl))
            messages.append(shown.rendered())
        return messages

    def sampler(self) -> dict[str, Any]:
        """Return the keywords of ``SamplingParams``."""
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {**super().sampler(), "max_tokens": limit, "logprobs": logprobs}

    def thinking_tokens(self) -> int | None:
        """Return how many tokens of reasoning are allowed; None for any number."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def answer_form(self) -> Form | None:
        """Return the format of the answer; calls are not bound by it."""
        return None if self.response_format is None else self.response_format.form()

    def template(self) -> dict[str, Any]:
        """Return the options of the chat template."""
        values = super().template()
        if self.reasoning_effort is not None:
            values.setdefault("reasoning_effort", template_effort(self.reasoning_effort))
        return values

    @cached_property
    def tool_use(self) -> ToolUse:
        """Return which tools may be called, and how.

        Raises:
            RequestError: They contradict each other.
        """
        offered, choice = functions_of(self.tools), self.tool_choice
        if isinstance(choice, NamedTool):
            name = choice.function.name
            return use_tools(offered, "required", name, self.parallel_tool_calls)
        return use_tools(offered, choice or "auto", None, self.parallel_tool_calls)

    def left_out(self) -> list[str]:
        """Return the places of tools that the prompt does not show."""
        if not self.tools:
            return []
        tools = enumerate(self.tools)
        return [f"tools[{place}]" for place, tool in tools if isinstance(tool, HostedTool)]

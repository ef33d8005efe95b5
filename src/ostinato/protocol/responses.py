"""The body of ``/v1/responses``: text, images, streams and tools that the client runs."""

import uuid
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ostinato.protocol.body import Items, OpenBody, TextOrInputImage
from ostinato.protocol.chat import IMAGE_DETAIL, IMAGE_URL, RefusalPart
from ostinato.protocol.conversation import (
    Message,
    ToolUse,
    Turns,
    parts_of,
    use_tools,
)
from ostinato.protocol.dialects import RESPONSES
from ostinato.protocol.marks import Breakpoint, MarkedPart, breakpoints_of
from ostinato.protocol.response_tools import (
    CallTarget,
    ResponseTool,
    function_name,
    offered_tools,
    unbound_formats,
    write_input,
)
from ostinato.protocol.sampling import (
    EFFORT,
    KEEP_REASONING,
    CacheFields,
    Effort,
    Form,
    Metadata,
    SamplerFields,
    ShortText,
    StructuredFields,
    template_effort,
)
from ostinato.protocol.tools import (
    MAX_TOOLS,
    CallId,
    HostedTool,
    JsonObjectFormat,
    SchemaBody,
    TextFormat,
    ToolName,
)
from ostinato.settings import KeepReasoning


class ItemBody(OpenBody):
    """Fields that every item may have; accepted and ignored."""

    id: ShortText | None = None
    status: ShortText | None = None


class ContentText(MarkedPart):
    """A text of either role."""

    type: Literal["input_text", "output_text"]
    text: str

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return {"type": "text", "text": self.text}


class ContentImage(MarkedPart):
    """An image."""

    type: Literal["input_image"]
    image_url: str = Field(min_length=1, description=IMAGE_URL)
    detail: ShortText | None = Field(default=None, description=IMAGE_DETAIL)

    def part(self) -> dict[str, Any]:
        """Return it in the format of chat completions."""
        return {"type": "image_url", "image_url": {"url": self.image_url}}


Content = Annotated[
    Annotated[ContentText | ContentImage | RefusalPart, Field(discriminator="type")],
    TextOrInputImage,
]


class MessageItem(ItemBody):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Content]
    phase: ShortText | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "MessageItem":
        parts = [] if isinstance(self.content, str) else self.content
        if self.role != "user" and any(isinstance(part, ContentImage) for part in parts):
            raise ValueError(
                f"an image in a message of role={self.role!r}: users and tools send images"
            )
        return self


class CallItem(ItemBody):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None
    arguments: str


class CustomCallItem(ItemBody):
    """An earlier call of a tool that takes one text."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None
    input: str


class ResultItem(ItemBody):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: str | Items[Content]


class HostedItem(ItemBody):
    """An earlier call of a tool that is left out of the prompt, or its result: likewise."""

    type: Literal[
        "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
        "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
        "tool_search_call", "tool_search_output", "local_shell_call", "local_shell_call_output",
        "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output",
        "computer_call", "computer_call_output", "program", "program_output",
    ]  # fmt: skip


class ReasoningText(OpenBody):
    """A part of the reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ItemBody):
    """The reasoning of an earlier turn."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default_factory=list)
    content: Items[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = Field(
        default=None, description="Names the turn, so that its reasoning is put back."
    )


def _kind(item: Any) -> str:
    kind = item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)
    return _KINDS.get(str(kind), "hosted")


_KINDS = {
    "message": "message",
    "function_call": "call",
    "custom_tool_call": "custom_call",
    "function_call_output": "result",
    "custom_tool_call_output": "result",
    "reasoning": "reasoning",
}

Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[CustomCallItem, Tag("custom_call")]
    | Annotated[ResultItem, Tag("result")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[HostedItem, Tag("hosted")],
    Discriminator(_kind),
]


class FunctionChoice(OpenBody):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class FlatSchemaFormat(SchemaBody):
    """An answer is JSON that fits a schema."""

    type: Literal["json_schema"]


class TextConfig(OpenBody):
    """The format of the answer's text."""

    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")
    ] = TextFormat(type="text")


class ResponseStreamOptions(OpenBody):
    """Options of a stream; none has an effect."""


class Reasoning(OpenBody):
    """How the model reasons before it answers."""

    effort: Effort | None = Field(default=None, description=EFFORT)


_LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(SamplerFields, StructuredFields, CacheFields):
    """Continue a conversation that the server may store."""

    dialect: ClassVar = RESPONSES
    id_prefix: ClassVar = "resp_"
    add_generation_prompt: ClassVar = True
    ANSWER_FIELD: ClassVar = "text.format"
    BUDGET_IS_HINT: ClassVar = False

    input: str | Items[Item]
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    store: bool | None = Field(
        default=None, description="Store it, so that it can be continued; needs cache.write."
    )
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: Items[ResponseTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    metadata: Metadata = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = Field(
        default="disabled", description="Nothing is cut: a longer prompt is refused."
    )
    background: Literal[False] = False
    include: list[ShortText] = Field(
        default_factory=list,
        max_length=16,
        description=f"{_LOGPROBS} and reasoning.encrypted_content.",
    )
    top_logprobs: int | None = Field(default=None, ge=0, description="With include.")
    reasoning: Reasoning | None = None
    keep_reasoning: KeepReasoning | None = KEEP_REASONING
    user: ShortText | None = None
    safety_identifier: ShortText | None = None

    @model_validator(mode="after")
    def _something_to_answer(self) -> "ResponsesBody":
        if not self.input:
            raise ValueError("input is empty: give a text, or a list of items")
        if all(isinstance(item, ReasoningItem) for item in self.input):
            raise ValueError("input has only reasoning: add the message or call that follows it")
        if self.top_logprobs is not None and not self.includes_logprobs:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} is for include=[{_LOGPROBS!r}]: give both"
            )
        if self.store and not self.cache.write:
            raise ValueError("store=true needs cache.write=true")
        return self

    @property
    def includes_sealed_turns(self) -> bool:
        """Whether items of reasoning have encrypted content."""
        return "reasoning.encrypted_content" in self.include

    @property
    def includes_logprobs(self) -> bool:
        """Whether log-probabilities are sent."""
        return _LOGPROBS in self.include

    def template(self) -> dict[str, Any]:
        """Return the options of the chat template."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return {} if effort is None else {"reasoning_effort": template_effort(effort)}

    def call_settings(self) -> dict[str, Any]:
        """Return the keywords of ``GenerateCall`` that clients set."""
        return {**super().call_settings(), "user": self.user}

    @property
    def is_stored(self) -> bool:
        """Whether to store the response."""
        return self.cache.write if self.store is None else self.store

    def head(self) -> list[Message]:
        """Return the message of the instructions, which apply to this request alone."""
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def breakpoints(self) -> list[Breakpoint]:
        """Return the last marks of the input, in order; none without ``cache.write``."""
        items = [] if isinstance(self.input, str) else self.input
        marks = [part.terms(self.mark_ttl) for item in items for part in _parts_of(item)]
        return breakpoints_of(marks) if self.cache.write else []

    def conversation(self, num_parts: int | None = None) -> list[Message]:
        """Return the new messages for chat templates, without instructions.

        Args:
            num_parts: Number of leading parts of messages to include; None for all.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns = Turns()
        for item in self.input if num_parts is None else _first_parts(self.input, num_parts):
            match item:
                case ReasoningItem():
                    text = "".join(part.text for part in item.content or item.summary)
                    turns.think(text, item.encrypted_content)
                case MessageItem():
                    turns.say(item.role, parts_of(item.content))
                case CallItem():
                    name = function_name(item.name, item.namespace)
                    turns.call(item.call_id, name, item.arguments)
                case CustomCallItem():
                    name = function_name(item.name, item.namespace)
                    turns.call(item.call_id, name, write_input(item.input))
                case ResultItem():
                    turns.answer(item.call_id, parts_of(item.output))
        return turns.messages

    def input_items(self) -> list[dict[str, Any]]:
        """Return the new items, each with an id."""
        texts = (
            [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else []
        )
        return [_with_id(item) for item in (texts or self.input) if not isinstance(item, str)]

    @cached_property
    def tool_use(self) -> ToolUse:
        """Return which tools may be called, and how.

        Raises:
            RequestError: They contradict each other.
        """
        offered = [tool for tool, _ in offered_tools(self.tools)]
        if isinstance(self.tool_choice, FunctionChoice):
            name = function_name(self.tool_choice.name, self.tool_choice.namespace)
            return use_tools(offered, "required", name, self.parallel_tool_calls)
        return use_tools(offered, self.tool_choice, None, self.parallel_tool_calls)

    def targets(self) -> dict[str, CallTarget]:
        """Return the tools behind the functions that the prompt shows, by their names there."""
        return {tool.name: target for tool, target in offered_tools(self.tools)}

    def left_out(self) -> list[str]:
        """Return the places of tools and items that are not shown, and of grammars not enforced."""
        tools = []
        for number, tool in enumerate(self.tools):
            if isinstance(tool, HostedTool):
                tools.append(f"tools[{number}]")
            tools += [f"tools[{number}]{place}" for place in unbound_formats(tool)]
        items = enumerate(() if isinstance(self.input, str) else self.input)
        return tools + [f"input[{n}]" for n, item in items if isinstance(item, HostedItem)]

    def sampler(self) -> dict[str, Any]:
        """Return the keywords of ``SamplingParams``."""
        logprobs = (self.top_logprobs or 0) if self.includes_logprobs else None
        return {**super().sampler(), "max_tokens": self.max_output_tokens, "logprobs": logprobs}

    def thinking_tokens(self) -> int | None:
        """Return None: this API has no bound on reasoning."""
        return None

    def answer_form(self) -> Form | None:
        """Return the format of the answer; calls are not bound by it."""
        return self.text.format.form()

    def echoed(self) -> dict[str, Any]:
        """Return the settings that a response echoes."""
        shown = self.model_dump(
            by_alias=True,
            exclude_none=True,
            include={
                "model", "instructions", "previous_response_id", "max_output_tokens",
                "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "text",
                "metadata", "truncation", "background", "user",
            },
        )  # fmt: skip
        blank = dict.fromkeys(
            ("instructions", "previous_response_id", "max_output_tokens", "user"), None
        )
        blank_tool = {"strict": False, "parameters": None}
        tools = [
            {**blank_tool, **tool} if tool["type"] == "function" else tool
            for tool in shown["tools"]
        ]
        effort = None if self.reasoning is None else self.reasoning.effort
        reasoning = {"effort": effort, "summary": None}
        return {
            **blank, **shown, "tools": tools, "store": self.is_stored, "reasoning": reasoning,
            "top_logprobs": self.top_logprobs or 0,
        }  # fmt: skip


def _parts_of(item: Item) -> list[ContentText | ContentImage | RefusalPart]:
    """Return the parts of a message, which may have marks."""
    is_list = isinstance(item, MessageItem) and isinstance(item.content, list)
    return item.content if is_list else []  # type: ignore[union-attr,return-value]


def _first_parts(items: list[Item], number: int) -> Iterator[Item]:
    """Yield items up to the end of a part."""
    for item in items:
        parts = _parts_of(item)
        if number <= len(parts):
            yield item.model_copy(update={"content": parts[:number]})
            return
        number -= len(parts)
        yield item


def _with_id(item: ItemBody) -> dict[str, Any]:
    """Return an item as it is listed."""
    shown = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": item.content}]
    prefixes = {"message": "msg", "reasoning": "rs", "custom_tool_call": "ctc"}
    prefix = prefixes.get(shown["type"], "fc")
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed", **shown}

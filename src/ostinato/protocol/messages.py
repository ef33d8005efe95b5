"""The body of Anthropic's ``/v1/messages``.

A request is a sequence of blocks: those of the system text, then those of each message. Tools
precede all of them, as in the prompt, so a breakpoint is a position in the sequence.
"""

from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ostinato.protocol.body import MAX_MESSAGES, Items, OpenBody
from ostinato.protocol.conversation import Message, Tool, ToolUse, use_tools
from ostinato.protocol.dialects import MESSAGES, ApiBody
from ostinato.protocol.marks import Breakpoint, CacheControl
from ostinato.protocol.message_blocks import (
    AnthropicMessage,
    HostedBlock,
    TextBlock,
    template_messages,
)
from ostinato.protocol.sampling import (
    EFFORT,
    KEEP_REASONING,
    KEEP_TOKENS,
    CacheUse,
    Effort,
    Form,
    ShortText,
    StructuredFields,
    template_effort,
)
from ostinato.protocol.schemas import closed
from ostinato.protocol.tools import MAX_TOOLS, ToolName
from ostinato.settings import KeepReasoning

MAX_BREAKPOINTS = 4


def thinking_variables(kind: str | None) -> dict[str, Any]:
    """Return the variables of chat templates for a kind of ``thinking``; none without one."""
    return (
        {} if kind is None else dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")
    )


class AnthropicTool(OpenBody):
    """A function that the model may call; tools that a hosted service runs are left out."""

    type: ShortText = "custom"
    name: ToolName | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None
    strict: bool = False
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _can_be_called(self) -> "AnthropicTool":
        if not self.is_hosted and (self.name is None or self.input_schema is None):
            raise ValueError("a tool of type 'custom' needs a name and an input_schema")
        return self

    @property
    def is_hosted(self) -> bool:
        """Whether it has a type of its own, and no schema for the model."""
        return self.type != "custom"

    def tool(self) -> Tool:
        """Return it independent of the API."""
        assert self.name is not None and self.input_schema is not None, "hosted tools are left out"
        return Tool(self.name, self.description, self.input_schema, self.strict)


class AnthropicChoice(OpenBody):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_the_tool(self) -> "AnthropicChoice":
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name says which tool must be called: give it with type='tool' alone")
        return self


class Metadata(OpenBody):
    """The client's end user."""

    user_id: ShortText | None = None


class SchemaFormat(OpenBody):
    """An answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenBody):
    """The format of the answer, and how much the model reasons before it."""

    format: SchemaFormat | None = None
    effort: Effort | None = Field(default=None, description=EFFORT)


class Thinking(OpenBody):
    """Whether the model reasons before it answers: a variable of the chat template."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        default=None,
        ge=1024,
        description="Tokens of thinking, after which its end is forced, where it has a mark.",
    )
    display: ShortText | None = Field(
        default=None, description="omitted: blocks without text; any other value: in full."
    )


class CountBody(ApiBody):
    """Count the tokens of a prompt."""

    dialect: ClassVar = MESSAGES
    id_prefix: ClassVar = "msg_"
    add_generation_prompt: ClassVar = True

    messages: Items[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Items[TextBlock] = ""
    tools: Items[AnthropicTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: AnthropicChoice = AnthropicChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: SchemaFormat | None = Field(
        default=None, description="Older name of output_config.format."
    )
    cache_control: CacheControl | None = Field(
        default=None, description="Keep the prompt up to its last block."
    )
    cache_salt: ShortText = Field(default="", description="Extension: as in chat completions.")
    keep_tokens: bool = KEEP_TOKENS
    keep_reasoning: KeepReasoning | None = KEEP_REASONING

    @model_validator(mode="after")
    def _answerable(self) -> "CountBody":
        speakers = [message.role for message in self.messages if message.role != "system"]
        if not speakers or speakers[-1] != "user":
            raise ValueError("the last message is the assistant's: it cannot be continued here")
        if len(self.breakpoints()) > MAX_BREAKPOINTS:
            raise ValueError(
                f"{len(self.breakpoints())} blocks have cache_control: at most {MAX_BREAKPOINTS} "
                "may have it"
            )
        return self

    def template(self) -> dict[str, Any]:
        """Return the options of the chat template."""
        values = thinking_variables(None if self.thinking is None else self.thinking.type)
        if self.output_config.effort is not None:
            values["reasoning_effort"] = template_effort(self.output_config.effort)
        return values

    @cached_property
    def tool_use(self) -> ToolUse:
        """Return which tools may be called, and how.

        Raises:
            RequestError: They contradict each other.
        """
        offered = [tool.tool() for tool in self.tools if not tool.is_hosted]
        choice = self.tool_choice
        kind = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
        return use_tools(offered, kind, choice.name, not choice.disable_parallel_tool_use)

    def left_out(self) -> list[str]:
        """Return the places of tools and blocks that the prompt does not show."""
        tools = [f"tools[{place}]" for place, tool in enumerate(self.tools) if tool.is_hosted]
        return tools + [
            f"messages[{number}].content[{place}]"
            for number, message in enumerate(self.messages)
            for place, block in enumerate(message.blocks)
            if isinstance(block, HostedBlock)
        ]

    def conversation(self, num_blocks: int | None = None) -> list[Message]:
        """Return messages for chat templates.

        Args:
            num_blocks: Number of leading blocks to include; None for all.
        """
        system = self.system
        head = [TextBlock(type="text", text=system)] if isinstance(system, str) else system
        if num_blocks is not None:
            head, left = head[:num_blocks], max(0, num_blocks - len(head))
        text = "".join(block.text for block in head)
        messages: list[Message] = [{"role": "system", "content": text}] if text else []
        for message in self.messages:
            blocks = message.blocks
            if num_blocks is not None:
                blocks, left = blocks[:left], max(0, left - len(blocks))
            messages += template_messages(message.role, blocks)
        return messages

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints, in order."""
        marked = [Breakpoint(0, t.cache_control.terms) for t in self.tools if t.cache_control]
        system = self.system
        blocks: list[Any] = [None] if isinstance(system, str) else list(system)
        for message in self.messages:
            blocks += message.blocks
        for number, block in enumerate(blocks, 1):
            if block is not None and block.cache_control is not None:
                marked.append(Breakpoint(number, block.cache_control.terms))
        if self.cache_control is not None:
            marked.append(Breakpoint(len(blocks), self.cache_control.terms))
        return marked


class MessagesBody(StructuredFields, CountBody):
    """Continue a conversation."""

    ANSWER_FIELD: ClassVar = "output_config"
    BUDGET_IS_HINT: ClassVar = True

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    metadata: Metadata = Metadata()
    seed: int | None = Field(default=None, description="Extension: makes sampling repeatable.")
    cache: CacheUse = Field(default=CacheUse(), description="Extension: as in chat completions.")

    @model_validator(mode="after")
    def _no_contradictions(self) -> "MessagesBody":
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError(
                f"thinking.budget_tokens={budget} with max_tokens={self.max_tokens}: the answer "
                "follows the thinking, so max_tokens must be larger"
            )
        if self.breakpoints() and not self.cache.write:
            raise ValueError("cache_control needs cache.write=true")
        return self

    def call_settings(self) -> dict[str, Any]:
        """Return the keywords of ``GenerateCall`` that clients set."""
        return {"user": self.metadata.user_id}

    def sampler(self) -> dict[str, Any]:
        """Return the keywords of ``SamplingParams``."""
        names = ("temperature", "top_p", "top_k", "seed", "max_tokens")
        return {**{n: getattr(self, n) for n in names}, "stop": self.stop_sequences}

    def thinking_tokens(self) -> int | None:
        """Return how many tokens of thinking are allowed; None for any number."""
        if self.thinking is None or self.thinking.type != "enabled":
            return None
        return self.thinking.budget_tokens

    def answer_form(self) -> Form | None:
        """Return the format of the answer; calls are not bound by it."""
        answer = self.output_config.format or self.output_format
        return None if answer is None else {"json": closed(answer.schema_)}

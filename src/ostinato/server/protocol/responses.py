"""What may be asked of ``/v1/responses``: text, streams and tools that are functions?"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ostinato.core.errors import InvalidSamplingParams
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.structured_outputs import StructuredOutputs
from ostinato.server.protocol.body import Body, Items
from ostinato.server.protocol.sampling import CacheFields, FormBody, ShortText
from ostinato.server.protocol.tools import (
    MOST_TOOLS,
    CallId,
    FunctionBody,
    JsonObjectFormat,
    SchemaBody,
    TextFormat,
    ToolName,
)
from ostinato.server.tools import Message, ToolUse, add_call, form_of, use_tools

Status = Literal["in_progress", "completed", "incomplete"]


class ItemBody(Body):
    """What every item may carry, and nobody here needs."""

    id: ShortText | None = None
    status: Status | None = None


class ContentText(Body):
    """A text, of either side."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    logprobs: list[Any] = Field(default_factory=list, max_length=0)


class MessageItem(ItemBody):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentText]
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(ItemBody):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str


class ResultItem(ItemBody):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Items[ContentText]


def _kind(item: Any) -> str | None:
    if isinstance(item, dict):
        return str(item.get("type") or "message")
    return getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: ToolName


class FlatSchemaFormat(SchemaBody):
    """An answer is JSON that fits a schema."""

    type: Literal["json_schema"]


class TextConfig(Body):
    """How the answer's text is to look."""

    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")
    ] = TextFormat(type="text")


class ObfuscationOptions(Body):
    """How a stream is to look."""

    include_obfuscation: Literal[False] = False


class ResponsesBody(CacheFields):
    """Continue a conversation that the server may remember."""

    model: str
    input: str | Items[Item]
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    store: bool | None = Field(
        default=None, description="Remember it, so that it can be continued; not without cache."
    )
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    stream_options: ObfuscationOptions | None = None
    tools: Items[FunctionTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    metadata: dict[ShortText, ShortText] = Field(default_factory=dict, max_length=16)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    include: list[Any] = Field(default_factory=list, max_length=0)
    service_tier: Literal["auto", "default"] = "auto"
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    seed: int | None = Field(default=None, description="Ours: the same seed gives the same text.")
    structured_outputs: FormBody | None = Field(default=None, description="Ours, from vLLM.")

    @model_validator(mode="after")
    def _something_to_answer(self) -> "ResponsesBody":
        if not self.input:
            raise ValueError("input is empty: give a text, or a list of items")
        if self.store and not self.cache.write:
            raise ValueError("store=true remembers what cache.write=false shall not leave behind")
        return self

    @property
    def is_stored(self) -> bool:
        """Whether the server shall remember it."""
        return self.cache.write if self.store is None else self.store

    def conversation(self) -> list[Message]:
        """Return what is new, as chat templates read it; instructions are not among it."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Message] = []
        for item in self.input:
            match item:
                case MessageItem():
                    role = "system" if item.role == "developer" else item.role
                    messages.append({"role": role, "content": _text(item.content)})
                case CallItem():
                    add_call(messages, item.call_id, item.name, item.arguments)
                case ResultItem():
                    result = {"tool_call_id": item.call_id, "content": _text(item.output)}
                    messages.append({"role": "tool", **result})
        return messages

    def tool_use(self) -> ToolUse:
        """Return which tools may be called, and how.

        Raises:
            ApiError: They contradict each other.
        """
        offered = [tool.tool() for tool in self.tools]
        if isinstance(self.tool_choice, FunctionChoice):
            return use_tools(offered, "required", self.tool_choice.name, self.parallel_tool_calls)
        return use_tools(offered, self.tool_choice, None, self.parallel_tool_calls)

    def params(self) -> SamplingParams:
        """Return the sampler's parameters.

        Raises:
            InvalidSamplingParams: A value is out of range.
            ApiError: The tools contradict each other.
        """
        use = self.tool_use()
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=use.stops,
            max_tokens=self.max_output_tokens,
        )
        return replace(params, structured_outputs=self._form(use))

    def _form(self, use: ToolUse) -> StructuredOutputs | None:
        match self.text.format:
            case JsonObjectFormat():
                answer: StructuredOutputs | None = StructuredOutputs(json_object=True)
            case FlatSchemaFormat() as wanted:
                answer = StructuredOutputs(json=wanted.schema_)
            case _:
                answer = None
        if self.structured_outputs is None:
            return form_of(answer, use)
        if answer is not None or use.choice != "auto":
            raise InvalidSamplingParams(
                "structured_outputs is the form of the whole answer: leave out text.format, and "
                "let tool_choice be auto"
            )
        return self.structured_outputs.form()

    def echoed(self) -> dict[str, Any]:
        """Return the settings that a response repeats."""
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
        tools = [{"strict": False, "parameters": None, **tool} for tool in shown["tools"]]
        return {**blank, **shown, "tools": tools, "store": self.is_stored}


def _text(content: str | Items[ContentText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)

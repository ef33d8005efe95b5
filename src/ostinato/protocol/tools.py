"""Tools, tool calls and response formats in OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from ostinato.protocol.body import OpenBody
from ostinato.protocol.conversation import Tool
from ostinato.protocol.sampling import Form, ShortText
from ostinato.protocol.schemas import closed

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]

CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]

MAX_TOOLS = 128


class FunctionBody(OpenBody):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments; without one, any object."
    )
    strict: bool | None = Field(
        default=None, description="Whether optional calls must match the schema."
    )

    def tool(self) -> Tool:
        """Return it independent of the API."""
        parameters = self.parameters or {"type": "object"}
        return Tool(self.name, self.description or "", parameters, bool(self.strict))


class ToolBody(OpenBody):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionBody


class HostedTool(OpenBody):
    """A tool that a hosted service runs; its settings are not read."""

    type: ShortText


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function" if kind in (None, "function", "custom") else "hosted"


ChatTool = Annotated[
    Annotated[ToolBody, Tag("function")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
]


class NamedFunction(OpenBody):
    """The function that must be called."""

    name: ToolName


class NamedTool(OpenBody):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(OpenBody):
    """A function's name and arguments."""

    name: ToolName
    arguments: str = Field(description="JSON, as text.")


class CallBody(OpenBody):
    """A call that the model made earlier."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class TextFormat(OpenBody):
    """An answer is text."""

    type: Literal["text"]

    def form(self) -> None:
        """Return no structured output."""


class JsonObjectFormat(OpenBody):
    """An answer is any JSON object."""

    type: Literal["json_object"]

    def form(self) -> Form:
        """Return the structured output."""
        return {"json_object": True}


class SchemaBody(OpenBody):
    """A schema with a name."""

    name: ToolName
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="Schemas are always enforced.")

    def form(self) -> Form:
        """Return the structured output."""
        return {"json": closed(self.schema_)}


class JsonSchemaFormat(OpenBody):
    """An answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaBody

    def form(self) -> Form:
        """Return the structured output."""
        return self.json_schema.form()


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]

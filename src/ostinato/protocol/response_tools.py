"""Tools and calls of ``/v1/responses``, and what the model sees of them.

==============  ==========================================================================
type            the prompt shows
==============  ==========================================================================
``function``    the function
``custom``      a function with one text, ``input``; a regular expression binds that text, and so
                does a Lark grammar without recursion
``namespace``   its tools, as ``<namespace>__<name>``
any other       nothing: a hosted service would run it, and the response says so
==============  ==========================================================================

A call is sent in the shape of its tool: with a ``namespace``, or as a ``custom_tool_call``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ostinato.protocol.body import Items, OpenBody
from ostinato.protocol.conversation import Tool
from ostinato.protocol.lark import NotRegular, expression_of
from ostinato.protocol.tools import MAX_TOOLS, FunctionBody, HostedTool, ToolName

_INPUT = "input"
"""The one argument of a custom tool."""


class FunctionTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class TextInput(OpenBody):
    """Any text."""

    type: Literal["text"]


class GrammarInput(OpenBody):
    """A text that follows a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str

    @cached_property
    def expression(self) -> str | None:
        """The grammar as a regular expression; None for one that is not regular."""
        if self.syntax == "regex":
            return self.definition
        try:
            return expression_of(self.definition)
        except NotRegular:
            return None


class CustomTool(OpenBody):
    """A tool that takes one text instead of arguments."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] = TextInput(
        type="text"
    )

    def tool(self) -> Tool:
        """Return it as a function of one text, which a call's grammar binds where it can."""
        description, grammar = self.description or "", self.format
        if isinstance(grammar, GrammarInput):
            description += f"\n\n{_INPUT} follows this grammar ({grammar.syntax}):\n"
            description += grammar.definition
        expression = grammar.expression if isinstance(grammar, GrammarInput) else None
        binding = None
        if expression is not None:
            binding = _parameters({"type": "string", "pattern": f"^(?:{expression})$"})
        shown = _parameters({"type": "string"})
        return Tool(self.name, description.strip(), shown, binding is not None, binding)

    @property
    def is_unbound(self) -> bool:
        """Whether it has a grammar that is shown to the model, and not enforced."""
        return isinstance(self.format, GrammarInput) and self.format.expression is None


def _parameters(text: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function of one text."""
    return {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }


class NamespaceTool(OpenBody):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Items[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return str(kind) if kind in ("function", "custom", "namespace") else "hosted"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The tool behind a function that the prompt shows.

    Attributes:
        name: Its own name.
        namespace: The namespace that it is in.
        is_custom: Whether it takes one text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the prompt shows a function."""
    return name if namespace is None else f"{namespace}__{name}"


def offered_tools(tools: list[ResponseTool]) -> Iterator[tuple[Tool, CallTarget]]:
    """Yield what the prompt shows of tools, each with its target."""
    for tool in tools:
        match tool:
            case FunctionTool():
                yield tool.tool(), CallTarget(tool.name)
            case CustomTool():
                yield tool.tool(), CallTarget(tool.name, is_custom=True)
            case NamespaceTool():
                for inner, target in offered_tools([*tool.tools]):
                    shown = function_name(inner.name, tool.name)
                    yield replace(inner, name=shown), replace(target, namespace=tool.name)


def unbound_formats(tool: ResponseTool) -> Iterator[str]:
    """Yield the places in a tool of grammars that are shown to the model, and not enforced."""
    match tool:
        case CustomTool() if tool.is_unbound:
            yield ".format"
        case NamespaceTool():
            for number, inner in enumerate(tool.tools):
                yield from (f".tools[{number}]{place}" for place in unbound_formats(inner))


def write_input(text: str) -> str:
    """Return the arguments of a call of a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def read_input(arguments: str) -> str:
    """Return the text of a call of a custom tool; the arguments as they are if they were cut."""
    try:
        text = json.loads(arguments)[_INPUT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments

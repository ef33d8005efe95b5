"""The blocks of messages of Anthropic's API, and how chat templates read them."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ostinato.protocol.body import Items, OpenBody, TextOrImage
from ostinato.protocol.conversation import Message, parts_of, turns_of_blocks
from ostinato.protocol.marks import CacheControl
from ostinato.protocol.tools import CallId, ToolName


class MarkedBlock(OpenBody):
    """A block up to whose end the prompt may be kept."""

    cache_control: CacheControl | None = None


class TextBlock(MarkedBlock):
    """A text."""

    type: Literal["text"]
    text: str

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return {"type": "text", "text": self.text}


class ImageSource(OpenBody):
    """An image's file or URL."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = Field(default=None, description="The file in base64.")
    url: str | None = Field(
        default=None, description="Fetched only where the operator allows the host."
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "ImageSource":
        if (self.data is not None, self.url is not None) != (
            self.type == "base64",
            self.type == "url",
        ):
            raise ValueError("a source of type 'base64' has data, one of type 'url' has a url")
        return self


class ImageBlock(MarkedBlock):
    """An image."""

    type: Literal["image"]
    source: ImageSource

    def part(self) -> dict[str, Any]:
        """Return it in OpenAI's format."""
        source = self.source
        url = source.url or f"data:{source.media_type or 'image/png'};base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class PlainSource(OpenBody):
    """A document's text."""

    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        """Its text."""
        return self.data


class ContentSource(OpenBody):
    """A document in pieces of text."""

    type: Literal["content"]
    content: str | Items[TextBlock]

    @property
    def text(self) -> str:
        """Its pieces, joined."""
        content = self.content
        return content if isinstance(content, str) else "".join(block.text for block in content)


class DocumentBlock(MarkedBlock):
    """A document that is text: the prompt shows its title, its context and its text."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return _lines(self.title, self.context, self.source.text)


class SearchResultBlock(MarkedBlock):
    """A text that a search of the client's returned, with its title and its source."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return _lines(self.title, self.source, "".join(block.text for block in self.content))


class ToolReferenceBlock(MarkedBlock):
    """The name of a tool that a search of the client's returned."""

    type: Literal["tool_reference"]
    tool_name: ToolName

    def part(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        return _lines(self.tool_name)


def _lines(*texts: str | None) -> dict[str, Any]:
    return {"type": "text", "text": "".join(f"{text}\n" for text in texts if text)}


Shown = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
"""What a user's message shows."""

_ResultPart = Annotated[Shown | ToolReferenceBlock, Field(discriminator="type")]


class ToolUseBlock(MarkedBlock):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(MarkedBlock):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | Items[Annotated[_ResultPart, TextOrImage]] = ""
    is_error: bool = False


class ThinkingBlock(OpenBody):
    """The reasoning of an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(
        default="", description="Names the turn, so that its reasoning is put back."
    )
    cache_control: None = None


class RedactedThinkingBlock(OpenBody):
    """Encrypted reasoning: it may name a turn, as a signature does; else it has no effect."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: None = None


class HostedBlock(MarkedBlock):
    """A call that a hosted service ran, its result, or a file there; left out of the prompt."""

    type: Literal[
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "tool_search_tool_result",
        "advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload",
    ]  # fmt: skip


Block = Shown | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | HostedBlock
BlockBody = Annotated[Annotated[Block, Field(discriminator="type")], TextOrImage]


class AnthropicMessage(OpenBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[BlockBody]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "AnthropicMessage":
        own = {
            "assistant": (
                TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock, HostedBlock
            ),
            "user": (
                TextBlock, ImageBlock, DocumentBlock, SearchResultBlock, ToolResultBlock,
                HostedBlock,
            ),
            "system": (TextBlock,),
        }  # fmt: skip
        if not all(isinstance(block, own[self.role]) for block in self.blocks):
            raise ValueError(
                f"a message of role={self.role!r} has a block of the other role: "
                "thinking and tool_use are the assistant's, images and tool_result are the user's"
            )
        return self

    @property
    def blocks(self) -> list[Block]:
        """Its content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


def template_messages(role: str, blocks: list[Block]) -> list[Message]:
    """Return the blocks of one message for chat templates."""
    results: list[Message] = []
    content: list[Shown] = []
    thoughts: list[str] = []
    seals: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking)
                seals += [block.signature] if block.signature else []
            case RedactedThinkingBlock():
                seals.append(block.data)
            case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock():
                content.append(block)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                results.append(_result(block))
    said = parts_of(content) if content else None
    return turns_of_blocks(role, said, thoughts, calls, results, seals)


def _result(block: ToolResultBlock) -> Message:
    content = parts_of(block.content)
    if block.is_error:
        parts = [{"type": "text", "text": "Error: "}, *content]
        content = f"Error: {content}" if isinstance(content, str) else parts
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}

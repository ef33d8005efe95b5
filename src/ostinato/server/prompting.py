"""How does a conversation with tools become a prompt?"""

from collections.abc import Sequence

from ostinato.server.state import ServerState
from ostinato.server.tools import Message, ToolUse, describe_tools, knows_tools, read_arguments


async def render_prompt(
    state: ServerState, messages: Sequence[Message], use: ToolUse, opens_turn: bool = True
) -> list[int]:
    """Write a conversation as token ids, through the model's chat template.

    Args:
        state: Of the server.
        messages: In OpenAI's form, contents as text.
        use: The tools that are offered.
        opens_turn: Whether the assistant is to speak next.

    Raises:
        MissingTokenizer: The checkpoint has none.
        RequestError: There is no template, or it refuses.
    """
    template = getattr(state.llm.engine.loaded.tokenizer, "chat_template", None)
    if not knows_tools(template):
        return await state.llm.render(describe_tools(messages, use), None, opens_turn)
    described = [tool.describe() for tool in use.tools]
    return await state.llm.render(read_arguments(messages), None, opens_turn, described)

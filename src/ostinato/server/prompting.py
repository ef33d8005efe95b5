"""How does a conversation with tools become a prompt?"""

from collections.abc import Sequence
from typing import Any

from ostinato.engine.prompts import Prompt
from ostinato.engine.tokenized_text import TokenizedText
from ostinato.server.callers import Caller
from ostinato.server.state import ServerState
from ostinato.server.tools import Message, ToolUse, describe_tools, knows_tools, read_arguments


async def render_prompt(
    state: ServerState,
    messages: Sequence[Message],
    use: ToolUse,
    whose: Prompt,
    opens_turn: bool = True,
    **options: Any,
) -> TokenizedText:
    """Write a conversation as token ids, through the model's chat template.

    Args:
        state: Of the server.
        messages: In OpenAI's form, contents as text.
        use: The tools that are offered.
        whose: As ``sender`` made it: whose turn at the tokenizer it takes, and what it knows.
        opens_turn: Whether the assistant is to speak next.
        **options: What the template is told besides.

    Raises:
        MissingTokenizer: The checkpoint has none.
        RequestError: There is no template, or it refuses.
    """
    template = getattr(state.llm.engine.loaded.tokenizer, "chat_template", None)
    described = None
    if knows_tools(template):
        messages, described = read_arguments(messages), [tool.describe() for tool in use.tools]
    else:
        messages = describe_tools(messages, use)
    return await state.llm.render(messages, None, opens_turn, described, whose=whose, **options)


def sender(caller: Caller, cache_salt: str = "", keep_tokens: bool = True) -> Prompt:
    """Say whose texts a prompt of a caller may begin with."""
    return Prompt(
        cache_salt=caller.narrow(cache_salt),
        public_prefixes=tuple(caller.public_prefixes),
        keep_tokens=keep_tokens,
    )

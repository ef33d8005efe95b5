"""What is known of the prompt that follows an answer: all up to the user's next words."""

from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ostinato.core.tokens import num_common_tokens
from ostinato.engine.prompts.chat import Message
from ostinato.engine.prompts.chat_turns import RenderedChat

_WORDS = ("Hello", "1 + 1")
"""Two messages that begin differently: what both prompts have does not depend on the words."""


async def known_head(
    render: Callable[[Sequence[Message]], Awaitable[RenderedChat]],
    messages: Sequence[Message],
    answer: dict[str, Any],
) -> "array[int]":
    """Return the tokens that any prompt begins with that continues a conversation.

    Args:
        render: Renders messages as ``TokenizerExecutor.render``, and so as the next request will.
        messages: The conversation up to the answer.
        answer: The assistant's message.

    Returns:
        Packed ids, shape (num_tokens,).

    Raises:
        RequestError: The template refuses a further user message.
    """
    first, second = [
        (await render([*messages, answer, {"role": "user", "content": words}])).tokens.tokens
        for words in _WORDS
    ]
    return first[: num_common_tokens(memoryview(first).cast("B"), memoryview(second).cast("B"))]

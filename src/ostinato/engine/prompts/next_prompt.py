"""What is known of the prompt that follows an answer: all up to the user's next words."""

from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ostinato.core.tokens import num_common_tokens
from ostinato.engine.ledger.meaning import Message
from ostinato.engine.prompts.chat import RenderedChat

_WORDS = ("Hello", "1 + 1")
"""Two messages that begin differently: what both prompts have does not depend on the words."""


async def known_head(
    render: Callable[[Sequence[Message]], Awaitable[RenderedChat]],
    messages: Sequence[Message],
    answer: dict[str, Any],
) -> "array[int]":
    """Return the tokens that any prompt begins with that continues a conversation.

    After a call that is the beginning of the prompt with the question behind its loop.

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
        (await render([*messages, answer, *_rest_of_loop(answer, words)])).tokens.tokens
        for words in _WORDS
    ]
    return first[: num_common_tokens(memoryview(first).cast("B"), memoryview(second).cast("B"))]


def _rest_of_loop(answer: dict[str, Any], words: str) -> list[Message]:
    """Return what follows an answer, up to the user's next message; ``words`` come first in it."""
    question: Message = {"role": "user", "content": words}
    calls = answer.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": c["id"], "content": words} for c in calls]
    return [*results, {"role": "assistant", "content": words}, question] if calls else [question]

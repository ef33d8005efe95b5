"""Requests as clients of four APIs write them.

The shapes are those of the API references of OpenAI (chat completions, completions, responses)
and Anthropic (messages), and of the gateways that log them.
"""

import random
from typing import Any

from .planted_faults import WORDS

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}

Body = dict[str, Any]


def dice_of(name: str) -> random.Random:
    return random.Random(name)


def sentences(dice: random.Random, count: int) -> str:
    return " ".join(" ".join(dice.choices(WORDS, k=9)).capitalize() + "." for _ in range(count))


RULES = "You are the clerk of a shop. " + sentences(dice_of("rules"), 140)
"""Some 1,400 tokens, more than the least that Anthropic caches."""

DOCUMENTS = [sentences(dice_of(f"document {n}"), 8) for n in range(5)]


def question(dice: random.Random) -> str:
    return sentences(dice, 1)[:-1] + "?"


def clock(number: int) -> str:
    return f"2025-03-{1 + number // 24:02}T{number % 24:02}:{7 * number % 60:02}:{number % 60:02}Z"


def functions() -> list[Body]:
    """Five tools as Anthropic takes them."""
    dice = dice_of("tools")
    schema = {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]}
    return [
        {"name": f"get_{word}", "description": sentences(dice, 3), "input_schema": schema}
        for word in WORDS[:5]
    ]


def chat_tools() -> list[Body]:
    return [{"type": "function", "function": flat_tool(tool)} for tool in functions()]


def flat_tool(tool: Body) -> Body:
    """A tool without Anthropic's name for its schema."""
    return {
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["input_schema"],
    }


def response_tools() -> list[Body]:
    return [{"type": "function", **flat_tool(tool)} for tool in functions()]


def anthropic(system: Any, messages: list[Body], **more: Any) -> Body:
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 1024,
        "system": system,
        "messages": messages,
        **more,
    }


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Body:
    return {"role": "assistant", "content": content}


def text(words: str, **more: Any) -> Body:
    return {"type": "text", "text": words, **more}


def cached_system(words: str = RULES) -> list[Body]:
    return [text(words, **EPHEMERAL)]


def chat(system: str, *messages: Body, **more: Any) -> Body:
    return {
        "model": "gpt-4.1-mini",
        "messages": [{"role": "developer", "content": system}, *messages],
        **more,
    }


def respond(instructions: str, items: Any, **more: Any) -> Body:
    return {"model": "gpt-4.1-mini", "instructions": instructions, "input": items, **more}


def tool_turns(dice: random.Random, turns: int, stamp: str = "") -> list[Body]:
    """A conversation of Anthropic's with a tool call in each turn; its last message asks."""
    messages = []
    for turn in range(turns):
        messages.append(user([text(question(dice))]))
        call = {"type": "tool_use", "id": f"toolu_{dice.getrandbits(60):015x}", "name": "get_order"}
        messages.append(assistant([text(sentences(dice, 2)), {**call, "input": {"of": str(turn)}}]))
        result = {"type": "tool_result", "tool_use_id": call["id"]}
        messages.append(user([{**result, "content": f"{stamp}{sentences(dice, 6)}"}]))
        messages.append(assistant([text(sentences(dice, 4))]))
    return [*messages, user([text(question(dice))])]


def marked(messages: list[Body]) -> list[Body]:
    """The conversation with a breakpoint on its last block."""
    *earlier, last = messages
    *parts, part = last["content"]
    return [*earlier, {**last, "content": [*parts, {**part, **EPHEMERAL}]}]


def growing(number: int, turns: int = 6) -> tuple[random.Random, int]:
    """The dice of a conversation, and which of its turns a request is."""
    return dice_of(f"conversation {number // turns}"), number % turns + 1

"""Requests as clients of four APIs write them, and logs of them in which nothing is planted.

The shapes are those of the API references of OpenAI (chat completions, completions, responses)
and Anthropic (messages), and of the gateways that log them.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from tests.lab.lint.planted_faults import WORDS

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


def looked_up(dice: random.Random, turn: int, output: str) -> list[Body]:
    """A call of a tool and its result, as items of the responses API."""
    call = {"type": "function_call", "call_id": f"call_{dice.getrandbits(60):015x}"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
    return [call | {"name": "get_order", "arguments": json.dumps({"of": turn})}, result]


def marked(messages: list[Body]) -> list[Body]:
    """The conversation with a breakpoint on its last block."""
    *earlier, last = messages
    *parts, part = last["content"]
    return [*earlier, {**last, "content": [*parts, {**part, **EPHEMERAL}]}]


def growing(number: int, turns: int = 6) -> tuple[random.Random, int]:
    """The dice of a conversation, and which of its turns a request is."""
    return dice_of(f"conversation {number // turns}"), number % turns + 1


# --- logs in which nothing is planted ---


def clean_anthropic(n: int, dice: random.Random) -> Body:
    tools = functions()
    tools[-1] |= EPHEMERAL
    return anthropic(cached_system(), [user(f"{question(dice)} It is {clock(n)}.")], tools=tools)


def clean_agent(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n, 8)
    return anthropic(cached_system(), marked(tool_turns(talk, turns)), tools=functions())


def clean_chat(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    history = [m for _ in range(turns - 1)
               for m in (user(question(talk)), assistant(sentences(talk, 3)))]  # fmt: skip
    return chat(RULES, *history, user(question(talk)), tools=chat_tools(), temperature=0.2 * turns)


def clean_documents(n: int, dice: random.Random) -> Body:
    """Each question has other documents: there is no order that would help."""
    own = "\n\n".join(f"[{i + 1}] {sentences(dice, 6)}" for i in range(3))
    return chat(RULES, user(f"{own}\n\n{question(dice)}"))


def clean_responses(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    items: list[Body] = []
    for turn in range(turns):
        items.append(user([{"type": "input_text", "text": question(talk)}]))
        items += looked_up(talk, turn, sentences(talk, 4))
    return respond(RULES, items, tools=response_tools(), store=False, user=f"user-{n // 6}")


def clean_completions(n: int, dice: random.Random) -> Body:
    return {"model": "m", "prompt": f"{RULES}\nQ: {question(dice)}\nA:", "max_tokens": 20}


def clean_gateway(n: int, dice: random.Random) -> Body:
    """As litellm logs: tools apart from the messages, the response beside them."""
    message = assistant(sentences(dice, 2))
    return {
        "id": f"chatcmpl-{n}",
        "call_type": "acompletion",
        "startTime": 1.74e9 + 60 * n,
        "model": "gpt-4.1-mini",
        "messages": chat(RULES, user(question(dice)))["messages"],
        "model_parameters": {"tools": chat_tools(), "temperature": 0},
        "response": {"id": f"chatcmpl-{n}", "choices": [{"index": 0, "message": message}]},
    }


def clean_batch(n: int, dice: random.Random) -> Body:
    body = respond(RULES, question(dice))
    return {"custom_id": str(n), "method": "POST", "url": "/v1/responses", "body": body}


def clean_models_by_user(n: int, dice: random.Random) -> Body:
    """An A/B test in which each user stays with one model."""
    body = chat(RULES, user(question(dice)), user=f"user-{n % 6}")
    return body | {"model": ["gpt-4.1", "gpt-4.1-mini"][n % 2]}


def clean_time_after_the_mark(n: int, dice: random.Random) -> Body:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [text(RULES, **hour), text(f"It is {clock(n)}.")]
    return anthropic(system, [user(question(dice))])


CLEAN: dict[str, Callable[[int, random.Random], Body]] = {
    "anthropic": clean_anthropic,
    "anthropic agent": clean_agent,
    "anthropic, time after the mark": clean_time_after_the_mark,
    "chat": clean_chat,
    "chat, models by user": clean_models_by_user,
    "chat with documents": clean_documents,
    "responses": clean_responses,
    "completions": clean_completions,
    "gateway": clean_gateway,
    "batch": clean_batch,
}


def lines_of(
    write: Callable[[int, random.Random], Body], name: str, count: int = 24
) -> list[bytes]:
    """The lines of a log; the same for the same name."""
    dice = dice_of(name)
    return [json.dumps(write(n, dice)).encode() for n in range(count)]

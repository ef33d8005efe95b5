"""Logs of four APIs in which nothing is planted."""

import json
import random
from collections.abc import Callable

from .api_bodies import (
    EPHEMERAL,
    RULES,
    Body,
    anthropic,
    assistant,
    cached_system,
    chat,
    chat_tools,
    clock,
    dice_of,
    functions,
    growing,
    marked,
    question,
    respond,
    response_tools,
    sentences,
    text,
    tool_turns,
    user,
)


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
        call = f"call_{talk.getrandbits(60):015x}"
        items.append(user([{"type": "input_text", "text": question(talk)}]))
        items.append({"type": "function_call", "call_id": call, "name": "get_order",
                      "arguments": json.dumps({"of": turn})})  # fmt: skip
        items.append({"type": "function_call_output", "call_id": call,
                      "output": sentences(talk, 4)})  # fmt: skip
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

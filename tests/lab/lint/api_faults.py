"""Logs of four APIs with one fault planted."""

import json
import random
import uuid
from collections.abc import Callable
from typing import Any

from tests.lab.lint.api_bodies import (
    DOCUMENTS,
    EPHEMERAL,
    RULES,
    Body,
    anthropic,
    assistant,
    cached_system,
    chat,
    clean_chat,
    clock,
    dice_of,
    functions,
    growing,
    looked_up,
    marked,
    question,
    respond,
    response_tools,
    sentences,
    text,
    tool_turns,
    user,
)
from tests.lab.lint.planted_faults import WORDS

# --- Anthropic's messages -------------------------------------------------------------------


def system_with_a_uuid(n: int, dice: random.Random) -> Body:
    name = uuid.UUID(int=dice.getrandbits(128), version=4)
    return anthropic([text(f"Request {name}.\n{RULES}", **EPHEMERAL)], [user(question(dice))])


def system_block_with_the_time(n: int, dice: random.Random) -> Body:
    system = [text(f"Current time: {clock(n)}"), text(RULES, **EPHEMERAL)]
    return anthropic(system, [user([text(question(dice))])])


def system_with_the_date(n: int, dice: random.Random) -> Body:
    return anthropic([text(f"Today is 2025-03-{1 + n // 2:02}. {RULES}", **EPHEMERAL)],
                     [user(question(dice))])  # fmt: skip


def anthropic_tools(change: Callable[[list[Body], int, random.Random], list[Body]]) -> Any:
    def body(n: int, dice: random.Random) -> Body:
        tools = change(functions(), n, dice)
        return anthropic(cached_system(), [user(question(dice))], tools=tools)

    return body


def shuffled(tools: list[Body], n: int, dice: random.Random) -> list[Body]:
    dice.shuffle(tools)
    return tools


def some(tools: list[Body], n: int, dice: random.Random) -> list[Body]:
    return [tool for tool in tools if dice.random() < 0.7] or tools[:1]


def timed(tools: list[Body], n: int, dice: random.Random) -> list[Body]:
    return [{**tools[0], "description": f"It is {clock(n)}. Looks up orders."}, *tools[1:]]


def rekeyed(tools: list[Body], n: int, dice: random.Random) -> list[Body]:
    def mixed(tool: Body) -> Body:
        keys = list(tool)
        dice.shuffle(keys)
        return {key: tool[key] for key in keys}

    return [mixed(tool) for tool in tools]


def mark_on_a_changing_block(n: int, dice: random.Random) -> Body:
    system = [text(RULES), text(f"The time is {clock(n)}.", **EPHEMERAL)]
    return anthropic(system, [user([text(question(dice))])])


def mark_on_the_question_only(n: int, dice: random.Random) -> Body:
    return anthropic([text(RULES)], [user([text(question(dice), **EPHEMERAL)])])


def too_many_marks(n: int, dice: random.Random) -> Body:
    parts = RULES.split(". ")
    size = len(parts) // 5
    system = [text(". ".join(parts[i * size : (i + 1) * size]), **EPHEMERAL) for i in range(5)]
    return anthropic(system, [user([text(question(dice))])])


def no_mark(n: int, dice: random.Random) -> Body:
    return anthropic(RULES, [user(question(dice))], tools=functions())


def no_mark_on_the_document(n: int, dice: random.Random) -> Body:
    book = sentences(dice_of(f"book {n % 2}"), 100)
    source = {"type": "text", "media_type": "text/plain", "data": book}
    document = {"type": "document", "source": source, "title": f"Book {n % 2}"}
    return anthropic(cached_system(), [user([document, text(question(dice))])])


def tool_result_with_the_time(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    return anthropic(cached_system(), marked(tool_turns(talk, turns, stamp=f"[{clock(n)}] ")))


def new_call_ids(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    written = json.dumps(marked(tool_turns(talk, turns)))
    for name in set(part for part in written.split('"') if part.startswith("toolu_")):
        written = written.replace(name, f"toolu_{dice.getrandbits(60):015x}")
    return anthropic(cached_system(), json.loads(written))


def name_before_a_document(n: int, dice: random.Random) -> Body:
    name = ["Ann Lee", "Bob", "Cleo", "Dan"][n % 4]
    document = text(" ".join(DOCUMENTS), **EPHEMERAL)
    parts = [text(f"User: {name}"), document, text(question(dice))]
    return anthropic(cached_system(), [user(parts)])


def documents_as_blocks(n: int, dice: random.Random) -> Body:
    order = dice.sample(range(5), 5)
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text_}}
        for text_ in (DOCUMENTS[i] for i in order)
    ]
    blocks[-1] |= EPHEMERAL
    return anthropic(cached_system(), [user([*blocks, text(question(dice))])])


def thinking_left_out(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    messages = []
    for turn in range(turns):
        messages.append(user(question(talk)))
        thought, said = sentences(talk, 12), sentences(talk, 6)
        if turn < turns - 1:
            messages.append(assistant([text(said)]))
    answer = [{"type": "thinking", "thinking": thought, "signature": "Eo4B"}, text(said)]
    body = anthropic(cached_system(), [*messages[:-1], user([text(messages[-1]["content"],
                                                                  **EPHEMERAL)])])  # fmt: skip
    response = {"id": f"msg_{n}", "type": "message", "role": "assistant", "content": answer}
    return {"request_body": json.dumps(body), "response_body": json.dumps(response)}


def tool_choice_forced_by_turns(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    choice = {"type": "auto"} if n % 2 else {"type": "tool", "name": "get_order"}
    messages = marked(tool_turns(talk, turns))
    return anthropic(cached_system(), messages, tools=functions(), tool_choice=choice)


def window_with_tools(n: int, dice: random.Random) -> Body:
    """Forty turns; the last five are sent."""
    whole = tool_turns(dice_of("long"), n + 1)
    return anthropic(cached_system(), marked(whole[-21:]))


# --- OpenAI's chat completions, completions and responses ------------------------------------


def chat_model_by_turns(n: int, dice: random.Random) -> Body:
    return chat(RULES, user(question(dice))) | {"model": ["gpt-4.1", "gpt-4.1-mini"][n % 2]}


def chat_name_of_the_user(n: int, dice: random.Random) -> Body:
    name = ["Priya a", "Grace A. Hopper", "Fatima", "Dan"][n % 4]
    about = f"The user is {name} and a customer since 2019. "
    parts = [text(about), text(RULES)]
    return {"model": "gpt-4.1", "messages": [{"role": "system", "content": parts},
                                             user(question(dice))]}  # fmt: skip


def chat_documents(n: int, dice: random.Random) -> Body:
    order = dice.sample(range(5), 5)
    written = "\n".join(
        f'<document index="{place}">\n{DOCUMENTS[i]}\n</document>'
        for place, i in enumerate(order, 1)
    )
    content = f"<documents>\n{written}\n</documents>\n\n{question(dice)}"
    return chat("You are a clerk.", user(content))


def chat_documents_by_number(n: int, dice: random.Random) -> Body:
    chosen = dice.sample(range(5), 4)
    written = "\n\n".join(f"[{place}] {DOCUMENTS[i]}" for place, i in enumerate(chosen, 1))
    return chat("You are a clerk.", user(f"Sources:\n\n{written}\n\nQuestion: {question(dice)}"))


def chat_documents_under_headings(n: int, dice: random.Random) -> Body:
    parts = [f"## Book {i}\n\n{DOCUMENTS[i]}\n\n{DOCUMENTS[i][::-1]}"
             for i in dice.sample(range(5), 4)]  # fmt: skip
    return chat("You are a clerk.", user("\n\n".join([*parts, question(dice)])))


def chat_documents_in_json(n: int, dice: random.Random) -> Body:
    found = [{"id": i, "text": DOCUMENTS[i]} for i in dice.sample(range(5), 5)]
    return chat("You are a clerk.", user(f"Found: {json.dumps(found)}\n\n{question(dice)}"))


def chat_model_by_conversation_turns(n: int, dice: random.Random) -> Body:
    return clean_chat(n, dice) | {"model": ["gpt-4.1", "gpt-4.1-2025-04-14"][n % 2]}


def no_mark_at_the_end(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    return anthropic(cached_system(), tool_turns(talk, turns))


def chat_window(n: int, dice: random.Random) -> Body:
    talk = dice_of("endless")
    turns = [user(sentences(talk, 3)) if i % 2 == 0 else assistant(sentences(talk, 5))
             for i in range(2 * n + 1)]  # fmt: skip
    return chat("You are a clerk.", *turns[-11:])


def chat_pinned_window(n: int, dice: random.Random) -> Body:
    """The first message, which has the task, stays."""
    body = chat_window(n, dice)
    head, *history = body["messages"]
    return {**body, "messages": [head, user(sentences(dice_of("task"), 20)), *history]}


def chat_schema_of_the_answer(n: int, dice: random.Random) -> Body:
    names = dice.sample(WORDS[:6], 6)
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return chat(RULES, user(question(dice)), response_format=form)


def chat_request_id(n: int, dice: random.Random) -> Body:
    content = [text(f"request_id=req_{dice.getrandbits(48):012x}\n{RULES}"), text(question(dice))]
    return chat("You are a clerk.", user(content))


def completions_counter(n: int, dice: random.Random) -> Body:
    return {"model": "m", "prompt": f"Ticket #{4000 + n}\n{RULES}\nQ: {question(dice)}\nA:"}


def responses_date(n: int, dice: random.Random) -> Body:
    return respond(f"Today: 2025-03-{1 + n // 2:02}. {RULES}", question(dice))


def responses_tools(n: int, dice: random.Random) -> Body:
    tools = shuffled(response_tools(), n, dice)
    return respond(RULES, [user([{"type": "input_text", "text": question(dice)}])], tools=tools)


def responses_parts(n: int, dice: random.Random) -> Body:
    parts = [{"type": "input_text", "text": DOCUMENTS[i]} for i in dice.sample(range(5), 5)]
    parts.append({"type": "input_text", "text": question(dice)})
    return respond("You are a clerk.", [{"type": "message", "role": "user", "content": parts}])


def responses_stamped_outputs(n: int, dice: random.Random) -> Body:
    talk, turns = growing(n)
    items: list[Body] = []
    for turn in range(turns):
        output = json.dumps({"at": clock(n), "found": sentences(talk, 8)})
        items += [user(question(talk)), *looked_up(talk, turn, output)]
    return respond(RULES, items)


def gateway_nonce(n: int, dice: random.Random) -> Body:
    body = chat(f"[{dice.getrandbits(64):016x}] {RULES}", user(question(dice)))
    answer = {"choices": [{"index": 0, "message": assistant("Aye."), "finish_reason": "stop"}]}
    return {
        "request_created_at": clock(n),
        "request_body": json.dumps(body),
        "response_body": json.dumps(answer),
    }


FAULTS: dict[str, tuple[str, Callable[[int, random.Random], Body]]] = {
    "anthropic: uuid in the system text": ("id", system_with_a_uuid),
    "anthropic: time in a system block": ("timestamp", system_block_with_the_time),
    "anthropic: date in the system text": ("date", system_with_the_date),
    "anthropic: tools in changing order": ("tools_order", anthropic_tools(shuffled)),
    "anthropic: tools come and go": ("tools_list", anthropic_tools(some)),
    "anthropic: a tool tells the time": ("tools_text", anthropic_tools(timed)),
    "anthropic: keys of tools in changing order": ("json_keys", anthropic_tools(rekeyed)),
    "anthropic: mark on a block that changes": ("cache_control", mark_on_a_changing_block),
    "anthropic: mark after what changes": ("cache_control", mark_on_the_question_only),
    "anthropic: five marks": ("cache_control", too_many_marks),
    "anthropic: no mark": ("cache_control", no_mark),
    "anthropic: no mark on a shared document": ("cache_control", no_mark_on_the_document),
    "anthropic: result stamped anew": ("message_timestamp", tool_result_with_the_time),
    "anthropic: new ids of calls": ("call_ids", new_call_ids),
    "anthropic: name before a document": ("message_user", name_before_a_document),
    "anthropic: documents as blocks": ("document_order", documents_as_blocks),
    "anthropic: thinking left out": ("reasoning", thinking_left_out),
    "anthropic: tool choice by turns": ("settings", tool_choice_forced_by_turns),
    "anthropic: rolling window": ("history_window", window_with_tools),
    "chat: two models": ("model", chat_model_by_turns),
    "chat: name of the user in a part": ("user", chat_name_of_the_user),
    "chat: tagged documents": ("document_order", chat_documents),
    "chat: numbered documents": ("document_order", chat_documents_by_number),
    "chat: documents under headings": ("document_order", chat_documents_under_headings),
    "chat: documents in JSON": ("document_order", chat_documents_in_json),
    "chat: two names of a model in a conversation": ("model", chat_model_by_conversation_turns),
    "anthropic: no mark at the end of a conversation": ("cache_control", no_mark_at_the_end),
    "chat: rolling window": ("history_window", chat_window),
    "chat: rolling window after a task": ("history_window", chat_pinned_window),
    "chat: schema with keys in changing order": ("json_keys", chat_schema_of_the_answer),
    "chat: id before a text in a part": ("message_id", chat_request_id),
    "completions: counter": ("counter", completions_counter),
    "responses: date in the instructions": ("date", responses_date),
    "responses: tools in changing order": ("tools_order", responses_tools),
    "responses: parts in changing order": ("document_order", responses_parts),
    "responses: outputs stamped anew": ("message_timestamp", responses_stamped_outputs),
    "gateway: nonce in a string": ("nonce", gateway_nonce),
}
"""What is planted, by what is to be found."""

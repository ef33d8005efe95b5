"""Logs of requests that begin alike, and the same with a fault planted.

Each fault has an application of its own, with its own system prompt; ``clean_log`` has the same
applications without faults.
"""

import json
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from ostinato.lab.log.request_log import LoggedRequest
from tests.lab.log.logged_requests import parse_request

START = datetime(2025, 3, 1, 9, 0, tzinfo=UTC)
USERS = ["ann", "bob", "cleo", "dan"]
LOCALES = ["en-GB", "de-DE", "fr-FR", "sv-SE"]
WORDS = [
    "answer", "check", "order", "refund", "parcel", "driver", "window", "garden", "letter",
    "number", "market", "recipe", "river", "station", "ticket", "doctor", "engine", "planet",
    "violin", "copper", "basket", "carpet", "signal", "harbour", "meadow", "lantern", "pepper",
    "ribbon", "saddle", "timber", "velvet", "walnut", "anchor", "bottle", "candle", "dragon",
]  # fmt: skip


class Application:
    """One template: a long system prompt and short questions.

    Attributes:
        head: Its system prompt.
        random: Its dice.
    """

    def __init__(self, name: str) -> None:
        """Write an application's prompt; the same for the same name."""
        self.random = random.Random(name)
        self.head = " ".join([f"You are the {name} desk."] + [self.sentence(9) for _ in range(18)])

    def sentence(self, length: int) -> str:
        """Return words that no other application puts in this order."""
        return " ".join(self.random.choices(WORDS, k=length)).capitalize() + "."

    def tools(self) -> list[dict[str, Any]]:
        """Return six tools, always the same."""
        dice = random.Random(self.head)
        return [
            {
                "type": "function",
                "function": {
                    "name": f"{word}_{place}",
                    "description": " ".join(dice.choices(WORDS, k=12)),
                    "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
                },
            }
            for place, word in enumerate(dice.sample(WORDS, 6))
        ]

    def record(self) -> dict[str, Any]:
        """Return settings that are written into the prompt as JSON."""
        dice = random.Random(self.head)
        return {word: dice.choice(WORDS) for word in dice.sample(WORDS, 8)}

    def examples(self) -> list[dict[str, str]]:
        """Return four worked examples, question and answer by turns."""
        dice = random.Random(self.head)
        texts = [" ".join(dice.choices(WORDS, k=14)) for _ in range(8)]
        return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


Plant = Callable[[Application, int, bool], dict[str, Any]]


def chat(app: Application, system: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, *more.pop("between", [])]
    return {"messages": [*messages, {"role": "user", "content": app.sentence(7)}], **more}


def at(number: int) -> datetime:
    return START + timedelta(minutes=37 * number)


def before(write: Callable[[Application, int], str]) -> Plant:
    """A fault that is written before the system prompt."""
    return lambda app, number, faulty: chat(app, (write(app, number) if faulty else "") + app.head)


def user(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    who = number % 4
    about = f"The user is {USERS[who].title()}, locale {LOCALES[who]}. " if faulty else ""
    return chat(app, about + app.head, user=USERS[who])


def wording(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    moods = ["Be brief and kind.", "Be very short.", "Take your time, and be thorough."]
    return chat(app, f"{app.random.choice(moods) if faulty else moods[0]} {app.head}")


def white_space(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    system = app.head.replace(". ", ".\n")
    if faulty:
        system = system.replace("\n", app.random.choice(["\n", "\r\n", "  \n", "\n\n\n"]))
        system = app.random.choice(["", " ", "\n"]) + system
    return chat(app, system)


def json_keys(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    items = list(app.record().items())
    if faulty:
        app.random.shuffle(items)
    return chat(app, f"Settings: {json.dumps(dict(items))}\n{app.head}")


def tools(change: Callable[[Application, int, list[dict[str, Any]]], object]) -> Plant:
    """A fault in the list of tools, which is changed in place."""

    def plant(app: Application, number: int, faulty: bool) -> dict[str, Any]:
        offered = app.tools()
        if faulty:
            change(app, number, offered)
        return chat(app, app.head, tools=offered)

    return plant


def leave_out_some(app: Application, number: int, offered: list[dict[str, Any]]) -> None:
    offered[:] = [tool for tool in offered if app.random.random() < 0.7] or offered[:1]


def tell_the_time(app: Application, number: int, offered: list[dict[str, Any]]) -> None:
    offered[0]["function"]["description"] += f" It is {at(number):%H:%M:%S}."


def few_shot_order(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    examples = app.examples()
    pairs = [examples[i : i + 2] for i in range(0, 8, 2)]
    if faulty:
        app.random.shuffle(pairs)
    return chat(app, app.head, between=[message for pair in pairs for message in pair])


def reasoning(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    """Conversations of four turns; the answers are logged in full."""
    dice = random.Random(f"{app.head}{number // 4}")
    messages = [{"role": "system", "content": app.head}]
    for turn in range(number % 4 + 1):
        messages.append({"role": "user", "content": " ".join(dice.choices(WORDS, k=20))})
        thought = f"<think>{' '.join(dice.choices(WORDS, k=30))}</think>\n"
        said = " ".join(dice.choices(WORDS, k=30))
        if turn < number % 4:
            messages.append({"role": "assistant", "content": said if faulty else thought + said})
    return {"messages": messages, "answer": thought + said}


def seam(app: Application, number: int, faulty: bool) -> dict[str, Any]:
    """Raw prompts, grown turn by turn; a space before the answer merges with its first word."""
    dice = random.Random(f"{app.head}{number // 4}")
    blank = " " if faulty else ""
    text = app.head
    for turn in range(number % 4 + 1):
        text += f"\nQuestion: {' '.join(dice.choices(WORDS, k=8))}\nReply:{blank}"
        answer = ("" if faulty else " ") + " ".join(dice.choices(WORDS, k=30))
        if turn < number % 4:
            text += answer
    return {"prompt": text, "answer": answer}


FAULTS: dict[str, Plant] = {
    "timestamp": before(lambda app, n: f"It is {at(n):%Y-%m-%d %H:%M:%S}. "),
    "date": before(lambda app, n: f"Today is {START + timedelta(days=n // 5):%d %B %Y}. "),
    "id": before(lambda app, n: f"Session {uuid.UUID(int=app.random.getrandbits(128))}. "),
    "counter": before(lambda app, n: f"This is request #{1000 + n}. "),
    "nonce": before(lambda app, n: f"[{app.random.getrandbits(64):016x}] "),
    "user": user,
    "wording": wording,
    "white_space": white_space,
    "json_keys": json_keys,
    "tools_order": tools(lambda app, n, offered: app.random.shuffle(offered)),
    "tools_list": tools(leave_out_some),
    "tools_text": tools(tell_the_time),
    "few_shot_order": few_shot_order,
    "reasoning": reasoning,
    "seam": seam,
}


def log(faulty: set[str], num_requests: int = 16) -> list[LoggedRequest]:
    """Return a log of every application, in turns, with some faults planted."""
    apps = {name: Application(name) for name in FAULTS}
    lines = []
    for number in range(num_requests):
        for place, (name, plant) in enumerate(FAULTS.items()):
            body = plant(apps[name], number, name in faulty)
            moment = at(number) + timedelta(seconds=place)
            record = {"timestamp": moment.isoformat(), "answer": body.pop("answer", "")}
            lines.append(json.dumps(record | {"body": body}))
    return [parse_request(line, place) for place, line in enumerate(lines, 1)]


def clean_log() -> list[LoggedRequest]:
    """Return the log without faults."""
    return log(set())

"""The protocol of runner and worker: a JSON object per line, a question in, an answer out.

::

    {"do": "load", "model": ..., "settings": {...}}   -> {"version": ..., "settings": {...}}
    {"do": "serve", "talks": [[[ids, num_outputs], ...], ...]}   -> a Served, see there
    {"do": "manage", "scene": ..., "size": {...}}     -> {"seconds": ...}
    {"do": "embed", "prompts": [ids, ...]}            -> {"seconds": ...}
    {"do": "search", "prompt": ids, "width": ..., "num_outputs": ...}   -> {"seconds": ...}

Whatever raises becomes ``{"error": text}``; ``{"unsupported": text}`` says that an engine has no
such thing. This file is read by the Python of every engine, so it needs the standard library alone.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

Talk = list[tuple[list[int], int]]
"""A conversation: for each turn its new tokens, and how many the answer has. The prompt of a
turn is all that came before, answers included, and its new tokens. Over HTTP, a turn whose answer
has no tokens is the system prompt."""

now = time.perf_counter


class Unsupported(Exception):
    """An engine has no such thing; the text says what."""


@dataclass
class Served:
    """What became of the requests of some conversations, in the order in which they began.

    Attributes:
        seconds: From the moment the first was given to the engine until the last had ended.
        first: When each had its first token, in seconds from the same moment.
        last: When each had its last token.
        tokens: How many each got.
        cached: How many prompt tokens of each were cached; None where the engine does not say.
        outputs: The tokens themselves.
    """

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: list[int] | None = None
    outputs: list[list[int]] = field(default_factory=list)


def common(rows: list[list[int]]) -> int:
    """Return with how many tokens all rows begin."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


class SteppedEngine(Protocol):
    """What an engine has to offer so that ``serve_by_steps`` can drive it."""

    def add(self, prompt: list[int], num_outputs: int) -> Hashable:
        """Take a request in; returns its name."""

    def poll(self) -> Iterable[tuple[Hashable, list[int]]]:
        """Go on a little; yields names and their new tokens."""


def serve_by_steps(engine: SteppedEngine, talks: list[Talk]) -> Served:
    """Drive an engine through conversations; a turn begins when the one before has ended."""
    served, place, at_turn = Served(), {}, [0] * len(talks)
    histories: list[list[int]] = [[] for _ in talks]
    start = now()

    def begin(number: int) -> None:
        tokens, num_outputs = talks[number][at_turn[number]]
        histories[number] = histories[number] + tokens
        place[engine.add(histories[number], num_outputs)] = (number, len(served.outputs))
        served.first.append(0.0)
        served.last.append(0.0)
        served.outputs.append([])

    for number in range(len(talks)):
        begin(number)
    while place:
        for name, tokens in engine.poll():
            if name not in place or not tokens:
                continue
            number, request = place[name]
            served.last[request] = now() - start
            served.first[request] = served.first[request] or served.last[request]
            served.outputs[request].extend(tokens)
            if len(served.outputs[request]) >= talks[number][at_turn[number]][1]:
                del place[name]
                histories[number] = histories[number] + served.outputs[request]
                at_turn[number] += 1
                if at_turn[number] < len(talks[number]):
                    begin(number)
    served.seconds = now() - start
    served.tokens = [len(output) for output in served.outputs]
    return served


class Worker(ABC):
    """An engine at the end of a pipe. Workers override what they can do."""

    @abstractmethod
    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Get ready; returns the version, and the settings that were taken."""

    def serve(self, talks: list[Talk]) -> Served:
        """Serve conversations at once, and say when their tokens came."""
        raise Unsupported("serves no prompts")

    def manage(self, scene: str, size: dict[str, int]) -> float:
        """Take a cache manager through a scene; returns seconds of CPU time."""
        raise Unsupported("has no cache manager that could be driven alone")

    def embed(self, prompts: list[list[int]]) -> float:
        """Pool each prompt's last token, as embeddings and scores do; returns seconds."""
        raise Unsupported("pools nothing")

    def search(self, prompt: list[int], width: int, num_outputs: int) -> float:
        """Search beams behind a prompt; returns seconds."""
        raise Unsupported("searches no beams")


def answer_questions(worker: Worker) -> None:
    """Answer until the runner closes the pipe; what engines print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Stopping the runner stops its workers, also those that are asleep.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for line in sys.stdin:
        question = json.loads(line)
        _send(answers, _answer(worker, question))


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, also while it is asleep."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _answer(worker: Worker, question: dict[str, Any]) -> dict[str, Any]:
    what = question.pop("do")
    try:
        if what == "load":
            return worker.load(**question)
        if what == "serve":
            return asdict(worker.serve(**question))
        timed: dict[str, Callable[..., float]] = {
            "manage": worker.manage, "embed": worker.embed, "search": worker.search,
        }  # fmt: skip
        return {"seconds": timed[what](**question)}
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    except Exception as error:  # the runner reports it, and the others go on
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()

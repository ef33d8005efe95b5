"""Hits and times of a coding agent's session, beside an append-only client of the same server.

::

    python -m benchmarks.peers.checkpoint FOLDER --smollm2   # once
    python -m benchmarks.agent_session FOLDER                # 20 turns
    python -m benchmarks.agent_session FOLDER --without ledger --without rebase

Both clients hold the same conversation by turns: a question, tool calls, a text, and once more. The
agent sends messages: without reasoning, and with arguments spelled anew. The other client sends
token ids: its last prompt, what the model wrote, and what is new. The chat template drops the
reasoning of a loop at the next question. Answers are dictated, and computed like any other.

A hit is a share of what a client that only appends hits with the agent's prompts: the last prompt
and the last answer, without reasoning that the template has dropped since.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.scripted_model import TEMPLATE, ScriptedLLM, ToolLoop, Turn
from tests.support.servers import events_of, serving

QUESTION = "Go through the steps"
PAGES = Path(__file__).parents[1] / "docs"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_lines",
        "description": "Read some lines of a page.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "last": {"type": "integer"}},
            "required": ["first", "last"],
        },
    },
}


class LongThoughts(ToolLoop):
    """A script whose answers begin with a paragraph of reasoning."""

    def __call__(self, prompt: str) -> str:
        """Return the answer."""
        thought = "Before the next call: what is known so far, and what is it good for? " * 3
        return super().__call__(prompt).replace("<think>\n", f"<think>\n{thought}", 1)


@dataclass(frozen=True)
class Figures:
    """One turn of both clients.

    Attributes:
        kind: What it begins with.
        hit: Share of what an append-only client hits with the agent's prompts.
        agent_s: Seconds to the agent's first token.
        append_s: Seconds to the append-only client's.
        turn: The agent's request.
    """

    kind: str
    hit: float
    agent_s: float
    append_s: float
    turn: Turn


@contextmanager
def served(checkpoint: Path, num_calls: int, without: Sequence[str]) -> Iterator[Any]:
    """Serve a checkpoint with a template that drops reasoning; yields a client and the engine."""
    loop = LongThoughts(
        QUESTION, "read_lines", lambda step: {"first": 9 * step, "last": 9 * step + 8}, num_calls
    )
    with TemporaryDirectory() as folder:
        for path in checkpoint.iterdir():
            if path.suffix != ".gguf" and not path.name.endswith(".jinja"):
                Path(folder, path.name).symlink_to(path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.chat_template = TEMPLATE
        Path(folder, "tokenizer_config.json").unlink()
        tokenizer.save_pretrained(Path(folder, "tokenizer"))
        for path in Path(folder, "tokenizer").iterdir():
            Path(folder, path.name).unlink(missing_ok=True)
            path.rename(Path(folder, path.name))
        settings: dict[str, Any] = {"ledger_bytes": 0} if "ledger" in without else {}
        settings["idle_rebase"] = "off" if "rebase" in without else "auto"
        llm = ScriptedLLM(folder, loop, **settings)
        state = ServerState(llm, ServerConfig(model_names=("local",), reasoning_parser="qwen3"))
        with serving(state) as url, httpx.Client(base_url=url, timeout=600) as http:
            yield http, llm
        llm.shutdown()


def send(http: httpx.Client, path: str, **body: Any) -> tuple[float, list[dict[str, Any]]]:
    """Stream a request; returns the seconds to its first event, and its events."""
    begun_s, first_s, events = time.perf_counter(), 0.0, []
    whole = {"model": "local", "max_tokens": 400, "temperature": 0, "stream": True, **body}
    with http.stream("POST", path, json=whole) as response:
        for event in events_of(response):
            first_s = first_s or time.perf_counter() - begun_s
            if event != "[DONE]":
                events.append(json.loads(event))
    return first_s, events


class Agent:
    """Sends messages, as agents do that keep text and calls alone."""

    def __init__(self, http: httpx.Client, num_system: int) -> None:
        """Begin a conversation whose instructions have some characters."""
        text = "".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
        self._http, self._lines = http, text[num_system:].splitlines()
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": text[:num_system]}]

    def ask(self) -> float:
        """Send the conversation, and add the answer; returns the seconds to its first token."""
        first_s, events = send(
            self._http, "/v1/chat/completions", messages=self.messages, tools=[TOOL],
            cache_salt="agent",
        )  # fmt: skip
        deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
        answer: dict[str, Any] = {"role": "assistant"}
        answer["content"] = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        if calls:
            written = "".join(call["function"].get("arguments") or "" for call in calls)
            respelled = json.dumps(json.loads(written), sort_keys=True, indent=1)
            function = {"name": calls[0]["function"]["name"], "arguments": respelled}
            answer["tool_calls"] = [
                {"id": calls[0]["id"], "type": "function", "function": function}
            ]
        self.messages.append(answer)
        return first_s

    def go_on(self) -> str:
        """Add a result, or a question behind a text; returns what it was."""
        calls = self.messages[-1].get("tool_calls")
        if not calls:
            question = {"role": "user", "content": f"{QUESTION}, from the top."}
            self.messages.append(question)
            return "question"
        span = json.loads(calls[0]["function"]["arguments"])
        text = "\n".join(self._lines[span["first"] : span["last"]])
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}
        self.messages.append(result)
        return "result"


def play(http: httpx.Client, llm: ScriptedLLM, options: argparse.Namespace) -> list[Figures]:
    """Hold the conversation by both clients, turn by turn."""
    agent, rows = Agent(http, options.system), list[Figures]()
    history: list[int] = []
    before: Turn | None = None
    for _ in range(options.turns):
        kind = agent.go_on()
        time.sleep(options.think if before and kind == "question" else options.tool)
        agent_s = agent.ask()
        turn = llm.turns[-1]
        new = turn.prompt if before is None else turn.prompt[turn.num_before + 1 :]
        append_s, _ = send(http, "/v1/completions", prompt=[*history, *new], cache_salt="append")
        history = [*llm.turns[-1].prompt, *llm.turns[-1].answer]
        usable = 0 if before is None else min(turn.num_before, before.num_reusable)
        share = min(1.0, turn.num_cached / usable) if usable else 1.0
        rows.append(Figures("first" if before is None else kind, share, agent_s, append_s, turn))
        before = turn
    return rows


def show(rows: Sequence[Figures], llm: ScriptedLLM) -> None:
    """Print one row per kind of turn, and the whole session."""
    columns = ["Turns", "Number", "Prompt tokens", "Hit at least", "First token, agent (ms)",
               "append-only (ms)", "Ratio"]  # fmt: skip
    table = Table(*columns)
    for kind, name in (
        ("first", "first, cold"),
        ("result", "tool result"),
        ("question", "question"),
    ):
        some = [row for row in rows if row.kind == kind]
        _add(table, name, some)
    _add(table, "all but the first", rows[1:])
    Console().print(table)
    usable = [min(row.turn.num_before, before.turn.num_reusable) for before, row in pairwise(rows)]
    hits = sum(min(row.turn.num_cached, n) for row, n in zip(rows[1:], usable, strict=True))
    print(f"whole session: {hits / sum(usable):.2%} of an append-only client's hits")
    counts = llm.engine.rebase.counts
    print(f"prepared while idle: {counts.computed} tokens, {counts.used} used")


def _add(table: Table, name: str, rows: Sequence[Figures]) -> None:
    if not rows:
        return
    agent, append = (median(getattr(r, n) for r in rows) for n in ("agent_s", "append_s"))
    ratio = median(row.agent_s / row.append_s for row in rows)
    sizes = [len(row.turn.prompt) for row in rows]
    table.add_row(
        name, str(len(rows)), f"{min(sizes):,}–{max(sizes):,}",
        f"{min(row.hit for row in rows):.2%}", f"{1e3 * agent:.0f}", f"{1e3 * append:.0f}",
        f"{ratio:.2f}",
    )  # fmt: skip


def main() -> None:
    """Play the session, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--calls", type=int, default=9, help="of each question")
    parser.add_argument("--system", type=int, default=12_000, help="characters of instructions")
    parser.add_argument("--tool", type=float, default=0.05, help="seconds until a result")
    parser.add_argument("--think", type=float, default=5.0, help="seconds until a question")
    parser.add_argument("--without", action="append", default=[], choices=("ledger", "rebase"))
    options = parser.parse_args()
    with served(options.checkpoint, options.calls, options.without) as (http, llm):
        show(play(http, llm, options), llm)


if __name__ == "__main__":
    main()

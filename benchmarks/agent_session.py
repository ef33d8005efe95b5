"""Hits and first tokens of a coding agent's session, beside an append-only client of the server.

::

    python -m benchmarks.peers.checkpoint FOLDER --smollm2   # once
    python -m benchmarks.agent_session FOLDER                # 20 turns
    python -m benchmarks.agent_session FOLDER --without ledger --without rebase

Both hold the same conversation by turns: a question, nine tool calls, a text, and once more. The
agent sends messages, without reasoning. The other client sends token ids: its last prompt, what the
model wrote, and what is new. The chat template drops the reasoning of a loop at the next question.
Answers are dictated, and computed like any other.

A hit is a share of what a client that only appends hits with the agent's prompts: the last prompt
and the last answer, without reasoning that the template has dropped since.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.command_line import parser_of
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.scripted_model import TEMPLATE, ScriptedLLM, ToolLoop, Turn
from tests.support.servers import events_of, serving

QUESTION, NUM_CALLS, NUM_TURNS = "Go through the steps", 9, 20
SYSTEM_CHARS, PART_CHARS, TOOL_S = 5_000, 400, 0.05
THOUGHT = "Before the next call: what is known so far, and what is it good for? "
TOOL: dict[str, Any] = {"name": "read_part", "description": "Read a part of a page."}
TOOL["parameters"] = {"type": "object", "properties": {"part": {"type": "integer"}}}


class Row(NamedTuple):
    """One turn of both clients: its kind, share of hits, seconds to first tokens, tokens."""

    kind: str
    hits: int
    possible: int
    agent_s: float
    append_s: float
    turn: Turn


@contextmanager
def served(checkpoint: Path, without: Sequence[str]) -> Iterator[tuple[httpx.Client, ScriptedLLM]]:
    """Serve a checkpoint with a template that drops reasoning."""
    script = ToolLoop(QUESTION, TOOL["name"], lambda step: {"part": step}, NUM_CALLS)
    settings: dict[str, Any] = {"ledger_bytes": 0} if "ledger" in without else {}
    settings["idle_rebase"] = "off" if "rebase" in without else "auto"
    with TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        for path in (checkpoint / "config.json", *checkpoint.glob("*.safetensors")):
            Path(folder, path.name).symlink_to(path.resolve())
        llm = ScriptedLLM(
            folder, lambda text: script(text).replace("Step", f"{THOUGHT}Step", 1), **settings
        )
        state = ServerState(llm, ServerConfig(model_names=("local",), reasoning_parser="qwen3"))
        with serving(state) as url, httpx.Client(base_url=url, timeout=600) as http:
            yield http, llm
        llm.shutdown()


def send(http: httpx.Client, path: str, **body: Any) -> tuple[float, list[dict[str, Any]]]:
    """Stream a request; returns the seconds to its first event, and its events."""
    begun_s, first_s, events = time.perf_counter(), 0.0, []
    whole = {"model": "local", "max_tokens": 400, "temperature": 0, "stream": True, **body}
    with http.stream("POST", path, json=whole) as response:
        if response.is_error:
            raise RuntimeError(response.read().decode())
        for event in events_of(response):
            first_s = first_s or time.perf_counter() - begun_s
            events += [] if event == "[DONE]" else [json.loads(event)]
    return first_s, events


def answer_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that an agent sends back, which keeps no reasoning."""
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    content = "".join(delta.get("content") or "" for delta in deltas)
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        function = {"name": TOOL["name"], "arguments": arguments}
        answer["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return answer


def play(http: httpx.Client, llm: ScriptedLLM, think_s: float) -> Iterator[Row]:
    """Hold the conversation by both clients, turn by turn."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "".join(page.read_text() for page in pages)
    parts = (text[n : n + PART_CHARS] for n in range(SYSTEM_CHARS, len(text), PART_CHARS))
    messages: list[dict[str, Any]] = [{"role": "system", "content": text[:SYSTEM_CHARS]}]
    before, history = Turn([], [], 0), list[int]()
    tools = [{"type": "function", "function": TOOL}]
    for number in range(NUM_TURNS):
        calls = messages[-1].get("tool_calls")
        time.sleep(TOOL_S if calls or not number else think_s)
        new: dict[str, Any] = {"role": "user", "content": f"{QUESTION}, from the top."}
        if calls:
            new = {"role": "tool", "tool_call_id": calls[0]["id"], "content": next(parts)}
        messages.append(new)
        agent_s, events = send(
            http, "/v1/chat/completions", messages=messages, tools=tools, cache_salt="agent"
        )
        messages.append(answer_of(events))
        turn = llm.turns[-1]
        added = turn.prompt[turn.num_before + 1 if number else 0 :]
        append_s, _ = send(http, "/v1/completions", prompt=history + added, cache_salt="append")
        history = [*llm.turns[-1].prompt, *llm.turns[-1].answer]
        possible = min(turn.num_before, before.num_reusable) if number else 0
        kind = "tool result" if calls else "question" if number else "first, cold"
        yield Row(kind, min(turn.num_cached, possible), possible, agent_s, append_s, turn)
        before = turn


def main() -> None:
    """Play the session; print a row for each kind of turn, and for all but the first."""
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--without", action="append", default=[], choices=("ledger", "rebase"))
    parser.add_argument("--think", type=float, default=15.0, help="seconds until a question")
    options = parser.parse_args()
    table = Table("Turns", "", "Prompt tokens", "Hits", "Agent, ms", "Append-only, ms", "Ratio")
    with served(options.checkpoint, options.without) as (http, llm):
        rows = list[Row]()
        for row in play(http, llm, options.think):
            rows.append(row)
            print(len(rows), row.kind, row.hits, row.possible, row.agent_s, row.append_s)
        print(f"prepared while idle: {llm.engine.rebase.counts}")
    for kind in ("first, cold", "tool result", "question", "all but the first"):
        some = [row for row in rows if row.kind == kind] or rows[1:]
        possible, sizes = sum(row.possible for row in some), [len(row.turn.prompt) for row in some]
        hits = f"{sum(row.hits for row in some) / possible:.2%}" if possible else ""
        times = (median(1e3 * getattr(row, n) for row in some) for n in ("agent_s", "append_s"))
        ratio = median(row.agent_s / row.append_s for row in some)
        sizes_shown, times_shown = f"{min(sizes):,}–{max(sizes):,}", (f"{ms:.0f}" for ms in times)
        table.add_row(kind, str(len(some)), sizes_shown, hits, *times_shown, f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

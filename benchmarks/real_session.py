"""An agent's session with a model of real size: start, long prompt, turns, restart in the middle.

::

    python -m benchmarks.peers.checkpoint FOLDER --shape qwen3-4b --gguf Q4_0   # once
    python -m benchmarks.real_session FOLDER/qwen3-4b-Q4_0.gguf --peers PEERS
    python -m benchmarks.real_session FILE --columns ours --prompt 2000 --turns 4

``ours`` is ``ostinato serve`` with a disk tier, ``llamacpp`` is ``llama-server`` with one slot that
it saves before the restart and restores after it; both serve the same file with their defaults.
The prompt of instructions and tools comes first; each turn appends new tokens, as a call and the
result of a tool would, and answers a few. A start ends with the first answer, of one token to a
prompt of three. Memory is what the kernel counts for the server: its own is anonymous, the rest is
mapped from files.
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.command_line import markdown_table, parser_of, write_json
from benchmarks.peers.workers.http_client import free_port, wait_until_ready
from benchmarks.start import memory_of

VOCABULARY = range(100, 30_000)
_SECONDS = 3_600.0
_GIB = 2**30


@dataclass(frozen=True)
class Scene:
    """Lengths in tokens."""

    prompt: int
    turns: int
    turn: int
    answer: int

    @property
    def context(self) -> int:
        """Tokens of the whole session, and room."""
        return self.prompt + self.turns * self.turn + self.answer + 512


@dataclass
class Figures:
    """What a column measured: seconds, tokens a second after the first, and bytes."""

    starts: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    after_restart: float = 0.0
    own: int = 0
    total: int = 0


class Ours:
    """``ostinato serve`` with a disk tier."""

    path = "/v1/completions"

    def __init__(self, model: Path, folder: Path, scene: Scene) -> None:
        """Keep prefixes in ``folder``."""
        self._model, self._folder, self._scene = model, folder, scene

    def command(self, port: int) -> list[str]:
        """Return what starts the server."""
        options = ["--name", "model", "--kv-disk", str(self._folder)]
        length = ["--max-model-len", str(self._scene.context), "--port", str(port)]
        return [sys.executable, "-m", "ostinato.cli", "serve", str(self._model), *options, *length]

    def body(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Return a request that streams greedily."""
        own = {"model": "model", "max_tokens": num_tokens, "ignore_eos": True}
        return {**own, "prompt": prompt, "temperature": 0, "stream": True}

    def leave(self, http: httpx.Client) -> None:
        """The tier writes by itself."""

    def resume(self, http: httpx.Client) -> None:
        """The tier reads by itself."""


class LlamaCpp:
    """``llama-server``."""

    path = "/completion"

    def __init__(self, program: Path, model: Path, folder: Path, scene: Scene) -> None:
        """Save slots in ``folder``."""
        self._program, self._model, self._folder, self._scene = program, model, folder, scene

    def command(self, port: int) -> list[str]:
        """Return what starts the server."""
        options = ["--model", str(self._model), "--ctx-size", str(self._scene.context)]
        slots = ["--parallel", "1", "--slot-save-path", f"{self._folder}/", "--port", str(port)]
        return [str(self._program), *options, *slots, "--no-webui", "--log-disable"]

    def body(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Return a request that streams greedily."""
        own = {"n_predict": num_tokens, "cache_prompt": True, "ignore_eos": True}
        return {**own, "prompt": prompt, "temperature": 0, "stream": True}

    def leave(self, http: httpx.Client) -> None:
        """Save the slot."""
        self._slot(http, "save")

    def resume(self, http: httpx.Client) -> None:
        """Restore the slot."""
        self._slot(http, "restore")

    def _slot(self, http: httpx.Client, action: str) -> None:
        answer = http.post(f"/slots/0?action={action}", json={"filename": "session"})
        answer.raise_for_status()


@contextmanager
def serving(command: list[str], port: int, figures: Figures) -> Iterator[httpx.Client]:
    """Run a server until the block ends, and note its largest memory."""
    with subprocess.Popen(command, stdout=sys.stderr) as server:
        watch = threading.Thread(target=_watch, args=(server, figures), daemon=True)
        watch.start()
        try:
            url, fresh = f"http://127.0.0.1:{port}", httpx.Limits(max_keepalive_connections=0)
            with httpx.Client(base_url=url, timeout=_SECONDS, limits=fresh) as http:
                wait_until_ready(f"{url}/health", server)
                yield http
        finally:
            server.terminate()
            server.wait()
            watch.join()


def _watch(server: "subprocess.Popen[bytes]", figures: Figures) -> None:
    while server.poll() is None:
        now = memory_of(server.pid)
        figures.own = max(figures.own, now.get("RssAnon", 0))
        figures.total = max(figures.total, now.get("VmHWM", 0))
        time.sleep(0.05)


def first_token(http: httpx.Client, engine: Ours | LlamaCpp, prompt: list[int], num: int) -> Any:
    """Return the seconds to the first token of a streamed answer, and to its end."""
    begin, first = time.perf_counter(), None
    with http.stream("POST", engine.path, json=engine.body(prompt, num)) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: {") and first is None:
                first = time.perf_counter() - begin
    assert first is not None, "an answer has tokens"
    return first, time.perf_counter() - begin


def measure(engine: Ours | LlamaCpp, scene: Scene, say: Callable[[str], None]) -> Figures:
    """Hold a session with a restart in its middle."""
    figures, rng = Figures(), random.Random(0)
    text = rng.choices(VOCABULARY, k=scene.prompt)
    for turns in (range(scene.turns // 2), range(scene.turns // 2, scene.turns)):
        begin, port = time.perf_counter(), free_port()
        with serving(engine.command(port), port, figures) as http:
            if turns.start:
                engine.resume(http)
            else:
                first_token(http, engine, [5, 6, 7], 1)
            figures.starts.append(time.perf_counter() - begin)
            say(f"start {figures.starts[-1]:.1f} s")
            for turn in turns:
                first, whole = first_token(http, engine, text, scene.answer)
                figures.first_tokens.append(first)
                figures.turns.append(whole)
                figures.rates.append((scene.answer - 1) / (whole - first))
                say(f"turn {turn}: {len(text):,} tokens, first {first:.2f} s, all {whole:.2f} s")
                text += rng.choices(VOCABULARY, k=scene.turn)
            engine.leave(http)
    figures.after_restart = figures.first_tokens[scene.turns // 2]
    return figures


def table(columns: dict[str, Figures]) -> str:
    """Return a table of all columns."""
    rows: dict[str, Callable[[Figures], str]] = {
        "start to first token, s": lambda f: f"{f.starts[0]:.1f}",
        "start again, s": lambda f: f"{f.starts[1]:.1f}",
        "first token of the long prompt, s": lambda f: f"{f.first_tokens[0]:.1f}",
        "first token of a turn, median, s": lambda f: f"{median(f.first_tokens[1:]):.2f}",
        "first token of the turn after the restart, s": lambda f: f"{f.after_restart:.2f}",
        "answers after that, median, tokens/s": lambda f: f"{median(f.rates):.1f}",
        "all turns, s": lambda f: f"{sum(f.turns):.1f}",
        "turns but for the long prompt, s": lambda f: f"{sum(f.turns[1:]):.1f}",
        "peak memory, its own, GiB": lambda f: f"{f.own / _GIB:.2f}",
        "peak memory, files included, GiB": lambda f: f"{f.total / _GIB:.2f}",
    }
    lines = ([name, *map(value, columns.values())] for name, value in rows.items())
    return markdown_table(["", *columns], lines)


def main() -> None:
    """Read the command line and measure one column after the other."""
    parser = parser_of(__doc__, has_json=True)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--peers", type=Path, help="where benchmarks/peers/install.sh put them")
    parser.add_argument("--columns", nargs="+", default=["ours", "llamacpp"])
    parser.add_argument("--prompt", type=int, default=13_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn", type=int, default=300, help="new tokens of a turn")
    parser.add_argument("--answer", type=int, default=24)
    options = parser.parse_args()
    scene = Scene(options.prompt, options.turns, options.turn, options.answer)
    columns: dict[str, Figures] = {}
    for name in options.columns:
        with tempfile.TemporaryDirectory(dir=options.model.parent) as folder:
            engine: Ours | LlamaCpp = Ours(options.model, Path(folder), scene)
            if name == "llamacpp":
                program = options.peers / "llamacpp" / "bin" / "llama-server"
                engine = LlamaCpp(program, options.model, Path(folder), scene)
            columns[name] = measure(engine, scene, partial(print, f"{name}:", flush=True))
    write_json(options.json, {name: vars(figures) for name, figures in columns.items()})
    print(f"\n{os.cpu_count()} cores; {scene}\n\n{table(columns)}")


if __name__ == "__main__":
    main()

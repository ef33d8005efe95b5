"""Cost of streaming: ``LLM.generate``, ``AsyncLLM`` and HTTP side by side.

::

    python -m benchmarks.peers.checkpoint FOLDER --smollm2
    python -m benchmarks.streaming FOLDER --streams 1,16

Each way runs in a process of its own, and the ways take turns on the same prompts: so many streams
at once behind one cached prefix, greedy, with text. HTTP is OpenAI's client for Python in front of
``ostinato serve``, and both are in its figures; once more with ``stream_interval`` tokens in a
chunk. A rate counts from the moment when every stream has a first token. "Behind" compares it with
``LLM.generate`` of the same round; the median of all rounds counts. CPU time, prompts included, is
that of all processes of a way for each token: what can be compared on a busy machine.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of
from benchmarks.peers import engines
from benchmarks.peers.checkpoint import SMOLLM2, read_text
from benchmarks.peers.processes import WorkerProcess
from benchmarks.peers.protocol import Served, Talk
from benchmarks.peers.samples import Draw, batch_of, decode_rate

INTERVAL = 4
BY_INTERVAL = f"HTTP, stream_interval={INTERVAL}"
WAYS = {
    "LLM.generate": engines.OURS,
    "AsyncLLM": engines.OURS_STREAMED,
    "HTTP": engines.SERVERS[0],
    BY_INTERVAL: replace(
        engines.SERVERS[0], settings={**engines.SERVERS[0].settings, "stream_interval": INTERVAL}
    ),
}
GOALS = {"AsyncLLM": 0.05, "HTTP": 0.10, BY_INTERVAL: 0.10}
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sample:
    """One round of one way: tokens per second, and CPU milliseconds for each token."""

    rate: float
    cpu_ms: float


def main() -> None:
    """Measure and print."""
    options = _arguments()
    table = Table("streams", "", "tokens/s", "behind", "goal", "CPU ms a token")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {way: stack.enter_context(_started(way, options, logs)) for way in WAYS}
        text = read_text(options.checkpoint)
        for streams in map(int, options.streams.split(",")):
            draw = Draw(SMOLLM2.vocab_size, "streaming", streams, text=text)
            for row in _rows(_measured(workers, draw, streams, options)):
                table.add_row(str(streams), *row)
    Console(width=90).print(table)


def _measured(
    workers: dict[str, WorkerProcess], draw: Draw, streams: int, options: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Take the ways by turns; the first round only warms up, and computes the prefix."""
    prefix = draw(options.prefix)
    samples: dict[str, list[Sample]] = {way: [] for way in workers}
    for number in range(options.rounds + 1):
        talks = batch_of([prefix + draw(options.own) for _ in range(streams)], options.tokens)
        ways = list(workers)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            sample = _sample(workers[way], talks)
            if number:
                samples[way].append(sample)
    return samples


def _sample(worker: WorkerProcess, talks: list[Talk]) -> Sample:
    before = worker.cpu_seconds()
    answer = worker.ask({"do": "serve", "talks": talks}, TIMEOUT_S)
    spent = worker.cpu_seconds() - before
    served = Served(**{name: answer[name] for name in Served.__dataclass_fields__})
    return Sample(decode_rate(served), spent * 1e3 / sum(served.tokens))


def _rows(samples: dict[str, list[Sample]]) -> list[list[str]]:
    base, results = samples["LLM.generate"], []
    for way, taken in samples.items():
        behind = median(1 - own.rate / first.rate for own, first in zip(taken, base, strict=True))
        goal = f"{GOALS[way]:.0%}" if way in GOALS else ""
        results.append(
            [
                way,
                f"{median(sample.rate for sample in taken):.1f}",
                f"{behind:+.1%}" if goal else "",
                goal,
                f"{median(sample.cpu_ms for sample in taken):.2f}",
            ]
        )
    return results


def _started(way: str, options: argparse.Namespace, logs: Path) -> WorkerProcess:
    """Start what serves in one way, and load it."""
    engine: engines.Engine = WAYS[way]
    python, server = Path(sys.executable), dict[str, Any]()
    environment = engines.environment_of(engine, python, options.threads)
    if engine.kind == "http":
        python, environment, server = engines.http_worker_of(engine, python, options.threads)
    worker = WorkerProcess(engine.worker, python, environment, logs / f"{way}.log")
    settings = {
        "threads": options.threads,
        "kv_tokens": 24_576,
        "max_model_len": 4_096,
        "max_num_seqs": 32,
        **engine.settings,
        **({} if engine.kind == "http" else {"detokenize": True}),
        **server,
    }
    model = str(options.checkpoint)
    worker.ask({"do": "load", "model": model, "settings": settings}, TIMEOUT_S)
    return worker


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5, threads=2)
    parser.add_argument("checkpoint", type=Path, help="a folder with a tokenizer and a template")
    parser.add_argument("--streams", default="1,16", help="how many at once")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that all share")
    parser.add_argument("--own", type=int, default=32, help="tokens that each has besides")
    return parser.parse_args()


if __name__ == "__main__":
    main()

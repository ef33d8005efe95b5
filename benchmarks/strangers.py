"""What a stranger's long prompt costs the others: streams, hits and long misses at once.

::

    python -m benchmarks.strangers FOLDER --checkpoint qwen3-0.6b     # ours, before
    python -m benchmarks.strangers FOLDER --http --columns ours vllm --peers PEERS
    python -m benchmarks.strangers FOLDER --long 13000 --seconds 120 --json FILE
    python -m benchmarks.strangers FOLDER --quick                     # seconds, to see that it runs

Four streams decode all the time. Hits arrive at random: 2,048 cached tokens, 32 new ones. A prompt
of 6,000 tokens that nothing has seen arrives every minute. First each kind runs alone.

Columns: ``ours`` has the defaults, ``before`` serves by arrival in steps of 2,048 tokens;
``vllm`` and ``llamacpp`` are servers, installed as for ``benchmarks.peers``. Each runs in a process
of its own. A second table has the predictions of the lab's simulator, with the price list that
``ours`` has learned. Over HTTP the hits are another tenant than the rest, and a third table has
what ``explain`` says of their waits.

A column takes the time to start and to serve each kind alone, and at most twice ``--seconds``: with
the shape of 0.6B on two cores, three columns take about eight minutes.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import markdown_table, parser_of, write_json
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.engines import SERVERS, http_worker_of, python_of
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.workers.http_client import COMMANDS, MODEL, free_port, running
from ostinato.core.config import SchedulerConfig
from ostinato.lab.simulate.timed_replay import TimedReplica
from ostinato.lab.traces.block_trace import BlockRequest
from ostinato.lab.traces.trace_builder import TraceBuilder
from ostinato.lab.work.cost_model import CostModel
from ostinato.settings import PrefixCacheConfig

VOCABULARY = range(100, 30_000)
BLOCK = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    "before": {"order": "fcfs", "max_step_ms": 10**6},
}
"""Settings of our columns."""

DEFAULTS: dict[str, Any] = {"order": "shortest_first", "max_step_ms": 250}
"""The engine's, which the simulator has to be told."""

Stream = Callable[[list[int], int, str], AsyncIterator[int]]
"""Serves a prompt of a kind, and yields how many tokens came at once."""


@dataclass(frozen=True)
class Scene:
    """What arrives; times in seconds, lengths in tokens."""

    seconds: float = 60.0
    long: int = 6_000
    long_every_s: float = 60.0
    long_at_s: float = 5.0
    hit_gap_s: float = 4.0
    num_streams: int = 4
    prefix: int = 2_048
    tail: int = 32
    answer: int = 8
    stream_prompt: int = 64
    stream_answer: int = 4_000
    num_alone: int = 5
    seed: int = 0

    def arrivals(self) -> list[tuple[float, str]]:
        """Return when what arrives, after the streams."""
        rng, now_s = random.Random(self.seed), 1.0
        results: list[tuple[float, str]] = []
        while (now_s := now_s + rng.expovariate(1 / self.hit_gap_s)) < self.seconds:
            results.append((now_s, "hit"))
        due_s = self.long_at_s
        while due_s < self.seconds:
            results.append((due_s, "long"))
            due_s += self.long_every_s
        return sorted(results)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds: all of it at once."""
        streams = self.num_streams * (self.stream_prompt + self.stream_answer)
        return streams + 3 * self.long + self.prefix + 64 * (self.tail + self.answer + BLOCK)


QUICK = {
    "seconds": 8.0, "long": 600, "long_at_s": 1.0, "hit_gap_s": 1.0, "num_streams": 2,
    "prefix": 256, "tail": 16, "stream_answer": 800, "num_alone": 2,
}  # fmt: skip
"""A scene that shows that all of it runs."""


@dataclass
class Figures:
    """What was measured, in seconds; ``alone`` is each kind's first token, alone.

    ``waits`` has what is explained of each hit: in all, own work, its tenant's, that of others.
    """

    hits: list[float] = field(default_factory=list)
    longs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    alone: dict[str, float] = field(default_factory=dict)
    prices: list[Any] = field(default_factory=list)
    waits: list[list[float]] = field(default_factory=list)


class Prompts:
    """Draws the prompts of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self._rng = scene, random.Random(scene.seed + 1)
        self.prefix = self.draw(scene.prefix)

    def draw(self, num_tokens: int) -> list[int]:
        """Return tokens that no other prompt has."""
        return self._rng.choices(VOCABULARY, k=num_tokens)

    def of(self, kind: str) -> list[int]:
        """Return a prompt of a kind."""
        if kind == "hit":
            return self.prefix + self.draw(self.scene.tail)
        return self.draw(self.scene.long if kind == "long" else self.scene.stream_prompt)


# --- measure ---


async def measure(scene: Scene, stream: Stream) -> Figures:
    """Run each kind alone, then the scene."""
    figures, prompts = Figures(), Prompts(scene)
    await first_token_s(stream, prompts.prefix, 1, "hit")
    alone = [
        await first_token_s(stream, prompts.of("hit"), 1, "hit") for _ in range(scene.num_alone)
    ]
    figures.alone["hit"] = sorted(alone)[len(alone) // 2]
    figures.alone["long"] = await first_token_s(stream, prompts.of("long"), 1, "long")
    streams = [
        asyncio.create_task(_decode(stream, prompts, figures)) for _ in range(scene.num_streams)
    ]
    await asyncio.sleep(2.0)
    figures.gaps.clear()
    figures.num_tokens, begin_s, tasks = 0, time.monotonic(), []
    for at_s, kind in scene.arrivals():
        await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        tasks.append(asyncio.create_task(_arrive(stream, prompts, kind, figures)))
    await asyncio.wait(tasks, timeout=scene.seconds)
    figures.seconds = time.monotonic() - begin_s
    for task in [*streams, *tasks]:
        task.cancel()
    await asyncio.gather(*streams, *tasks, return_exceptions=True)
    return figures


async def first_token_s(stream: Stream, prompt: list[int], num_tokens: int, kind: str) -> float:
    """Serve a prompt, and return how long its first token took."""
    begin_s, first_s = time.monotonic(), 0.0
    async for _ in stream(prompt, num_tokens, kind):
        first_s = first_s or time.monotonic() - begin_s
    return first_s


async def _decode(stream: Stream, prompts: Prompts, figures: Figures) -> None:
    while True:
        last_s = None
        async for number in stream(prompts.of("stream"), prompts.scene.stream_answer, "stream"):
            now_s = time.monotonic()
            if last_s is not None:
                figures.gaps.append(now_s - last_s)
            last_s = now_s
            figures.num_tokens += number


async def _arrive(stream: Stream, prompts: Prompts, kind: str, figures: Figures) -> None:
    scene = prompts.scene
    first_s = await first_token_s(stream, prompts.of(kind), scene.answer, kind)
    (figures.hits if kind == "hit" else figures.longs).append(first_s)
    figures.num_tokens += scene.answer + (scene.tail if kind == "hit" else scene.long)


@asynccontextmanager
async def offline(model: str, settings: dict[str, Any], scene: Scene) -> AsyncIterator[Any]:
    """Serve by ``AsyncLLM``; yields a ``Stream``, and what completes the figures."""
    from ostinato import AsyncLLM, SamplingParams

    async with AsyncLLM(model, num_blocks=-(-scene.kv_tokens // BLOCK), **settings) as llm:

        async def stream(prompt: list[int], num_tokens: int, kind: str) -> AsyncIterator[int]:
            params = SamplingParams(
                max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
            )
            known = 0
            async for output in llm.generate({"prompt_token_ids": prompt}, params):
                num = len(output.outputs[0].token_ids)
                yield num - known
                known = num

        async def complete(figures: Figures) -> None:
            if llm.engine.prices.now is not None:
                figures.prices = list(astuple(llm.engine.prices.now))

        yield stream, complete


@asynccontextmanager
async def over_http(server: str, model: str, options: argparse.Namespace) -> AsyncIterator[Any]:
    """Start a server, and serve by its completions; yields a ``Stream``, and as ``offline``."""
    import aiohttp

    [engine] = [one for one in SERVERS if one.settings["server"] == server]
    python = python_of(engine, options.peers, {})
    assert python is not None, f"{server} is not installed in {options.peers}"
    scene, port = options.scene, free_port()
    _, _, settings = http_worker_of(engine, python, options.threads)
    settings |= {"kv_tokens": scene.kv_tokens, "max_num_seqs": 64}
    settings["max_model_len"] = scene.long + scene.stream_answer + 64
    command = COMMANDS[server](model, settings, port) + options.flags
    environment = settings["environment"]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", env=environment, stdout=subprocess.DEVNULL):
        connector = aiohttp.TCPConnector(force_close=True)  # llama-server closes idle connections
        timeout = aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
            names: list[str] = []  # of hits, as ours answers them

            async def stream(prompt: list[int], num_tokens: int, kind: str) -> AsyncIterator[int]:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
                body |= {"temperature": 0, "ignore_eos": True}
                body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
                if server == "ours":
                    body["cache_salt"] = "hits" if kind == "hit" else "strangers"
                async with session.post("/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    known = 0
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            event = json.loads(line[6:])
                            if kind == "hit" and not known:
                                names.append(event["id"])
                            usage = event.get("usage") or {}  # llama-server has it at the end
                            number = usage.get("completion_tokens", known + 1) - known
                            known += number
                            if number > 0:
                                yield number

            async def complete(figures: Figures) -> None:
                if server != "ours":
                    return
                async with session.get("/admin/steps") as answer:
                    prices = (await answer.json())["prices"]
                    figures.prices = [] if prices is None else list(prices.values())
                for name in names[scene.num_alone + 1 :]:
                    async with session.get(f"/v1/explain/{name}") as answer:
                        if answer.status == 200:
                            wait = (await answer.json())["wait"]
                            figures.waits.append(list(wait.values()))

            yield stream, complete


# --- simulate ---


def simulate(scene: Scene, prices: list[Any], **scheduling: Any) -> Figures:
    """Run the scene on the real scheduler and cache, with a price list in place of a model."""
    figures = Figures(prices=prices)
    alone = {"hit": [(0.0, "prefix"), (100.0, "hit")], "long": [(0.0, "long")]}
    for kind, arrivals in alone.items():
        run = simulated_run(scene, prices, arrivals, scheduling)
        figures.alone[kind] = run[kind][-1]
    streams = [(1e3, "stream")] * scene.num_streams
    scene_arrivals = [(1e3 + 2.0 + at_s, kind) for at_s, kind in scene.arrivals()]
    run = simulated_run(scene, prices, [(0.0, "prefix"), *streams, *scene_arrivals], scheduling)
    figures.hits, figures.longs, figures.gaps = run["hit"], run["long"], run["gaps"]
    figures.num_tokens, figures.seconds = int(run["tokens"][0]), run["seconds"][0]
    return figures


def simulated_run(
    scene: Scene, prices: list[Any], arrivals: list[tuple[float, str]], scheduling: dict[str, Any]
) -> dict[str, list[float]]:
    """Return times to first tokens by kind, gaps of streams, tokens and seconds."""
    config = SchedulerConfig(**scheduling)
    requests = [
        BlockRequest(at_s, *_lengths(scene, kind), _blocks(scene, kind, number))
        for number, (at_s, kind) in enumerate(arrivals)
    ]
    trace = TraceBuilder(requests).build("strangers", BLOCK)
    cache = PrefixCacheConfig(scene.kv_tokens // BLOCK, BLOCK)
    replica = TimedReplica(trace, cache, config, CostModel(*prices))
    results: dict[str, list[float]] = {
        name: [] for name in ("prefix", "stream", "hit", "long", "gaps")
    }
    last_s: dict[int, float] = {}
    tokens, added, left = 0, 0, sum(kind != "stream" for _, kind in arrivals)
    while left:
        while added < len(arrivals) and arrivals[added][0] <= replica.now_s:
            replica.add(added)
            added += 1
        if not replica.begin(replica.now_s):
            replica.now_s = max(replica.now_s, arrivals[added][0])
            continue
        for update in replica.end():
            number = int(update.sequence.request.request_id)
            at_s, kind = arrivals[number]
            tokens += 1
            if number not in last_s:
                results[kind].append(replica.now_s - at_s)
                tokens += {"hit": scene.tail, "long": scene.long}.get(kind, 0)
            elif kind == "stream":
                results["gaps"].append(replica.now_s - last_s[number])
            last_s[number] = replica.now_s
            left -= update.sequence.finish_reason is not None and kind != "stream"
    return results | {
        "tokens": [tokens],
        "seconds": [replica.now_s - arrivals[-1][0] + scene.seconds],
    }


def _lengths(scene: Scene, kind: str) -> tuple[int, int]:
    return {
        "prefix": (scene.prefix, 1),
        "hit": (scene.prefix + scene.tail, scene.answer),
        "long": (scene.long, scene.answer),
        "stream": (scene.stream_prompt, scene.stream_answer),
    }[kind]


def _blocks(scene: Scene, kind: str, number: int) -> list[int]:
    shared = scene.prefix // BLOCK if kind in ("prefix", "hit") else 0
    own = _lengths(scene, kind)[0] // BLOCK - shared
    return [*range(shared), *range((number + 1) * 10**6, (number + 1) * 10**6 + own)]


# --- report ---


def rows(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield the lines of a column."""
    hits, gaps = np.array(figures.hits or [np.nan]), np.array(figures.gaps or [np.nan])
    alone, long = figures.alone, float(np.mean(figures.longs or [np.nan]))
    yield "hit alone, first token", f"{alone['hit']:.3f} s"
    yield "hits, first token p50", f"{np.percentile(hits, 50):.3f} s"
    yield "hits, first token p99", f"{np.percentile(hits, 99):.3f} s"
    yield "p99 / alone", f"{np.percentile(hits, 99) / alone['hit']:.1f} x"
    yield "streams, gap p50", f"{np.percentile(gaps, 50) * 1000:.0f} ms"
    yield "streams, gap p99", f"{np.percentile(gaps, 99) * 1000:.0f} ms"
    yield "streams, longest gap", f"{gaps.max() * 1000:.0f} ms"
    yield "long alone, first token", f"{alone['long']:.1f} s"
    yield "long, first token", f"{long:.1f} s"
    yield "tokens per second of all", f"{figures.num_tokens / figures.seconds:.1f}"


def table(columns: dict[str, Figures]) -> str:
    """Return the table in Markdown."""
    lines = zip(*map(rows, columns.values()), strict=True)
    cells = ([line[0][0], *(value for _, value in line)] for line in lines)
    return markdown_table(["", *columns], cells)


def waits(columns: dict[str, Figures]) -> str:
    """Return what is explained of hits, in Markdown: means, and the share that steps explain."""
    heads = ["hits", "first token", "own work", "its tenant's", "others'"]
    lines = [
        [f"{name}, as explained", *(f"{mean:.3f} s" for mean in np.mean(figures.waits, axis=0))]
        for name, figures in columns.items()
        if figures.waits
    ]
    return markdown_table(heads, lines)


def run_column(name: str, options: argparse.Namespace) -> Figures:
    """Measure one column, in this process."""

    async def run() -> Figures:
        async with AsyncExitStack() as stack:
            is_ours = name in SETTINGS
            if is_ours and not options.http:
                context = offline(options.model, SETTINGS[name], options.scene)
            else:
                settings = SETTINGS.get(name, {}).items()
                options.flags = [
                    word for k, v in settings for word in (f"--{k.replace('_', '-')}", str(v))
                ]
                context = over_http("ours" if is_ours else name, options.model, options)
            stream, complete = await stack.enter_async_context(context)
            figures = await measure(options.scene, stream)
            await complete(figures)
            return figures

    return asyncio.run(run())


def main() -> None:
    """Measure the columns one after the other, each in a process, and print the table."""
    parser = parser_of(__doc__, has_json=True)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--checkpoint", choices=SHAPES, help="write random weights there first")
    parser.add_argument("--quick", action="store_true", help="a scene of seconds")
    parser.add_argument("--columns", nargs="+", default=["ours", "before"])
    parser.add_argument("--http", action="store_true", help="ours over HTTP, too")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--threads", type=int, default=2, help="of peers")
    parser.add_argument("--long", type=int, help="tokens of the long prompt")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--streams", type=int, dest="num_streams")
    parser.add_argument("--prefix", type=int, help="tokens of hits that are cached")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("long", "seconds", "num_streams", "prefix")}
    chosen = {name: value for name, value in given.items() if value is not None}
    options.scene = Scene(**((QUICK if options.quick else {}) | chosen))
    if options.checkpoint:
        make_checkpoint(options.model, SHAPES[options.checkpoint])
    options.model = str(options.model)
    if options.column:
        write_json(options.json, asdict(run_column(options.column, options)))
        return
    columns = {name: _in_process(name) for name in options.columns}
    print(table(columns))
    priced = columns.get("ours")
    if priced is not None and priced.prices:
        predictions = {
            f"{name}, simulated": simulate(options.scene, priced.prices, **(DEFAULTS | settings))
            for name, settings in SETTINGS.items()
            if name in columns
        }
        print("", table(predictions), sep="\n")
        columns |= predictions
    if any(figures.waits for figures in columns.values()):
        print("", waits(columns), sep="\n")
    write_json(options.json, {name: asdict(figures) for name, figures in columns.items()})


def _in_process(name: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        arguments = [*sys.argv[1:], "--column", name, "--json", str(file)]
        subprocess.run([sys.executable, "-m", "benchmarks.strangers", *arguments], check=True)
        return Figures(**json.loads(file.read_text()))


if __name__ == "__main__":
    main()

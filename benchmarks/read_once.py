"""Gain of reading shared blocks once, and where it is slower. Attention of one step alone.

::

    python -m benchmarks.read_once                    # the scenes below, both kinds of attention
    python -m benchmarks.read_once --sweep            # decodes x shared tokens x own tokens
    python -m benchmarks.read_once --sweep --isa AVX512 --plot FILE.png --json FILE
    python -m benchmarks.read_once --sweep --threads 1 --clock cpu      # on a busy machine

Layers have the shape of Qwen3-0.6B: 16 query heads, 8 key/value heads of 128, bfloat16. Each
sequence decodes one token; its context is a prefix that all share and 32 tokens of its own, or a
system prompt of 512 tokens that all share, a document that each fourth shares, and 32 of its own
(``tree``), or nothing that anybody shares (``strangers``). A step checks its tables, is planned
once, and then attends in every layer. The rest of a forward is left out: it is the same for all
settings, and would make each look more like the others.

The settings ``never``, ``auto`` and ``always`` of ``read_once`` take turns, round by round, in an
order that changes, and ``never`` runs twice: what it differs from itself is noise. Ratios are taken
round by round; shown is their median, with the quartiles beside it.
"""

import argparse
import platform
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.attention import BLOCK_SIZE, CPU, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, STYLE, fill
from benchmarks.command_line import parser_of, write_json
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention_choice import AttentionCase, choose_attention
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape
from ostinato.runner.native.library import Isa, best_isa, library, use_isa
from ostinato.runner.settings import AttentionName, ReadOnce

OWN = 32
SETTINGS: tuple[ReadOnce, ...] = get_args(ReadOnce)
AGAIN = "never again"
LABELS = ("always", "auto", AGAIN)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Scene:
    """Sequences that decode together.

    Attributes:
        name: For the table.
        num_sequences: How many.
        shared: Tokens that all share.
        document: Tokens that each fourth shares behind them.
        private: Tokens of each alone.
    """

    name: str
    num_sequences: int
    shared: int
    document: int = 0
    private: int = OWN


SCENES = (
    Scene("16 on 2k", 16, 2_048),
    Scene("64 on 2k", 64, 2_048),
    Scene("32 on 4k", 32, 4_096),
    Scene("32 on 16k", 32, 16_384),
    Scene("2 on 2k", 2, 2_048),
    Scene("tree of 32", 32, 512, 2_048),
    Scene("16 strangers of 512", 16, 0, 0, 512),
    Scene("16 strangers of 48", 16, 0, 0, 48),
    Scene("1 of 2k", 1, 2_048),
)


class Decode:
    """One step of a scene, over and over."""

    def __init__(self, scene: Scene, num_layers: int, attention: AttentionName) -> None:
        """Fill a store at random and lay out the tables."""
        self.num_layers = num_layers
        tables, num_blocks = tables_of(scene)
        spec = KVSpec((LayerKV(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM),) * num_layers)
        case = AttentionCase(spec, torch.bfloat16, torch.bfloat16, BLOCK_SIZE, CPU)
        self.backends = {
            setting: choose_attention(attention, case, setting) for setting in SETTINGS
        }
        self.store = self.backends["auto"].new_store(
            StoreShape(spec, num_blocks, BLOCK_SIZE, torch.bfloat16, CPU)
        )
        fill(self.store, torch.bfloat16)
        self.plan = step_of(scene, tables)
        self.queries = torch.randn(len(tables), NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.kv = torch.randn(2, len(tables), NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    @torch.inference_mode()
    def run(self, setting: ReadOnce, clock: Callable[[], float]) -> float:
        """Return the milliseconds of one step."""
        metadata = build_inputs(self.plan, BLOCK_SIZE, CPU).groups[0]
        start = clock()
        step = self.backends[setting].start(metadata, self.store)
        for layer in range(self.num_layers):
            step.attend(layer, self.queries, self.kv[0], self.kv[1], STYLE)
        return (clock() - start) * 1e3


def tables_of(scene: Scene) -> tuple[list["array[int]"], int]:
    """Give out blocks; returns one table per sequence, and how many blocks there are."""
    num_blocks = 0

    def take(num_tokens: int) -> "array[int]":
        nonlocal num_blocks
        first, num_blocks = num_blocks, num_blocks + -(-num_tokens // BLOCK_SIZE)
        return array("I", range(first, num_blocks))

    shared = take(scene.shared)
    documents = [take(scene.document) for _ in range(4)]
    tables = [shared + documents[i % 4] + take(scene.private) for i in range(scene.num_sequences)]
    return tables, num_blocks


def step_of(scene: Scene, tables: list["array[int]"]) -> StepPlan:
    """Let every sequence of a scene decode one token."""
    last = scene.shared + scene.document + scene.private - 1
    return StepPlan(
        tuple(
            ScheduledSequence(SequenceId(i), array("I", [0]), last, (table,))
            for i, table in enumerate(tables)
        )
    )


def measure(scene: Scene, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure a scene: by kind of attention, milliseconds by setting and ratios to ``never``."""
    results = {}
    for name in options.backends:
        decode = Decode(scene, options.layers, name)
        runs: list[tuple[str, ReadOnce]] = [(setting, setting) for setting in SETTINGS]
        runs.append((AGAIN, "never"))
        times: Times = {label: [] for label, _ in runs}
        for round_ in range(-1, options.rounds):  # the first touches fresh memory
            turned = runs[round_ % len(runs) :] + runs[: round_ % len(runs)]
            for label, setting in turned:
                time_ms = decode.run(setting, CLOCKS[options.clock])
                if round_ >= 0:
                    times[label].append(time_ms)
        results[name] = figures_of(times)
    return results


def figures_of(times: Times) -> dict[str, Any]:
    """Return the median of each setting, and quartiles of its ratio to ``never`` in each round."""
    figures: dict[str, Any] = {label: median(results) for label, results in times.items()}
    for label, results in times.items():
        ratios = [one / other for one, other in zip(results, times["never"], strict=True)]
        quarters = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        figures[f"{label} / never"] = quarters
    return figures


def sweep(options: argparse.Namespace) -> Iterator[Scene]:
    """Scenes from what cannot pay to what must."""
    for own, num_sequences, shared in product(options.own, options.decodes, options.shared):
        name = f"{num_sequences} on {shared}, {own} own"
        yield Scene(name, num_sequences, shared, private=own)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, rounds=11, threads=torch.get_num_threads(), has_json=True)

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--sweep", action="store_true", help="look for where it is slower")
    parser.add_argument("--decodes", type=numbers, default="1,2,4,8,16,32,64")
    parser.add_argument("--shared", type=numbers, default="16,64,128,512,2048,8192")
    parser.add_argument("--own", type=numbers, default="16,64")
    parser.add_argument("--attention", choices=("native", "torch"), help="one kind alone")
    parser.add_argument("--isa", choices=[isa.name for isa in Isa], help="instructions to use")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: of one thread")
    parser.add_argument("--plot", type=Path, help="draw the sweep's ratios there")
    options = parser.parse_args()
    options.backends = [options.attention or "native"]
    if not options.sweep and options.attention is None:
        options.backends = ["native", "torch"]
    return options


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(options.threads)
    if (native := library()) is not None and options.isa is not None:
        use_isa(native, Isa[options.isa])
    isa = options.isa or (best_isa(native).name if native is not None else "none")
    scenes = tuple(sweep(options)) if options.sweep else SCENES
    results = {
        scene.name: {**asdict(scene), "attention": measure(scene, options)}
        for scene in tqdm(scenes, unit="scene")
    }
    how = (
        f"{options.layers} layers, {options.threads} threads, {options.clock} clock, "
        f"{platform.machine()} with {isa}, {options.rounds} rounds"
    )
    show(results, how)
    write_json(options.json, results)
    if options.plot is not None:
        draw(results, how, options.plot)


def show(results: dict[str, dict[str, Any]], how: str) -> None:
    """Print a table, and which scene is the worst."""
    table = Table("sequences", "attention", title=f"Attention of one decode step: {how}")
    for column in (*SETTINGS, *(f"{label} / never" for label in LABELS)):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [(name, *row) for name, scene in results.items() for row in scene["attention"].items()]
    for name, backend, row in rows:
        times = [f"{row[setting]:.2f} ms" for setting in SETTINGS]
        table.add_row(name, backend, *times, *map(_spread, (row[f"{la} / never"] for la in LABELS)))
    console = Console(width=140)
    console.print(table)
    for label in LABELS[1:]:
        worst = max(rows, key=lambda row: row[2][f"{label} / never"][1])
        slowest = _spread(worst[2][f"{label} / never"])
        console.print(f"slowest of {label} / never: {slowest}, {worst[0]}, {worst[1]}")


def _spread(quarters: list[float]) -> str:
    low, middle, high = quarters
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def draw(results: dict[str, dict[str, Any]], how: str, path: Path) -> None:
    """Draw ``auto / never`` by decodes and shared tokens, beside ``never`` against itself."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenes = list(results.values())
    owns = sorted({scene["private"] for scene in scenes})
    decodes = sorted({scene["num_sequences"] for scene in scenes})
    shared = sorted({scene["shared"] for scene in scenes})
    figure, axes = pyplot.subplots(
        len(owns), 2, squeeze=False, figsize=(11, 1 + 3 * len(owns)), layout="constrained"
    )
    for (row, own), (column, label) in product(enumerate(owns), enumerate(("auto", AGAIN))):
        axis = axes[row][column]
        values = [[0.0] * len(shared) for _ in decodes]
        for scene in (scene for scene in scenes if scene["private"] == own):
            at = decodes.index(scene["num_sequences"]), shared.index(scene["shared"])
            values[at[0]][at[1]] = scene["attention"]["native"][f"{label} / never"][1]
        axis.imshow(values, cmap="RdBu_r", vmin=0.5, vmax=1.5, aspect="auto")
        for y, x in product(range(len(decodes)), range(len(shared))):
            ink = "white" if values[y][x] < 0.6 else "black"
            number = f"{values[y][x]:.2f}"
            axis.text(x, y, number, ha="center", va="center", fontsize=8, color=ink)
        axis.set_xticks(range(len(shared)), [f"{tokens:,}" for tokens in shared])
        axis.set_yticks(range(len(decodes)), map(str, decodes))
        axis.set(title=f"{label} / never, {own} own tokens", xlabel="shared tokens")
        axis.set_ylabel("decodes")
    figure.suptitle(f"Time of a step's attention; below 1 is faster\n{how}", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

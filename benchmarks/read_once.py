"""What does reading shared blocks once bring? The attention of one step, no model around it.

::

    python benchmarks/read_once.py                   # the scenes below
    python benchmarks/read_once.py --sweep           # where reading once begins to pay
    python benchmarks/read_once.py --attention native
    python benchmarks/read_once.py --json FILE

Layers have the shape of Qwen3-0.6B: 16 query heads, 8 key/value heads of 128, bfloat16. Each
sequence decodes one token; its context is a prefix that all share and 32 tokens of its own, or a
system prompt of 512 tokens that all share, a document that each fourth shares, and 32 of its own
(``tree``), or nothing that anybody shares (``strangers``). A step works out its read plan once
and then attends in every layer.

The backends, and the settings ``never``, ``auto`` and ``always`` of ``read_once``, take turns,
round by round; medians over rounds are compared, and the smallest and largest ratio of a round
stand beside.
"""

import argparse
import json
import platform
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ostinato.core.config import AttentionName, ReadOnce
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.backend import AttentionBackend, AttentionStyle
from ostinato.runner.attention.choice import AttentionCase, choose_attention
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv_store import KVSpec, LayerKV

BLOCK_SIZE = 16
CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
OWN = 32
STYLE = AttentionStyle(scale=HEAD_DIM**-0.5)


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
    Scene("1 of 2k", 1, 2_048),
)


class Decode:
    """One step of a scene, over and over."""

    def __init__(self, scene: Scene, num_layers: int, attention: AttentionName) -> None:
        """Fill a store at random and lay out the tables."""
        self.num_layers = num_layers
        self.attention = attention
        tables, num_blocks = _tables(scene)
        spec = KVSpec((LayerKV(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM),) * num_layers)
        self.case = AttentionCase(spec, torch.bfloat16, torch.bfloat16, BLOCK_SIZE, CPU)
        self.store = self._backend("auto").new_store(
            spec, num_blocks, BLOCK_SIZE, torch.bfloat16, CPU
        )
        slots = torch.arange(num_blocks * BLOCK_SIZE)
        for layer in range(num_layers):
            for piece in slots.split(2**14):
                kv = torch.randn(2, len(piece), NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
                self.store.write(layer, kv[0], kv[1], piece)
        length = scene.shared + scene.document + scene.private
        self.plan = StepPlan(
            tuple(
                ScheduledSequence(SequenceId(i), array("I", [0]), length - 1, (table,))
                for i, table in enumerate(tables)
            )
        )
        self.queries = torch.randn(len(tables), NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.kv = torch.randn(2, len(tables), NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    @torch.inference_mode()
    def run(self, read_once: ReadOnce) -> float:
        """Return the milliseconds of one step."""
        metadata = build_inputs(self.plan, BLOCK_SIZE, CPU).groups[0]
        start = time.perf_counter()
        backend = self._backend(read_once)
        step = backend.start(metadata, self.store)
        for layer in range(self.num_layers):
            step.attend(layer, self.queries, self.kv[0], self.kv[1], STYLE)
        return (time.perf_counter() - start) * 1e3

    def _backend(self, read_once: ReadOnce) -> AttentionBackend:
        return choose_attention(self.attention, self.case, read_once)


def _tables(scene: Scene) -> tuple[list["array[int]"], int]:
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


def measure(
    scene: Scene, num_layers: int, rounds: int, backends: list[AttentionName]
) -> dict[str, dict[str, float]]:
    """Measure a scene: by backend, milliseconds by setting and the spread of never / auto."""
    decodes = {name: Decode(scene, num_layers, name) for name in backends}
    times: dict[tuple[str, str], list[float]] = {
        (name, setting): [] for name in backends for setting in get_args(ReadOnce)
    }
    for name, setting in times:
        decodes[name].run(setting)  # the first touches fresh memory
    for _ in range(rounds):
        for (name, setting), found in times.items():
            found.append(decodes[name].run(setting))
    return {name: _figures({s: times[name, s] for s in get_args(ReadOnce)}) for name in backends}


def _figures(times: dict[str, list[float]]) -> dict[str, float]:
    ratios = [never / auto for never, auto in zip(times["never"], times["auto"], strict=True)]
    figures = {setting: median(found) for setting, found in times.items()}
    return {**figures, "lowest": min(ratios), "highest": max(ratios)}


def sweep() -> Iterator[Scene]:
    """Scenes from what cannot pay to what must."""
    for num_sequences in (2, 4, 16):
        for shared in (16, 32, 64, 128, 256, 512, 1_024):
            yield Scene(f"{num_sequences} on {shared}", num_sequences, shared)


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="find where it begins to pay")
    parser.add_argument("--attention", choices=("native", "torch"), help="one backend alone")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    scenes = tuple(sweep()) if options.sweep else SCENES
    backends = [options.attention] if options.attention else ["native", "torch"]
    found = {
        scene.name: {
            **asdict(scene),
            "attention": measure(scene, options.layers, options.rounds, backends),
        }
        for scene in tqdm(scenes, unit="scene")
    }
    _print(found, options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def _print(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(
        title=f"Attention of one decode step, {options.layers} layers, "
        f"{options.threads} threads, {platform.machine()}, medians of {options.rounds}"
    )
    table.add_column("sequences")
    table.add_column("attention")
    for column in ("never", "always", "auto", "never / always", "never / auto", "of a round"):
        table.add_column(column, justify="right")
    rows = [(name, *row) for name, scene in found.items() for row in scene["attention"].items()]
    for name, backend, row in rows:
        table.add_row(
            name,
            backend,
            *(f"{row[setting]:.2f} ms" for setting in ("never", "always", "auto")),
            f"{row['never'] / row['always']:.2f}",
            f"{row['never'] / row['auto']:.2f}",
            f"{row['lowest']:.2f} to {row['highest']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

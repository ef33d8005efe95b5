"""Speed of attention alone, by instruction set, beside torch's.

::

    python -m benchmarks.attention
    python -m benchmarks.attention --threads 1 --dtype float32 --scene decode
    python -m benchmarks.attention --kv-dtype int8 --cpu-time --threads 1
    python -m benchmarks.attention --read-once never --scene decode
    python -m benchmarks.attention --json FILE

One layer of the shape of Qwen3-0.6B: 16 query heads, 8 key/value heads of 128. Scenes are chunks of
prompts, on their own or behind a cached prefix, and steps of decoding, over a prefix that all share
or one that each has for itself. ``native`` columns are the library's instruction sets, ``tiled`` is
the torch backend that works without the library, and ``sdpa`` torch's own attention over keys and
values that are gathered already, for a single sequence: it has no pages to walk.

With ``--kv-dtype``, each instruction set also reads keys and values of that format, after those of
``--dtype``; with ``--read-once``, it also reads shared blocks by that setting, after ``auto``.

All take turns, round by round; steps of decoding go over several copies of the keys, so that no
round finds them in a cache that a model's other layers would have filled. A round is timed as a
whole, planning included, like a layer in a model of as many layers as there are copies. GFLOP/s
counts the products that a mask leaves; GB/s counts every stored key and value once. On a machine
that does other work as well, ``--cpu-time`` with one thread tells more than the clock on the wall.
"""

import argparse
import platform
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from statistics import median
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.command_line import by_turns, parser_of, write_json
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.backend import AttentionBackend, AttentionStyle
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import TorchAttention
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv.kv_store import KVSpec, KVStore, LayerKV, StoreShape
from ostinato.runner.native.library import Isa, best_isa, library, use_isa
from ostinato.runner.settings import ReadOnce

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
STYLE = AttentionStyle(scale=HEAD_DIM**-0.5)
BYTES_TO_SPILL = 256 << 20
CPU = torch.device("cpu")
Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class Scene:
    """Sequences of one step.

    Attributes:
        name: For the table.
        num_sequences: How many.
        shared: Tokens that all share, cached.
        own: Tokens of each alone, those of this step included.
        new: Tokens of each that this step computes.
    """

    name: str
    num_sequences: int
    shared: int
    own: int
    new: int

    @property
    def length(self) -> int:
        """Tokens of a sequence after the step."""
        return self.shared + self.own

    @property
    def flops(self) -> float:
        """Of the two products, for what causality leaves."""
        seen = sum(range(self.length - self.new + 1, self.length + 1))
        return 4.0 * self.num_sequences * seen * NUM_HEADS * HEAD_DIM

    def num_copies(self, dtype: torch.dtype) -> int:
        """How many layers take turns; chunks of prompts are bound by their products."""
        return 1 if self.new > 1 else 1 + BYTES_TO_SPILL // self.num_bytes(dtype)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of keys and values, shared ones counted once."""
        tokens = self.shared + self.num_sequences * self.own
        return tokens * LayerKV(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM).bytes_per_token(dtype)


SCENES = (
    Scene("prefill 2k", 1, 0, 2_048, 2_048),
    Scene("prefill 512 on 8k", 1, 8_192, 512, 512),
    Scene("prefill 32 on 2k", 1, 2_048, 32, 32),
    Scene("decode 1 x 4k", 1, 0, 4_096, 1),
    Scene("decode 16 x 2k shared", 16, 2_048, 32, 1),
    Scene("decode 32 x 4k shared", 32, 4_096, 32, 1),
    Scene("decode 32 x 16k shared", 32, 16_384, 32, 1),
    Scene("decode 16 x 2k strangers", 16, 0, 2_048, 1),
)


class Paged:
    """A scene through one of our backends."""

    def __init__(
        self,
        scene: Scene,
        backend: AttentionBackend,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Fill a store at random and lay out the tables."""
        self.backend = backend
        self.copies = scene.num_copies(kv_dtype or dtype)
        blocks = count()
        shared = _take(blocks, scene.shared)
        tables = [shared + _take(blocks, scene.own) for _ in range(scene.num_sequences)]
        num_blocks = next(blocks)
        spec = KVSpec((LayerKV(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM),) * self.copies)
        self.store = backend.new_store(
            StoreShape(spec, num_blocks, BLOCK_SIZE, kv_dtype or dtype, CPU)
        )
        fill(self.store, dtype)
        num_rows = scene.num_sequences * scene.new
        self.queries = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, dtype=dtype)
        self.kv = torch.randn(2, num_rows, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
        new = array("I", bytes(4 * scene.new))
        start = scene.length - scene.new
        self.plan = StepPlan(
            tuple(
                ScheduledSequence(SequenceId(i), new, start, (table,))
                for i, table in enumerate(tables)
            )
        )

    @torch.inference_mode()
    def run(self, clock: Clock) -> float:
        """Return the milliseconds of one layer."""
        metadata = build_inputs(self.plan, BLOCK_SIZE, CPU).groups[0]
        start = clock()
        step = self.backend.start(metadata, self.store)
        for layer in range(self.copies):
            step.attend(layer, self.queries, self.kv[0], self.kv[1], STYLE)
        return (clock() - start) * 1e3 / self.copies


def fill(store: KVStore, dtype: torch.dtype) -> None:
    """Write keys and values to all slots, at random."""
    kv = torch.randn(2, 2**12, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    for layer in range(len(store.spec.layers)):
        for slots in torch.arange(store.num_slots).split(2**12):
            store.write(layer, kv[0, : len(slots)], kv[1, : len(slots)], slots)


class Gathered:
    """One sequence through torch's own attention, its keys side by side."""

    def __init__(self, scene: Scene, dtype: torch.dtype) -> None:
        """Make keys and values, heads first."""
        size = (1, NUM_KV_HEADS, scene.length, HEAD_DIM)
        self.kv = [
            (torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype))
            for _ in range(scene.num_copies(dtype))
        ]
        self.queries = torch.randn(1, NUM_HEADS, scene.new, HEAD_DIM, dtype=dtype)
        self.causal = scene.new == scene.length
        rows = torch.arange(scene.length - scene.new, scene.length)[:, None]
        self.mask = None if self.causal or scene.new == 1 else torch.arange(scene.length) <= rows

    @torch.inference_mode()
    def run(self, clock: Clock) -> float:
        """Return the milliseconds of one layer."""
        start = clock()
        for keys, values in self.kv:
            scaled_dot_product_attention(
                self.queries, keys, values, self.mask, is_causal=self.causal, enable_gqa=True
            )
        return (clock() - start) * 1e3 / len(self.kv)


def _take(blocks: "count[int]", num_tokens: int) -> "array[int]":
    return array("I", (next(blocks) for _ in range(-(-num_tokens // BLOCK_SIZE))))


def contestants(
    scene: Scene,
    dtype: torch.dtype,
    isas: list[Isa],
    kv_dtype: torch.dtype | None = None,
    read_once: ReadOnce | None = None,
) -> dict[str, Callable[[Clock], float]]:
    """Who computes a scene, by name."""
    results: dict[str, Callable[[Clock], float]] = {}
    native = library()
    if native is not None:
        usual = NativeAttention(native)
        ways = {"": Paged(scene, usual, dtype)}
        if kv_dtype is not None:
            ways[f", {_name(kv_dtype)} KV"] = Paged(scene, usual, dtype, kv_dtype)
        if read_once is not None:
            ways[f", {read_once}"] = Paged(scene, NativeAttention(native, read_once), dtype)

        def run_with(isa: Isa, paged: Paged, clock: Clock) -> float:
            use_isa(native, isa)
            return paged.run(clock)

        for isa, (way, paged) in product(isas, ways.items()):
            results[f"{isa.name}{way}"] = partial(run_with, isa, paged)
    results["tiled"] = Paged(scene, TorchAttention(), dtype).run
    if scene.num_sequences == 1:
        results["sdpa"] = Gathered(scene, dtype).run
    return results


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Read the command line, measure and print."""
    parser = parser_of(__doc__, rounds=5, threads=torch.get_num_threads(), has_json=True)
    parser.add_argument("--scene", default="", help="only scenes whose name has this in it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=("bfloat16", "float16", "float32", "int8"))
    parser.add_argument("--read-once", choices=get_args(ReadOnce), help="beside auto")
    parser.add_argument("--isa", nargs="*", help="instruction sets, such as AVX2 (all there are)")
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not on the wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = library()
    best = -1 if native is None else best_isa(native)
    isas = [
        isa
        for isa in Isa
        if Isa.GENERIC < isa <= best and (not options.isa or isa.name in options.isa)
    ]
    dtype = getattr(torch, options.dtype)
    kv_dtype = getattr(torch, options.kv_dtype) if options.kv_dtype else None
    clock = time.process_time if options.cpu_time else time.perf_counter
    results: dict[str, dict[str, float]] = {}
    for scene in SCENES:
        if options.scene in scene.name:
            runs = contestants(scene, dtype, isas, kv_dtype, options.read_once)
            calls = {name: partial(run, clock) for name, run in runs.items()}
            times = by_turns(calls, options.rounds)
            results[scene.name] = {name: median(each) for name, each in times.items()}
            _print(scene, results[scene.name], dtype, options)
    write_json(options.json, results)


def _print(
    scene: Scene, results: dict[str, float], dtype: torch.dtype, options: argparse.Namespace
) -> None:
    table = Table(
        title=f"{scene.name}: one layer, {options.dtype}, {options.threads} threads, "
        f"{platform.machine()}, medians of {options.rounds}"
    )
    table.add_column("attention")
    for column in ("ms", "GFLOP/s", "GB/s", "faster than tiled", "than sdpa"):
        table.add_column(column, justify="right")
    for name, milliseconds in results.items():
        table.add_row(
            name,
            f"{milliseconds:.3f}",
            f"{scene.flops / milliseconds / 1e6:.0f}",
            f"{scene.num_bytes(torch.int8 if 'int8' in name else dtype) / milliseconds / 1e6:.1f}",
            f"{results['tiled'] / milliseconds:.2f}",
            f"{results['sdpa'] / milliseconds:.2f}" if "sdpa" in results else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

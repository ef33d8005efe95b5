"""Products with packed weights on each instruction set, beside oneDNN's.

::

    python -m benchmarks.products                       # bfloat16 and float32, one thread
    python -m benchmarks.products --rows 1,16 --rounds 30 --dtypes bfloat16
    python -m benchmarks.products --dtypes bfloat16 --formats plain,int8,int4
    python -m benchmarks.products --rows 1,2,4,8,16 --formats plain,int8,int4 --ratios

Each line is a product of a layer of Qwen3-0.6B, with oneDNN as torch calls it for a weight that it
has packed, and with ours on every instruction set that the processor has, by turns, round by round;
with ``--formats``, on the best set alone, with weights of several formats; with ``--ratios``, as
multiples of one row alone, so that the price of a row more can be read off.
Several weights take turns where rows are few, so that none is in the processor's caches. The least
time of all rounds counts; of one thread its processor time, which a busy machine changes least.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.command_line import parser_of
from ostinato.runner.forward.codes import IN_GROUPS, PLAIN, TABLES, CodeFormat
from ostinato.runner.forward.packing import pack_plain
from ostinato.runner.forward.quantized import Quantization, QuantizedWeight
from ostinato.runner.native.library import Isa, best_isa, library, use_isa
from ostinato.runner.native.packed import PackedWeight

SHAPES = ((6144, 1024), (1024, 3072))
"""Gates and ups, and the way back: outputs and inputs."""

FEW_ROWS = 48
WEIGHT_BYTES = 96 << 20
"""Weights that take turns, together larger than a cache."""


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    native = library()
    assert native is not None, "the library is what is measured"
    formats = arguments.formats.split(",")
    sets = [isa for isa in Isa if isa <= best_isa(native)]
    ways = [
        (format, isa) for format in formats for isa in (sets if len(formats) == 1 else sets[-1:])
    ]
    names = [format if len(formats) > 1 else isa.name for format, isa in ways]
    counts = [int(count) for count in arguments.rows.split(",")]
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    table = Table("dtype", "outputs", "inputs", "rows", "oneDNN", *names)
    for name in arguments.dtypes.split(","):
        for shape in SHAPES:
            alone: list[float] = []
            for num_rows in counts:
                scene = Scene(getattr(torch, name), shape, num_rows)
                runs = [scene.onednn(), *(scene.ours(format, isa) for format, isa in ways)]
                least = _least(runs, arguments.rounds if num_rows <= FEW_ROWS else 4, clock)
                alone = alone or least
                cells = [
                    f"{seconds * 1e3:.2f}" + arguments.ratios * f" {seconds / one:5.2f}"
                    for seconds, one in zip(least, alone, strict=True)
                ]
                table.add_row(name, *map(str, shape), str(num_rows), *cells)
    Console(width=130).print(
        table, "Milliseconds; beside them, with --ratios, of those of the first."
    )


@dataclass
class Run:
    """Multiplies rows with weights that take turns."""

    num_weights: int
    run: Callable[[], None]


class Scene:
    """A weight of some shape, and rows to multiply with it."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int], num_rows: int) -> None:
        """Make them from a seed."""
        random = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
        self.weight = torch.randn(shape, generator=random).to(dtype)
        self.layer.weight = nn.Parameter(self.weight, requires_grad=False)
        self.rows = torch.randn(num_rows, shape[1], generator=random).to(dtype)
        self.packed: dict[str, list[PackedWeight]] = {}

    def onednn(self) -> Run:
        """Return what multiplies with each weight by oneDNN."""
        reorder = torch.ops.mkldnn._reorder_linear_weight
        try:
            reordered: list[Tensor] = [
                reorder(self.weight, None) for _ in range(self._count(self.weight.nbytes))
            ]
        except RuntimeError:  # bfloat16 without AVX-512
            return Run(0, lambda: None)

        def run() -> None:
            for weight in reordered:
                torch.ops.mkldnn._linear_pointwise(self.rows, weight, None, "none", [], "")

        return Run(len(reordered), run)

    def ours(self, format: Any, isa: Isa) -> Run:
        """Return what multiplies with each weight in a format, on an instruction set."""
        native = library()
        assert native is not None
        if format not in self.packed:
            pack = _pack_of(format)
            first = pack([self.layer], False)
            others = [pack([self.layer], False) for _ in range(1, self._count(first.nbytes))]
            self.packed[format] = [first, *others]

        def run() -> None:
            use_isa(native, isa)
            for weight in self.packed[format]:
                weight.multiply(self.rows)

        return Run(len(self.packed[format]), run)

    def _count(self, weight_bytes: int) -> int:
        return max(1, WEIGHT_BYTES // weight_bytes) if len(self.rows) <= FEW_ROWS else 1


def _pack_of(format: Any) -> Any:
    table: Any = format.removesuffix("a8")
    if table not in TABLES:
        return pack_plain if format == "plain" else Quantization.named(format)
    form, activations = CodeFormat(4, 32, table=table), PLAIN if table == format else IN_GROUPS
    return lambda layers, _: QuantizedWeight.nearest([layers[0].weight.detach()], form, activations)


def _least(runs: list[Run], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Return the least time of each for one weight, in seconds; NaN where there is none."""
    least = [float("inf") if run.num_weights else float("nan") for run in runs]
    for _ in range(rounds):
        for index, run in enumerate(runs):
            start = clock()
            run.run()
            if run.num_weights:
                least[index] = min(least[index], (clock() - start) / run.num_weights)
    return least


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=8)
    parser.add_argument("--rows", default="1,4,16,32,128,512,2048")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument(
        "--formats",
        default="plain",
        help="of plain, int8, int4, w8a8, w4a8, mxfp4, iq4, mxfp4a8 and iq4a8",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of more than one, time by the clock"
    )
    parser.add_argument(
        "--ratios", action="store_true", help="also as multiples of the fewest rows"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

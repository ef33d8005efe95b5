"""Products with packed weights on each instruction set, beside oneDNN's.

::

    python benchmarks/products.py                       # bfloat16 and float32, one thread
    python benchmarks/products.py --rows 1,16 --rounds 30 --dtypes bfloat16

Each line is a product of a layer of Qwen3-0.6B, with oneDNN as torch calls it for a weight that it
has packed, and with ours on every instruction set that the processor has, by turns, round by round.
Several weights take turns where rows are few, so that none is in the processor's caches. The least
processor time of all rounds counts: on a busy machine it is what can be compared.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ostinato.runner.forward.packed import PackedWeight
from ostinato.runner.native.library import Isa, best_isa, library, use_isa

SHAPES = ((6144, 1024), (1024, 3072))
"""Gates and ups, and the way back: outputs and inputs."""

FEW_ROWS = 48
WEIGHT_BYTES = 96 << 20
"""Weights that take turns, together larger than a cache."""


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    torch.set_num_threads(1)
    native = library()
    assert native is not None, "the library is what is measured"
    sets = [isa for isa in Isa if isa <= best_isa(native)]
    table = Table("dtype", "outputs", "inputs", "rows", "oneDNN", *(isa.name for isa in sets))
    for name in arguments.dtypes.split(","):
        for shape in SHAPES:
            for num_rows in map(int, arguments.rows.split(",")):
                scene = Scene(getattr(torch, name), *shape, num_rows)
                runs: list[Callable[[], None]] = [scene.onednn]
                runs += [scene.ours_on(isa) for isa in sets]
                least = _least(runs, arguments.rounds if num_rows <= FEW_ROWS else 4)
                cells = [f"{seconds / len(scene.packed) * 1e3:.2f}" for seconds in least]
                table.add_row(name, *map(str, shape), str(num_rows), *cells)
    Console(width=110).print(table, "Milliseconds of processor time.")


class Scene:
    """Weights of one shape, and rows to multiply with them."""

    def __init__(self, dtype: torch.dtype, num_outputs: int, num_inputs: int, num_rows: int):
        """Make them from a seed."""
        random = torch.Generator().manual_seed(0)
        shape = num_outputs, num_inputs
        weight = torch.randn(shape, generator=random).to(dtype)
        self.rows = torch.randn(num_rows, num_inputs, generator=random).to(dtype)
        count = max(1, WEIGHT_BYTES // weight.nbytes) if num_rows <= FEW_ROWS else 1
        self.packed = [PackedWeight([weight]) for _ in range(count)]
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.reordered: list[Tensor] = [reorder(weight, None) for _ in range(count)]

    def onednn(self) -> None:
        """Multiply with each weight by oneDNN."""
        for weight in self.reordered:
            torch.ops.mkldnn._linear_pointwise(self.rows, weight, None, "none", [], "")

    def ours_on(self, isa: Isa) -> Callable[[], None]:
        """Return what multiplies with each weight on an instruction set."""
        native = library()
        assert native is not None

        def run() -> None:
            use_isa(native, isa)
            for weight in self.packed:
                weight.multiply(self.rows)

        return run


def _least(runs: list[Callable[[], None]], rounds: int) -> list[float]:
    """Return the least processor time of each, in seconds."""
    least = [float("inf")] * len(runs)
    for _ in range(rounds):
        for index, run in enumerate(runs):
            start = time.process_time()
            run()
            least[index] = min(least[index], time.process_time() - start)
    return least


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,16,32,128,512,2048")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Scores documents, compares choices and searches beams, with and without the cache.

::

    python -m benchmarks.scoring FOLDER --documents 100

Weights are random: what scores say means nothing, and they cost what they cost. Both engines run in
this process, one after the other; the cached one begins empty, so the shared tokens are computed.
Without the cache each beam has a copy of the prompt's blocks, and reads its own.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.shapes import SHAPES
from ostinato import LLM, BeamSearchParams


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call took."""
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in {
        "shared": 1000, "own": 200, "documents": 100, "beams": 32, "layers": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = {"num_hidden_layers": given.layers, "hidden_size": 512}
    tiny = SHAPES["tiny"]
    shape = replace(tiny, sizes={**tiny.sizes, **sizes})
    path = make_checkpoint(given.folder / f"scoring-{given.layers}", shape)
    draw = random.Random(0).randrange

    def tokens(number: int) -> list[int]:
        return [draw(100, shape.vocab_size) for _ in range(number)]

    shared, other, searched = (tokens(given.shared) for _ in range(3))
    beams = BeamSearchParams(beam_width=given.beams, max_tokens=16, ignore_eos=True)
    documents = [[*shared, *tokens(given.own)] for _ in range(given.documents)]
    choices = [tokens(8) for _ in range(4)]
    taken = []
    for is_cached in (True, False):
        llm = LLM(path, enable_prefix_caching=is_cached, num_blocks=4096)
        llm.embed([tokens(300)] * 4, use_tqdm=False)  # warm
        taken.append(
            [
                seconds(partial(llm.embed, documents, use_tqdm=False)),
                seconds(partial(llm.choose, other, choices)),
                seconds(partial(llm.beam_search, [searched], beams)),
            ]
        )
        llm.close()
    names = f"{given.documents} documents", "4 choices", f"{given.beams} beams"
    print("| | cached, s | no cache, s | times as fast |\n|---|--:|--:|--:|")
    for name, cached, uncached in zip(names, *taken, strict=True):
        print(f"| {name} | {cached:.2f} | {uncached:.2f} | {uncached / cached:.1f} |")


if __name__ == "__main__":
    main()

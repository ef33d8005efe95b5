"""What does the ghost cost, and how good are its estimates? No model: the cache alone.

::

    python benchmarks/ghost.py                             # cost, in both indexes
    python benchmarks/ghost.py --trace TRACE.npz --blocks 10000    # cost and estimates on a trace

Two caches, with a ghost and without, are served the same requests by turns, some dozens at a
time, and who comes first alternates; times are CPU time of the process. ``cost`` compares the
sums of both, which is what other programs on the machine disturb; ``by its books`` is what the
ghost itself says that it took, which is what it is held to.

Chats are those of ``benchmarks/heart.py``: conversations of 20 turns of 500 tokens behind one
system prompt of 4,096, in blocks of 16; when all have ended, others begin. With a trace, each
estimate is set beside a cache that really has that size or policy; ``--share`` says what
estimates may take, and 1 is as much as they want.
"""

import argparse
import gc
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
from ostinato.core.identity import Identity, PrefixKey

SYSTEM, CHATS, TURNS, TURN = 4_096, 64, 20, 500
BLOCKS = 42_000
SETS = {"radix": 8, "hash": 1}
"""How often all conversations are replaced; the hash index takes ten times as long."""

LAST = 2**32 - 1
"""Stands behind each path of a trace: the token that is always computed."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        tokens: Its prompt.
        published: How many of them become findable.
        at_s: When it comes.
        outputs: Tokens that were generated.
    """

    tokens: "array[int]"
    published: int
    at_s: float
    outputs: int = 0


class Served:
    """A cache and what serving it took."""

    def __init__(self, num_blocks: int, block_size: int = 16, **settings: object) -> None:
        """Make an empty one."""
        self.now_s, self.took_s, self._identity = 0.0, 0.0, Identity()
        config = CacheConfig(num_blocks, block_size, **settings)  # type: ignore[arg-type]
        self.cache = CacheManager(config, clock=lambda: self.now_s)

    def serve(self, requests: list[Request]) -> None:
        """Serve requests one after another."""
        cache = self.cache
        began = process_time()
        for request in requests:
            self.now_s = request.at_s
            key = PrefixKey(self._identity, request.tokens)
            admitted = cache.admit(key, cache.match(key))
            assert admitted is not None, "one request fits"
            cache.publish(admitted[0], request.published)
            cache.commit([admitted[0]])
            cache.release(admitted[0], request.published, request.outputs)
        self.took_s += process_time() - began


def chats(num_sets: int) -> Iterator[list[Request]]:
    """Yield the next turn of every conversation."""
    dice, now_s = random.Random(1), 0.0
    system = draw(dice, SYSTEM)
    for _ in range(num_sets):
        texts = [system[:] for _ in range(CHATS)]
        for _ in range(TURNS):
            for text in texts:
                text.extend(draw(dice, TURN))
            now_s += 10.0
            yield [Request(text[:], len(text), now_s) for text in texts]


def draw(dice: random.Random, num_tokens: int) -> "array[int]":
    """Draw token ids of a vocabulary of 65,536."""
    return array("I", array("H", dice.randbytes(2 * num_tokens)).tolist())


def trace(path: Path, num_blocks: int) -> Iterator[list[Request]]:
    """Yield a trace's requests; ids of blocks stand for tokens, in blocks of one."""
    held = np.load(path)
    ids, offsets, requests = held["ids"].tolist(), held["offsets"].tolist(), []
    for number, outputs in enumerate(held["output_len"].tolist()):
        mine = array("I", ids[offsets[number] : offsets[number + 1]][:num_blocks])
        at_s = float(held["ts_ms"][number]) / 1e3
        requests.append(Request(mine + array("I", [LAST]), len(mine), at_s, outputs))
    for first in range(0, len(requests), 64):
        yield requests[first : first + 64]


def by_turns(parts: Iterator[list[Request]], total: int, caches: list[Served]) -> None:
    """Serve all parts with both caches."""
    gc.collect()
    gc.disable()
    for number, part in enumerate(tqdm(parts, total=total, unit="part")):
        for served in caches[:: 1 if number % 2 else -1]:
            served.serve(part)
    gc.enable()


def row(name: str, plain: Served, haunted: Served) -> list[str]:
    """Lay out one scene's figures."""
    ghost = haunted.cache.ghost
    assert ghost is not None
    seen = max(1, ghost.num_seen)
    return [
        name,
        f"{seen:,}",
        f"{1e6 * plain.took_s / seen:,.1f}",
        f"{1e6 * haunted.took_s / seen:,.1f}",
        f"{100 * (haunted.took_s / plain.took_s - 1):+.2f} %",
        f"{100 * ghost.spent_s / haunted.took_s:.2f} %",
        str(sum(estimate.num_sampled for estimate in haunted.cache.stats.ghosts)),
    ]


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--trace", type=Path, help="replay a trace in place of chats")
    parser.add_argument("--blocks", type=int, default=10_000, help="of the cache, for a trace")
    parser.add_argument("--share", type=float, default=0.01, help="what estimates may take")
    options = parser.parse_args()
    table = Table(title=f"microseconds of CPU time per request, at ghost_share={options.share}")
    for column in ("scene", "requests", "without", "with", "cost", "by its books", "sampled"):
        table.add_column(column, justify="left" if column == "scene" else "right")
    if options.trace is None:
        for index, sets in SETS.items():
            plain = Served(BLOCKS, index=index, ghost_blocks=0)
            haunted = Served(BLOCKS, index=index, ghost_share=options.share)
            by_turns(chats(sets), sets * TURNS, [plain, haunted])
            table.add_row(*row(f"chats, {index}", plain, haunted))
        Console(width=110).print(table)
        return
    setting = {"block_size": 1, "seal_tails": False}
    plain = Served(options.blocks + 1, **setting, ghost_blocks=0)
    haunted = Served(options.blocks + 1, **setting, ghost_share=options.share)
    parts = list(trace(options.trace, options.blocks))
    by_turns(iter(parts), len(parts), [plain, haunted])
    table.add_row(*row(options.trace.stem, plain, haunted))
    Console(width=110).print(table)
    compare(options, parts, haunted, setting)


def compare(
    options: argparse.Namespace,
    parts: list[list[Request]],
    haunted: Served,
    setting: dict[str, object],
) -> None:
    """Print estimates beside caches that really are so."""
    stats = haunted.cache.stats
    table = Table(title=f"{options.trace.stem}: found here {100 * stats.first.hit_ratio:.1f} %")
    for column in ("memory", "policy", "estimate", "really", "error", "sampled"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for estimate in stats.ghosts:
        other = Served(estimate.num_blocks, **setting, policy=estimate.policy, ghost_blocks=0)
        for part in parts:
            other.serve(part)
        really = other.cache.stats.first.hit_ratio
        error = 100 * (estimate.hit_ratio - really)
        ratios = (f"{100 * estimate.hit_ratio:.1f} %", f"{100 * really:.1f} %", f"{error:+.1f}")
        table.add_row(f"{estimate.memory:g}", estimate.policy, *ratios, str(estimate.num_sampled))
    Console(width=110).print(table)


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Show the docstring as it stands."""


if __name__ == "__main__":
    main()

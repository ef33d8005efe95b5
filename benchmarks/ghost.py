"""Cost of the ghost, and errors of its estimates beside real caches. No model.

::

    python -m benchmarks.ghost                                     # cost, in both indexes
    python -m benchmarks.ghost --trace TRACE.npz --blocks 10000    # cost and estimates on a trace
    python -m benchmarks.ghost --trace TRACE.npz --blocks 10000 --seeds 5 --errors   # no cost

Two caches, with a ghost and without, serve the same requests by turns, some dozens at a time, and
which of them is first alternates; times are CPU time of the process. ``window`` is what the first
sampling window took, in requests of the cache without a ghost: in the long run one such window
comes in 1,300 / ``ghost_share`` requests. ``memory`` is what is allocated more with a ghost.

Chats are those of ``benchmarks/heart.py``: conversations of 20 turns of 500 tokens behind one
system prompt of 4,096, in blocks of 16; when all have ended, others begin. With a trace, each
estimate is compared with a real cache of that size or policy after some numbers of requests; each
seed samples other blocks. ``--idle`` replays what was sampled between requests, as an engine
with idle time does; without it, requests pay for it.
"""

import argparse
import gc
import random
import tracemalloc
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import parser_of
from ostinato.assembly import build_cache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.ghost.ghost import Ghost
from ostinato.settings import PolicyName, PrefixCacheConfig

SYSTEM, CHATS, TURNS, TURN = 4_096, 64, 20, 500
BLOCKS = 42_000
STOPS = (1_000, 2_000, 4_000, 8_000)
"""Requests after which estimates are compared with real caches, and at the end."""

SETS = {"radix": 8, "hash": 1}
"""How often all conversations are replaced; the hash index takes ten times as long."""

Settings = dict[str, Any]
"""Of a cache."""

LAST = 2**32 - 1
"""The last token of each path of a trace, which is always computed."""


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

    def __init__(self, num_blocks: int, block_size: int = 16, **settings: Any) -> None:
        """Make an empty one."""
        self.now_s, self.took_s, self._identity = 0.0, 0.0, Identity()
        config = PrefixCacheConfig(num_blocks, block_size, **settings)
        self.cache = build_cache(config, clock=lambda: self.now_s)

    def serve(self, requests: list[Request]) -> None:
        """Serve requests one after another."""
        cache = self.cache.manager
        began = process_time()
        for request in requests:
            self.now_s = request.at_s
            key = PrefixKey(self._identity, request.tokens)
            admitted = cache.admit(key, cache.match(key))
            assert admitted is not None, "one request fits"
            cache.publish(admitted[0], request.published)
            cache.commit()
            cache.release(admitted[0], request.published, request.outputs)
        self.took_s += process_time() - began

    @property
    def ghost(self) -> Ghost:
        """Its ghost; it has one."""
        assert self.cache.ghost is not None
        return self.cache.ghost


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


def memory(parts: list[list[Request]], **settings: Any) -> int:
    """Count the bytes that a cache has allocated when it has served all."""
    tracemalloc.start()
    served = Served(**settings)
    for part in parts:
        served.serve(part)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken


def row(name: str, plain: Served, watched: Served, bytes_taken: tuple[int, int]) -> list[str]:
    """Lay out what one scene cost."""
    seen, (without, with_it) = max(1, plain.cache.stats.first.num_requests), bytes_taken
    request_s = plain.took_s / seen
    return [
        name,
        f"{seen:,}",
        f"{1e6 * request_s:,.1f}",
        f"{1e6 * watched.took_s / seen:,.1f}",
        f"{(watched.took_s - plain.took_s) / request_s:,.0f} requests",
        "ended" if not watched.ghost.is_sampling else "runs on",
        f"{(with_it - without) / 1024:,.0f} KiB of {without / 1024:,.0f}",
    ]


def cost_table() -> Table:
    """Make the table of costs."""
    table = Table(title="microseconds of CPU time per request")
    columns = ("scene", "requests", "without", "with", "window", "which", "memory")
    for column in columns:
        table.add_column(column, justify="left" if column == "scene" else "right")
    return table


@dataclass
class Findings:
    """What was estimated of one size and policy, over all seeds.

    Attributes:
        first: Requests before the first estimate, by seed.
        errors: Errors of estimates in points, by number of requests.
        widths: Half widths of their intervals in points, by number of requests.
    """

    first: list[int] = field(default_factory=list)
    errors: dict[int, list[float]] = field(default_factory=dict)
    widths: dict[int, list[float]] = field(default_factory=dict)


def watch(options: argparse.Namespace, requests: list[Request], setting: Settings) -> Table:
    """Serve a trace once per seed, and compare estimates with real caches."""
    stops = [*(stop for stop in STOPS if stop < len(requests)), len(requests)]
    rows: dict[tuple[float, PolicyName], Findings] = {}
    really: dict[tuple[int, PolicyName], dict[int, float]] = {}
    gc.collect()
    gc.freeze()  # the requests
    for seed in tqdm(range(options.seeds), unit="seed"):
        watched = Served(options.blocks + 1, **setting, ghost_share=options.share)
        watched.ghost.seed = seed
        for number in range(0, len(requests), 50):
            watched.serve(requests[number : number + 50])
            if options.idle or number + 50 >= len(requests):
                watched.ghost.catch_up()
            done = min(number + 50, len(requests))
            for ghost in watched.cache.stats.ghosts:
                row = rows.setdefault((ghost.memory, ghost.policy), Findings())
                if len(row.first) <= seed:
                    row.first += [done] * (seed + 1 - len(row.first))
                if done in stops:
                    other = (ghost.num_blocks, ghost.policy)
                    if other not in really:
                        really[other] = ratios(requests, stops, *other, setting)
                    error = 100 * (ghost.hit_ratio - really[other][done])
                    row.errors.setdefault(done, []).append(error)
                    row.widths.setdefault(done, []).append(100 * ghost.error)
    return errors_table(options, stops, rows)


def ratios(
    requests: list[Request],
    stops: list[int],
    num_blocks: int,
    policy: PolicyName,
    setting: Settings,
) -> dict[int, float]:
    """Replay all on a real cache; returns hit ratios by the number of requests."""
    served = Served(num_blocks, **{**setting, "eviction_policy": policy}, ghost_blocks=0)
    done, known = 0, dict[int, float]()
    for stop in stops:
        served.serve([cut(request, num_blocks - 1) for request in requests[done:stop]])
        done, known[stop] = stop, served.cache.stats.first.hit_ratio
    return known


def cut(request: Request, num_blocks: int) -> Request:
    """Return a request that fits a pool of so many blocks and one."""
    if request.published <= num_blocks:
        return request
    tokens = request.tokens[:num_blocks] + array("I", [LAST])
    return replace(request, tokens=tokens, published=num_blocks)


def errors_table(
    options: argparse.Namespace, stops: list[int], rows: dict[tuple[float, PolicyName], Findings]
) -> Table:
    """Lay out mean error, greatest error and mean half width of the interval, in points."""
    title = f"{options.trace.stem}, {options.blocks:,} blocks: points wrong, mean / most ± said"
    table, all_errors = Table(title=title), dict[int, list[tuple[float, float]]]()
    for column in ("memory", "policy", "first", *(f"after {stop:,}" for stop in stops)):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for (times, policy), row in sorted(rows.items(), key=lambda item: (item[0][0] == 1, item[0])):
        cells = []
        for stop in stops:
            errors, widths = row.errors.get(stop, []), row.widths.get(stop, [])
            all_errors.setdefault(stop, []).extend(zip(errors, widths, strict=True))
            cells.append(cell([abs(error) for error in errors], widths))
        table.add_row(f"{times:g}", policy, f"{sorted(row.first)[len(row.first) // 2]:,}", *cells)
    cells = []
    for stop in stops:
        pairs = all_errors.get(stop, [])
        held = sum(abs(error) <= width for error, width in pairs) / max(1, len(pairs))
        mean = cell([abs(error) for error, _ in pairs], [width for _, width in pairs])
        cells.append(f"{mean}\n{held:.0%} within")
    table.add_section()
    table.add_row("", "all", "", *cells)
    return table


def cell(errors: list[float], widths: list[float]) -> str:
    """Lay out some errors."""
    if not errors:
        return "not yet"
    mean, said = sum(errors) / len(errors), sum(widths) / len(widths)
    return f"{mean:.1f} / {max(errors):.1f} ± {said:.1f}"


def main() -> None:
    """Read the command line, measure, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, help="replay a trace in place of chats")
    parser.add_argument("--sets", type=int, help="of chats, in the radix index alone")
    parser.add_argument("--blocks", type=int, default=10_000, help="of the cache, for a trace")
    parser.add_argument(
        "--share", type=float, default=0.01, help="of the cache's time, for estimates"
    )
    parser.add_argument("--policy", default="reuse_hazard", help="of the cache")
    parser.add_argument("--seeds", type=int, default=1, help="samples of the same traffic")
    parser.add_argument("--errors", action="store_true", help="measure errors and no cost")
    parser.add_argument("--idle", action="store_true", help="replay the sample in idle time")
    options = parser.parse_args()
    table, console = cost_table(), Console(width=130)
    if options.trace is None:
        for index, sets in SETS.items() if options.sets is None else [("radix", options.sets)]:
            settings: Settings = {
                "num_blocks": BLOCKS,
                "index": index,
                "eviction_policy": options.policy,
            }
            watching: Settings = {**settings, "ghost_share": options.share}
            plain, watched = Served(**settings, ghost_blocks=0), Served(**watching)
            by_turns(chats(sets), sets * TURNS, [plain, watched])
            some = list(chats(1))
            taken = memory(some, **settings, ghost_blocks=0), memory(some, **watching)
            table.add_row(*row(f"chats, {index}", plain, watched, taken))
        console.print(table)
        return
    setting: Settings = {"block_size": 1, "seal_tails": False, "eviction_policy": options.policy}
    parts = list(trace(options.trace, options.blocks))
    if not options.errors:
        size = {"num_blocks": options.blocks + 1, **setting}
        plain, watched = Served(**size, ghost_blocks=0), Served(**size, ghost_share=options.share)
        by_turns(iter(parts), len(parts), [plain, watched])
        taken = memory(parts, **size, ghost_blocks=0), memory(parts, **size)
        table.add_row(*row(options.trace.stem, plain, watched, taken))
        console.print(table)
    console.print(watch(options, [request for part in parts for request in part], setting))


if __name__ == "__main__":
    main()

"""Hit ratios of the eviction policies by size of the pool, on block traces.

::

    python -m benchmarks.eviction TRACE.npz ... --blocks 2000,5000,10000,20000
    python -m benchmarks.eviction TRACE.npz --policies lru,reuse_hazard --slice 0.5:1
    python -m benchmarks.eviction TRACE.npz --beside lru --policies reuse_hazard

Requests are served one by one in the order of their arrival, through the real cache manager: each
is looked up, admitted, published and released, and every miss is inserted. A trace lists the full
512-token blocks of each prompt by prefix-chained ids; an id is taken for a token, and a block of
the cache has one of them. Outputs are not cached. Hits are those among the listed blocks, as a
share of all prompt tokens, the partial last block of each prompt included.

``--beside`` serves each policy and another one by turns, 64 requests at a time, and prints CPU time
per request of both, bytes per block of the pool that each allocates, how far the first one was
behind at its worst moment, and at its end, in points of all prompt tokens until then.

The bounds are those of ``ostinato.lab.simulate.simulation``: Belady's, and the same with bypass.
"""

import argparse
import gc
import time
import tracemalloc
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import parser_of, write_json
from ostinato.assembly import build_cache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.lab.replay.serial_replay import replay_serially
from ostinato.lab.simulate.simulation import belady_hits
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.traces.traces import read_npz
from ostinato.settings import PolicyName, PrefixCacheConfig

LAST = 2**32 - 1
"""No trace has as many ids."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
BOUNDS = ("belady", "belady_bypass")


def read(path: Path, part: tuple[float, float] = (0.0, 1.0)) -> BlockTrace:
    """Read a trace, or the requests in a part of it."""
    trace = read_npz(path)
    first, last = (int(share * len(trace)) for share in part)
    return trace.part(first, last)


class Served:
    """A cache of blocks of one token, and what serving it took."""

    def __init__(self, num_blocks: int, policy: PolicyName) -> None:
        """Make an empty one."""
        self.now_s, self.took_s, self.hits = 0.0, 0.0, 0
        # Law 4 keeps a prompt's last token from hitting, and here each token stands for a block
        # that may: a last token follows of which nothing is published, in a block that is always
        # free.
        config = PrefixCacheConfig(
            num_blocks + 1, 1, eviction_policy=policy, seal_tails=False, ghost_blocks=0
        )
        self.cache = build_cache(config, lambda: self.now_s).manager
        self._num_blocks, self._identity = num_blocks, Identity()

    def serve(self, part: BlockTrace, paths: list[list[int]]) -> None:
        """Serve requests, whose paths are lists already."""
        arrivals, outputs = part.arrival_s.tolist(), part.output_tokens.tolist()
        cache, begun = self.cache, time.process_time()
        for self.now_s, whole, num_outputs in zip(arrivals, paths, outputs, strict=True):
            path = whole[: self._num_blocks]
            key = PrefixKey(self._identity, [*path, LAST])
            match = cache.match(key)
            self.hits += len(match.blocks)
            admitted = cache.admit(key, match)
            assert admitted is not None, "one request fits, for its path was cut to the pool"
            cache.publish(admitted[0], len(path))
            cache.commit()
            cache.release(admitted[0], len(path), num_outputs)
        self.took_s += time.process_time() - begun


def compare(trace: BlockTrace, num_blocks: int, pair: tuple[PolicyName, ...]) -> tuple[str, ...]:
    """Serve a policy and another one by turns; return what each took, and the worst moment."""
    caches, worst, seen = [Served(num_blocks, policy) for policy in pair], 0.0, 0
    paths = trace.paths()
    gc.collect()
    gc.disable()
    for first in range(0, len(trace), 64):
        last = min(first + 64, len(trace))
        for served in caches[:: 1 if first % 128 else -1]:
            served.serve(trace.part(first, last), paths[first:last])
        seen += int(trace.input_tokens[first:last].sum())
        lead = 100 * trace.block_tokens * (caches[0].hits - caches[1].hits) / seen
        worst = min(worst, lead)
    gc.enable()
    took = [1e6 * served.took_s / len(trace) for served in caches]
    sizes = [allocated(trace, num_blocks, policy) / num_blocks for policy in pair]
    return (
        *(f"{each:,.0f}" for each in took),
        f"{took[0] / took[1]:.1f}",
        *(f"{size:,.0f}" for size in sizes),
        f"{worst:+.2f}",
        f"{lead:+.2f}",
    )


def allocated(trace: BlockTrace, num_blocks: int, policy: PolicyName) -> int:
    """Count the bytes that a cache has allocated when it has served all."""
    paths = trace.paths()
    gc.collect()
    tracemalloc.start()
    served = Served(num_blocks, policy)
    served.serve(trace, paths)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken


def main() -> None:
    """Read the command line, replay, and print a table."""
    parser = parser_of(__doc__, has_json=True)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--blocks", default="2000,5000,10000,20000")
    parser.add_argument("--policies", default=",".join((*POLICIES, *BOUNDS)))
    parser.add_argument("--slice", default="0:1", help="part of each trace, as 0.5:1")
    parser.add_argument("--beside", choices=POLICIES, help="compare with this policy")
    options = parser.parse_args()
    sizes = [int(size) for size in options.blocks.split(",")]
    first, last = map(float, options.slice.split(":"))
    policies, figures = options.policies.split(","), {}
    if options.beside is not None:
        beside(options, sizes, policies, (first, last))
        return
    bar = tqdm(total=len(options.traces) * len(policies) * len(sizes), unit="replay")
    for path in options.traces:
        trace = read(path, (first, last))
        for policy in policies:
            for size in sizes:
                figures[f"{path.stem} {policy} {size}"] = measure(trace, size, policy)
                bar.update()
    bar.close()
    show([path.stem for path in options.traces], policies, sizes, figures)
    write_json(options.json, figures)


def beside(
    options: argparse.Namespace, sizes: list[int], policies: list[str], part: tuple[float, float]
) -> None:
    """Print what each policy takes beside another one, a row for each trace and size."""
    columns = ("us/request", "other's", "times", "bytes/block", "other's", "worst", "end")
    table = Table("trace", "blocks", "policy", *columns, title=f"beside {options.beside}")
    for path in options.traces:
        trace = read(path, part)
        for size in sizes:
            for policy in policies:
                pair: Any = (policy, options.beside)
                cells = compare(trace, size, pair)
                table.add_row(path.stem, f"{size:,}", policy, *cells)
    Console(width=120).print(table)


def measure(trace: BlockTrace, num_blocks: int, policy: Any) -> tuple[float, float]:
    """Replay once; return the hit ratio in percent of tokens, and seconds of CPU time."""
    begun = time.process_time()
    if policy in BOUNDS:
        hits = belady_hits(trace.paths(), num_blocks, bypass=policy == "belady_bypass")
        ratio = hits * trace.block_tokens / max(1, trace.total_input_tokens)
    else:
        ratio = replay_serially(trace, num_blocks, policy).hit_ratio
    return round(100 * ratio, 2), round(time.process_time() - begun, 1)


def show(
    traces: list[str],
    policies: list[str],
    sizes: list[int],
    figures: dict[str, tuple[float, float]],
) -> None:
    """Print hit ratios, one table per trace."""
    for trace in traces:
        table = Table(title=f"{trace}: token hits in %, by blocks in the pool")
        for name in ("policy", *map(str, sizes)):
            table.add_column(name, justify="left" if name == "policy" else "right")
        for policy in policies:
            cells = [f"{figures[f'{trace} {policy} {size}'][0]:.2f}" for size in sizes]
            table.add_row(policy, *cells)
        Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Hit ratios of every eviction policy by size of the pool, on block traces.

::

    python benchmarks/eviction.py TRACE.npz ... --blocks 2000,5000,10000,20000
    python benchmarks/eviction.py TRACE.npz --policies lru,reuse_hazard --slice 0.5:1
    python benchmarks/eviction.py TRACE.npz --beside lru --policies reuse_hazard

Requests are served one by one in the order of their arrival, through the real cache manager: each
is looked up, admitted, published and released, and every miss is inserted. A trace lists the full
512-token blocks of each prompt by prefix-chained ids; an id is taken for a token, and a block of
the cache has one of them. Outputs are not cached. Hits are those among the listed blocks, as a
share of all prompt tokens, the partial last block of each prompt included.

``--beside`` serves each policy and another one by turns, 64 requests at a time, and prints CPU time
per request of both, bytes per block of the pool that each allocates, how far the first one was
behind at its worst moment, and at its end, in points of all prompt tokens until then.

The bounds are those of ``ostinato.lab.simulation``: Belady, who knows the future, evicting leaves
only, and with leave not to insert.
"""

import argparse
import gc
import json
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ostinato.assembly import build_cache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.lab.policies import SIMULATED_POLICIES, SimulatedPolicyName, policy_factory
from ostinato.lab.simulation import belady_hits
from ostinato.settings import IndexName, PrefixCacheConfig

BLOCK_TOKENS = 512
LAST = 2**32 - 1
"""No trace has as many ids."""

BOUNDS = ("belady", "belady_bypass")


@dataclass(frozen=True)
class Requests:
    """The requests of a trace.

    Attributes:
        at_s: Arrival, shape (num_requests,).
        paths: Block ids of each prompt, in token order.
        output_tokens: Length of each output.
        input_tokens: Length of each prompt, the partial last block included.
    """

    at_s: list[float]
    paths: list[list[int]]
    output_tokens: list[int]
    input_tokens: list[int]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all."""
        return sum(self.input_tokens)


def read(path: Path, part: tuple[float, float] = (0.0, 1.0)) -> Requests:
    """Read a trace, or the requests in a part of it."""
    held = np.load(path)
    first, last = (int(share * len(held["ts_ms"])) for share in part)
    ids, offsets = held["ids"].tolist(), held["offsets"].tolist()
    return Requests(
        (held["ts_ms"][first:last] / 1e3).tolist(),
        [ids[offsets[i] : offsets[i + 1]] for i in range(first, last)],
        held["output_len"][first:last].tolist(),
        held["input_len"][first:last].tolist(),
    )


class Served:
    """A cache of blocks of one token, and what serving it took."""

    def __init__(self, num_blocks: int, policy: SimulatedPolicyName, index: IndexName) -> None:
        """Make an empty one."""
        self.now_s, self.took_s, self.hits = 0.0, 0.0, 0
        # Law 4 keeps a prompt's last token from hitting, and here each token stands for a block
        # that may: a last token follows of which nothing is published, in a block that is always
        # free.
        config = PrefixCacheConfig(num_blocks + 1, 1, index=index, seal_tails=False, ghost_blocks=0)
        self.cache = build_cache(config, lambda: self.now_s, policy=policy_factory(policy)).manager
        self._num_blocks, self._identity = num_blocks, Identity()

    def serve(self, requests: Requests, first: int, last: int) -> None:
        """Serve some of the requests."""
        cache, begun = self.cache, time.process_time()
        for number in range(first, last):
            self.now_s, path = requests.at_s[number], requests.paths[number][: self._num_blocks]
            key = PrefixKey(self._identity, [*path, LAST])
            match = cache.match(key)
            self.hits += len(match.blocks)
            admitted = cache.admit(key, match)
            assert admitted is not None, "one request fits, for its path was cut to the pool"
            cache.publish(admitted[0], len(path))
            cache.commit()
            cache.release(admitted[0], len(path), requests.output_tokens[number])
        self.took_s += time.process_time() - begun


def replay(
    requests: Requests, num_blocks: int, policy: SimulatedPolicyName, index: IndexName
) -> int:
    """Serve every request; return the blocks that hit."""
    served = Served(num_blocks, policy, index)
    served.serve(requests, 0, len(requests.paths))
    served.cache.check()
    return served.hits


def compare(
    requests: Requests, num_blocks: int, pair: tuple[SimulatedPolicyName, ...], index: IndexName
) -> tuple[str, ...]:
    """Serve a policy and another one by turns; return what each took, and the worst moment."""
    caches, worst, seen = [Served(num_blocks, policy, index) for policy in pair], 0.0, 0
    gc.collect()
    gc.disable()
    for first in range(0, len(requests.paths), 64):
        last = min(first + 64, len(requests.paths))
        for served in caches[:: 1 if first % 128 else -1]:
            served.serve(requests, first, last)
        seen += sum(requests.input_tokens[first:last])
        lead = 100 * BLOCK_TOKENS * (caches[0].hits - caches[1].hits) / seen
        worst = min(worst, lead)
    gc.enable()
    took = [1e6 * served.took_s / len(requests.paths) for served in caches]
    sizes = [allocated(requests, num_blocks, policy, index) / num_blocks for policy in pair]
    return (
        *(f"{each:,.0f}" for each in took),
        f"{took[0] / took[1]:.1f}",
        *(f"{size:,.0f}" for size in sizes),
        f"{worst:+.2f}",
        f"{lead:+.2f}",
    )


def allocated(
    requests: Requests, num_blocks: int, policy: SimulatedPolicyName, index: IndexName
) -> int:
    """Count the bytes that a cache has allocated when it has served all."""
    gc.collect()
    tracemalloc.start()
    served = Served(num_blocks, policy, index)
    served.serve(requests, 0, len(requests.paths))
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken


def main() -> None:
    """Read the command line, replay, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--blocks", default="2000,5000,10000,20000")
    parser.add_argument("--policies", default=",".join((*SIMULATED_POLICIES, *BOUNDS)))
    parser.add_argument("--slice", default="0:1", help="part of each trace, as 0.5:1")
    parser.add_argument("--index", default="radix", choices=get_args(IndexName))
    parser.add_argument("--beside", choices=SIMULATED_POLICIES, help="compare with this policy")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    sizes = [int(size) for size in options.blocks.split(",")]
    first, last = map(float, options.slice.split(":"))
    policies, figures = options.policies.split(","), {}
    if options.beside is not None:
        beside(options, sizes, policies, (first, last))
        return
    bar = tqdm(total=len(options.traces) * len(policies) * len(sizes), unit="replay")
    for path in options.traces:
        requests = read(path, (first, last))
        for policy in policies:
            for size in sizes:
                figures[f"{path.stem} {policy} {size}"] = measure(
                    requests, size, policy, options.index
                )
                bar.update()
    bar.close()
    show([path.stem for path in options.traces], policies, sizes, figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def beside(
    options: argparse.Namespace, sizes: list[int], policies: list[str], part: tuple[float, float]
) -> None:
    """Print what each policy takes beside another one, a row for each trace and size."""
    columns = ("us/request", "other's", "times", "bytes/block", "other's", "worst", "end")
    table = Table("trace", "blocks", "policy", *columns, title=f"beside {options.beside}")
    for path in options.traces:
        requests = read(path, part)
        for size in sizes:
            for policy in policies:
                pair: Any = (policy, options.beside)
                cells = compare(requests, size, pair, options.index)
                table.add_row(path.stem, f"{size:,}", policy, *cells)
    Console(width=120).print(table)


def measure(
    requests: Requests, num_blocks: int, policy: Any, index: IndexName
) -> tuple[float, float]:
    """Replay once; return the hit ratio in percent of tokens, and seconds of CPU time."""
    begun = time.process_time()
    if policy in BOUNDS:
        hits = belady_hits(requests.paths, num_blocks, bypass=policy == "belady_bypass")
    else:
        hits = replay(requests, num_blocks, policy, index)
    ratio = 100 * hits * BLOCK_TOKENS / max(1, requests.num_tokens)
    return round(ratio, 2), round(time.process_time() - begun, 1)


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

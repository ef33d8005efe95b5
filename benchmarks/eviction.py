"""Hit ratios of every eviction policy by size of the pool, on block traces.

::

    python benchmarks/eviction.py TRACE.npz ... --blocks 2000,5000,10000,20000
    python benchmarks/eviction.py TRACE.npz --policies lru,reuse_hazard --slice 0.5:1

Requests are served one by one in the order of their arrival, through the real cache manager: each
is looked up, admitted, published and released, and every miss is inserted. A trace lists the full
512-token blocks of each prompt by prefix-chained ids; an id is taken for a token, and a block of
the cache has one of them. Outputs are not cached. Hits are those among the listed blocks, as a
share of all prompt tokens, the partial last block of each prompt included.

The bounds are those of ``ostinato.lab.bounds``: Belady, who knows the future, evicting leaves
only, and with leave not to insert.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig, IndexName
from ostinato.core.identity import Identity, PrefixKey
from ostinato.lab.bounds import belady_hits
from ostinato.lab.policies import SIMULATED_POLICIES, SimulatedPolicyName, policy_factory

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
        num_tokens: Prompt tokens of all.
    """

    at_s: list[float]
    paths: list[list[int]]
    output_tokens: list[int]
    num_tokens: int


def read(path: Path, part: tuple[float, float] = (0.0, 1.0)) -> Requests:
    """Read a trace, or the requests in a part of it."""
    held = np.load(path)
    first, last = (int(share * len(held["ts_ms"])) for share in part)
    ids, offsets = held["ids"].tolist(), held["offsets"].tolist()
    return Requests(
        (held["ts_ms"][first:last] / 1e3).tolist(),
        [ids[offsets[i] : offsets[i + 1]] for i in range(first, last)],
        held["output_len"][first:last].tolist(),
        int(held["input_len"][first:last].sum()),
    )


def replay(
    requests: Requests, num_blocks: int, policy: SimulatedPolicyName, index: IndexName
) -> int:
    """Serve every request; return the blocks that hit."""
    now_s = 0.0
    # Law 4 keeps a prompt's last token from hitting, and here each token stands for a block that
    # may: a last token that nothing is published of follows, in a block that is always free.
    config = CacheConfig(num_blocks + 1, 1, index, seal_tails=False, ghost_blocks=0)
    cache = CacheManager(config, lambda: now_s, policy=policy_factory(policy))
    identity, hits = Identity(), 0
    for number, whole in enumerate(requests.paths):
        now_s, path = requests.at_s[number], whole[:num_blocks]
        key = PrefixKey(identity, [*path, LAST])
        match = cache.match(key)
        hits += len(match.blocks)
        admitted = cache.admit(key, match)
        assert admitted is not None, "one request fits, for its path was cut to the pool"
        table, _ = admitted
        cache.publish(table, len(path))
        cache.commit([table])
        cache.release(table, len(path), requests.output_tokens[number])
    cache.check()
    return hits


def main() -> None:
    """Read the command line, replay, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--blocks", default="2000,5000,10000,20000")
    parser.add_argument("--policies", default=",".join((*SIMULATED_POLICIES, *BOUNDS)))
    parser.add_argument("--slice", default="0:1", help="part of each trace, as 0.5:1")
    parser.add_argument("--index", default="radix", choices=get_args(IndexName))
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    sizes = [int(size) for size in options.blocks.split(",")]
    first, last = map(float, options.slice.split(":"))
    policies, figures = options.policies.split(","), {}
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


def measure(
    requests: Requests, num_blocks: int, policy: str, index: IndexName
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


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Show the docstring as it stands."""


if __name__ == "__main__":
    main()

"""Blocks per second of the serial replay.

::

    python -m benchmarks.replay_speed TRACE ... --blocks 2000,20000

One core, LRU, the fastest of three runs by CPU time; a trace is of any kind that ``ostinato
simulate`` reads.
"""

import time
from pathlib import Path

from benchmarks.command_line import parser_of
from ostinato.lab.replay.serial_replay import replay_serially
from ostinato.lab.traces.traces import read_trace

REPEATS = 3


def main() -> None:
    """Read the command line, replay, and print a line per trace and size."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--blocks", default="2000,20000")
    options = parser.parse_args()
    for path in options.traces:
        trace = read_trace(path)
        for size in map(int, options.blocks.split(",")):
            seconds = []
            for _ in range(REPEATS):
                begun = time.process_time()
                result = replay_serially(trace, size, "lru")
                seconds.append(time.process_time() - begun)
            speed = trace.num_lookups / min(seconds)
            print(
                f"{path.name}: {size:,} blocks, {result.hit_ratio:.2%} hit, {speed:,.0f} blocks/s"
            )


if __name__ == "__main__":
    main()

"""Makes traces of agents' traffic, to try an eviction policy on traffic it was not tuned on.

::

    python -m benchmarks.agent_trace OUT.npz --seed 3 --kind coding

Sessions arrive at random and run loops of tool calls: each request is all that came before in its
session, and some new blocks. Tools answer within seconds, people after heavy-tailed think times.
Some sessions start sub-agents, which share the tools' prefix and nothing else; some are summarised
and go on with a short history. Sessions of one product share a system prompt with its tools.

The file has the fields of Mooncake's traces as ``benchmarks/eviction.py`` reads them, in blocks of
512 tokens.
"""

import heapq
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.command_line import parser_of

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind of traffic.

    Attributes:
        sessions_per_hour: Arrivals.
        products: Different system prompts, and the mean of their blocks.
        steps: Mean tool calls between two messages of a person.
        messages: Mean messages of a session.
        growth: Mean new blocks of a request.
        tool_s: Median seconds of a tool.
        think_s: Scale and shape of a person's think time, Pareto.
        sub_agents: Chance that a step starts one.
        summary: Blocks at which a history is summarised.
    """

    sessions_per_hour: float = 120.0
    products: tuple[int, int] = (6, 24)
    steps: float = 9.0
    messages: float = 5.0
    growth: float = 3.0
    tool_s: float = 6.0
    think_s: tuple[float, float] = (25.0, 1.1)
    sub_agents: float = 0.04
    summary: int = 320


KINDS = {
    "coding": Kind(),
    "support": Kind(600.0, (3, 10), 2.5, 6.0, 1.2, 2.5, (40.0, 1.4), 0.0, 120),
    "research": Kind(60.0, (4, 16), 14.0, 2.5, 6.0, 15.0, (60.0, 0.9), 0.15, 400),
    "batch": Kind(240.0, (12, 30), 20.0, 1.0, 2.0, 4.0, (10.0, 2.0), 0.02, 250),
}


@dataclass(order=True)
class Session:
    """One session or sub-agent; ordered by when its next request comes."""

    at_s: float
    number: int
    prefix: list[int] = field(compare=False)
    path: list[int] = field(compare=False)
    num_left: int = field(compare=False)
    is_sub_agent: bool = field(compare=False, default=False)


class Traffic:
    """Requests of one kind."""

    def __init__(self, kind: Kind, seed: int, hours: float) -> None:
        """Let sessions arrive."""
        self.kind, self.rng, self.end_s = kind, random.Random(seed), 3600.0 * hours
        self.num_ids = self.num_sessions = 0
        number, blocks = kind.products
        self.prefixes = [self.new(self.rng.randint(blocks // 2, 2 * blocks)) for _ in range(number)]
        self.waiting: list[Session] = []
        at_s = 0.0
        while (at_s := at_s + self.rng.expovariate(kind.sessions_per_hour / 3600)) < self.end_s:
            prefix = self.prefixes[min(int(self.rng.expovariate(0.6)), number - 1)]
            self.start(at_s, prefix, 1 + int(self.rng.expovariate(1 / self.kind.messages)))

    def new(self, num_blocks: int) -> list[int]:
        """Return ids that no block had before."""
        first = self.num_ids
        self.num_ids += num_blocks
        return list(range(first, self.num_ids))

    def start(self, at_s: float, prefix: list[int], messages: int, sub_agent: bool = False) -> None:
        """Let a session begin."""
        steps = sum(1 + int(self.rng.expovariate(1 / self.kind.steps)) for _ in range(messages))
        self.num_sessions += 1
        session = Session(at_s, self.num_sessions, prefix, prefix[:], steps, sub_agent)
        heapq.heappush(self.waiting, session)

    def requests(self) -> list[tuple[float, list[int], int]]:
        """Serve sessions until the time is over; return arrivals, paths and output tokens."""
        results = []
        while self.waiting and self.waiting[0].at_s < self.end_s:
            session = heapq.heappop(self.waiting)
            path = session.path
            path += self.new(1 + int(self.rng.expovariate(1 / self.kind.growth)))
            if len(path) > self.kind.summary:
                path[:] = [*session.prefix, *self.new(self.kind.summary // 8)]
            outputs = int(self.rng.lognormvariate(5.0, 0.9))
            results.append((session.at_s, path[:], outputs))
            session.num_left -= 1
            if self.rng.random() < self.kind.sub_agents and not session.is_sub_agent:
                self.start(session.at_s + 1.0, session.prefix, 1, sub_agent=True)
            if session.num_left > 0:
                session.at_s += outputs / 50 + self.pause_s(session)
                heapq.heappush(self.waiting, session)
        return results

    def pause_s(self, session: Session) -> float:
        """Draw the seconds until the next request: a tool's, or now and then a person's."""
        if session.is_sub_agent or self.rng.random() > 1 / self.kind.steps:
            return self.rng.lognormvariate(0.0, 0.8) * self.kind.tool_s
        scale, shape = self.kind.think_s
        return min(3600.0, scale * self.rng.paretovariate(shape))


def main() -> None:
    """Read the command line and write a trace."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="coding")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=1.5)
    options = parser.parse_args()
    results = Traffic(KINDS[options.kind], options.seed, options.hours).requests()
    paths = [path for _, path, _ in results]
    np.savez_compressed(
        options.out,
        ts_ms=np.array([1e3 * at_s for at_s, _, _ in results], np.int64),
        input_len=np.array([BLOCK_TOKENS * len(path) + BLOCK_TOKENS // 2 for path in paths]),
        output_len=np.array([outputs for _, _, outputs in results], np.int64),
        offsets=np.cumsum([0, *map(len, paths)]),
        ids=np.array([block for path in paths for block in path], np.int32),
    )
    distinct = len({block for path in paths for block in path})
    print(f"{len(paths):,} requests, {sum(map(len, paths)):,} blocks, {distinct:,} distinct")


if __name__ == "__main__":
    main()

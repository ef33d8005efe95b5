"""Processor time of one decision of the router on a long prompt, by slices.

::

    python -m benchmarks.decision              # prompts of 100,000 tokens, four workers

A new prompt is added to the tree; the same prompt again is only looked up.
"""

import random
import time
from array import array

from benchmarks.command_line import parser_of
from ostinato.router import Router, RouteRequest


def main() -> None:
    """Measure, and print a line per decision."""
    options = parser_of(__doc__)
    options.add_argument("--tokens", type=int, default=100_000)
    options.add_argument("--prompts", type=int, default=5)
    given = options.parse_args()
    router, chance = Router(), random.Random(0)
    for name in "abcd":
        router.add_worker(name, block_size=16)
    for _ in range(given.prompts):
        request = RouteRequest(array("I", chance.choices(range(150_000), k=given.tokens)))
        for what in ("new", "again"):
            times = _decide(router, request)
            print(
                f"{what:5}  {sum(times) * 1e3:5.1f} ms in {len(times)} slices, median "
                f"{sorted(times)[len(times) // 2] * 1e3:.2f}, longest {max(times) * 1e3:.2f}"
            )


def _decide(router: Router, request: RouteRequest) -> list[float]:
    """Route a request; returns the seconds of each slice."""
    steps, times, decision = router.route_in_slices(request, 0.0), list[float](), None
    while decision is None:
        begun_s = time.process_time()
        try:
            next(steps)
        except StopIteration as end:
            decision = end.value
        times.append(time.process_time() - begun_s)
    router.finished(decision, 0.0)
    return times


if __name__ == "__main__":
    main()

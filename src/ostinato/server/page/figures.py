"""Time series of the page: tokens, latencies, queue and memory of the last minutes."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, astuple
from statistics import median
from typing import Any

from ostinato.engine.loop.snapshot import Snapshot
from ostinato.errors import EngineStopped
from ostinato.observe.introspection import BlockState
from ostinato.server.telemetry.observer import Observer, PromptTokens, ServedRequest
from ostinato.server.telemetry.tenant_usage import HISTORY_S, FirstToken, TenantCounters

MAX_DOTS = 400
"""Requests in the chart of first tokens."""

COLD_BELOW, WARM_FROM = 0.1, 0.5
"""Hit shares below and above which a request counts as cold or warm."""

GAPS_EVERY_S = 5
"""Seconds per point in the chart of inter-token latencies."""

PERCENTILES = (0.5, 0.95, 0.99)

SHOWN_STATES = (BlockState.PRIVATE, BlockState.HELD, BlockState.EVICTABLE, BlockState.UNUSED)
"""The states of blocks, in the order in which a cell of several blocks is named after one."""


class LoadHistory(Observer):
    """Queue and memory per second: an observer that samples while there are requests."""

    def __init__(
        self, look: Callable[[], Awaitable[Snapshot]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without samples; ``look`` reads the engine."""
        self._look = look
        self._clock = clock
        self._rows: deque[tuple[int, list[int]]] = deque(maxlen=HISTORY_S)
        self._sampling: asyncio.Task[None] | None = None

    def accepted(self, record: ServedRequest) -> None:
        """Sample between two steps, at most once a second; no request waits for it."""
        if self._sampling is not None and not self._sampling.done():
            return
        if not self._rows or self._rows[-1][0] < int(self._clock()):
            self._sampling = asyncio.create_task(self._sample())

    first_token = finished = accepted

    def note(self, snapshot: Snapshot) -> None:
        """Keep the last sample of a second."""
        second = int(self._clock())
        if self._rows and self._rows[-1][0] == second:
            self._rows.pop()
        blocks = [snapshot.states[state] for state in SHOWN_STATES]
        self._rows.append((second, [snapshot.num_running, snapshot.num_waiting, *blocks]))

    async def _sample(self) -> None:
        with suppress(EngineStopped):
            self.note(await self._look())

    def rows(self) -> list[list[int]]:
        """List: how long ago, running, waiting, and blocks private, held, evictable, unused."""
        second = int(self._clock())
        return [[second - at, *row] for at, row in self._rows if second - at < HISTORY_S]


def token_counts(prompt: PromptTokens) -> dict[str, Any]:
    """Return prompt tokens by origin, as JSON."""
    return {**asdict(prompt), "prompt": prompt.total, "hit_ratio": prompt.hit_share}


def totals(account: TenantCounters) -> dict[str, Any]:
    """Return totals since the server started."""
    counts = {"requests": account.num_requests, "output": account.output_tokens}
    return counts | token_counts(account.prompt) | {"saved": account.prompt.hit}


def recent(account: TenantCounters, now_s: float, seconds: int) -> PromptTokens:
    """Return totals of the last seconds."""
    total = PromptTokens()
    for second in account.seconds.values():
        if second.number > now_s - seconds:
            total.add(second.prompt)
    return total


def history(account: TenantCounters, now_s: float) -> dict[str, Any]:
    """List seconds with activity: how long ago, and tokens by origin."""
    rows = [
        [int(now_s) - second.number, *astuple(second.prompt)]
        for second in account.seconds.values()
        if second.number > now_s - HISTORY_S
    ]
    return {"seconds": HISTORY_S, "rows": rows}


def first_tokens(firsts: Iterable[FirstToken], now_s: float) -> dict[str, Any]:
    """Compare first tokens of prompts that were hardly cached with those that mostly were."""
    recent = [first for first in firsts if first.at_s > now_s - HISTORY_S]
    cold = [first.took_s for first in recent if first.hit_share < COLD_BELOW]
    warm = [first.took_s for first in recent if first.hit_share >= WARM_FROM]
    dots = [
        [round(now_s - one.at_s, 2), round(one.took_s, 5), round(one.hit_share, 3), one.request_id]
        for one in recent[-MAX_DOTS:]
    ]
    return {
        "cold": {"count": len(cold), "median_s": median(cold) if cold else None},
        "warm": {"count": len(warm), "median_s": median(warm) if warm else None},
        "percentiles": percentiles([first.took_s for first in recent]),
        "dots": dots,
    }


def percentiles(values: list[float]) -> list[float] | None:
    """Return the median, the 95th and the 99th percentile; None without samples."""
    if not values:
        return None
    ordered = sorted(values)
    return [round(ordered[min(len(ordered) - 1, int(len(ordered) * p))], 6) for p in PERCENTILES]


def generated(account: TenantCounters, now_s: float) -> dict[str, Any]:
    """Return generated tokens per second, and percentiles of the inter-token latency.

    A second is counted when it is over; rows are seconds ago and tokens, or percentiles.
    """
    tokens, groups = [], dict[int, list[float]]()
    last_minute: list[float] = []
    for second in account.seconds.values():
        ago = int(now_s) - second.number
        if 0 < ago < HISTORY_S:
            tokens.append([ago, round(second.generated, 1)])
            groups.setdefault(second.number // GAPS_EVERY_S, []).extend(second.gaps_s)
            last_minute += second.gaps_s if ago <= 60 else []
    gaps = [
        [int(now_s) - (group + 1) * GAPS_EVERY_S + GAPS_EVERY_S // 2, *(percentiles(samples) or ())]
        for group, samples in groups.items() if samples
    ]  # fmt: skip
    return {
        "tokens": tokens,
        "per_second": sum(count for ago, count in tokens if ago <= GAPS_EVERY_S) / GAPS_EVERY_S,
        "gaps": gaps,
        "percentiles": percentiles(last_minute),
    }


def ended_requests(account: TenantCounters, now_s: float) -> list[dict[str, Any]]:
    """List the latest requests, newest first."""
    rows = [asdict(request) for request in reversed(account.ended)]
    return [{"ago_s": now_s - row.pop("at_s"), **row} for row in rows]

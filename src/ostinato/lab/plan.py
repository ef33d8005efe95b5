"""How much memory is worth buying for the cache, and what does it save?

Memory against hits is a curve that rises steeply and then flattens. Three points on it matter:
where it bends (the *knee*), where the saved compute last outweighs the price of the memory (the
*best buy*), and where it ends: a cache that never evicts, above which nothing is to be had.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ostinato.core.config import at_least
from ostinato.core.errors import ConfigError
from ostinato.lab.block_trace import BlockTrace
from ostinato.lab.cost_model import CostModel
from ostinato.lab.serial_replay import SerialResult

GIB = 2**30
MOST_POINTS = 200
"""Sizes of a curve: more could not be told apart in a plot."""

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost, in one currency.

    Attributes:
        compute_per_hour: Of the machine that computes prompts.
        memory_per_gib_hour: Of memory for the cache.
    """

    compute_per_hour: float
    memory_per_gib_hour: float

    def __post_init__(self) -> None:
        """Refuse prices below zero.

        Raises:
            ConfigError: One is.
        """
        for name in ("compute_per_hour", "memory_per_gib_hour"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 0")


@dataclass(frozen=True, slots=True)
class Option:
    """One size of the cache, and what it brings per hour of the trace.

    Attributes:
        num_blocks: Blocks of the trace.
        memory_bytes: What they take.
        hit_ratio: Share of prompt tokens that hit, 0 to 1.
        saved_tokens: Prompt tokens per hour that need not be computed.
        saved_share: Share of the prefill work that is saved, attention included, 0 to 1.
        saved_s: Seconds of prefill per hour that are saved.
        saved_money: What they cost, per hour.
        memory_money: What the memory costs, per hour.
    """

    num_blocks: int
    memory_bytes: int
    hit_ratio: float
    saved_tokens: float
    saved_share: float
    saved_s: float
    saved_money: float
    memory_money: float

    @property
    def net_money(self) -> float:
        """What is left per hour."""
        return self.saved_money - self.memory_money


@dataclass(frozen=True, slots=True)
class Plan:
    """The curve, and the points on it.

    Attributes:
        options: One per size, rising.
        knee: Where the curve bends.
        best: Where most money is left; None if no size pays for its memory.
        ceiling: Of a cache that never evicts: its hit ratio is all that there is.
        prefill_s: Seconds of prefill per hour without a cache.
    """

    options: tuple[Option, ...]
    knee: Option
    best: Option | None
    ceiling: Option
    prefill_s: float


def plan_capacities(trace: BlockTrace, num_points: int = 14) -> tuple[int, ...]:
    """Return sizes for a curve, from a two-hundredth of the distinct blocks to all of them.

    Each is as many times as large as the one before.
    """
    at_least("points", num_points, 2)
    if num_points > MOST_POINTS:
        raise ConfigError(f"points={num_points}: {MOST_POINTS} at most, each is a replay")
    most = trace.num_distinct + 1
    sizes = np.geomspace(max(1, most // 200), most, num_points)
    return tuple(sorted({round(size) for size in sizes.tolist()}))


def make_plan(
    trace: BlockTrace,
    results: Sequence[SerialResult],
    token_bytes: int,
    cost: CostModel,
    prices: Prices,
) -> Plan:
    """Weigh memory against what it saves.

    Args:
        trace: The traffic.
        results: One per size, rising; the last of a cache that never evicts.
        token_bytes: KV of one token in all layers.
        cost: What prefill takes.
        prices: What compute and memory cost.

    Raises:
        ConfigError: The trace is too short to speak of hours, or there is no result.
    """
    if not results or trace.duration_s <= 0:
        raise ConfigError(
            f"{trace.name} spans {trace.duration_s:g} s: a plan needs a trace with times"
        )
    hours = trace.duration_s / _HOUR_S
    whole_s = _prefill_s(trace, np.zeros(len(trace)), cost)

    def option(result: SerialResult) -> Option:
        saved_s = whole_s - _prefill_s(trace, result.hit_tokens.astype(np.float64), cost)
        memory = result.num_blocks * trace.block_tokens * token_bytes
        return Option(
            result.num_blocks,
            memory,
            result.hit_ratio,
            result.total_hit_tokens / hours,
            saved_s / whole_s if whole_s else 0.0,
            saved_s / hours,
            saved_s / hours / _HOUR_S * prices.compute_per_hour,
            memory / GIB * prices.memory_per_gib_hour,
        )

    options = tuple(map(option, results))
    richest = max(options, key=lambda each: each.net_money)
    best = richest if richest.net_money > 0 else None
    return Plan(options, knee(options), best, options[-1], whole_s / hours)


def knee(options: Sequence[Option]) -> Option:
    """Return where the curve of hits over memory bends.

    It is the point that stands highest above the straight line from nothing to the end.

    Source: Satopää et al., "Finding a 'Kneedle' in a Haystack", 2011, without smoothing.
    """
    last = options[-1]

    def above(option: Option) -> float:
        height = option.hit_ratio / last.hit_ratio if last.hit_ratio else 0.0
        return height - option.memory_bytes / last.memory_bytes

    return max(options, key=above)


def in_words(plan: Plan, write_bytes: Callable[[int], str], currency: str) -> Iterator[str]:
    """Say what to do, a sentence or two at a time.

    Args:
        plan: The curve.
        write_bytes: Writes an amount of memory for people.
        currency: Of all prices.
    """
    bend, best, ceiling = plan.knee, plan.best, plan.ceiling
    if not ceiling.hit_ratio:
        yield "No prompt of this trace begins like another one: a cache of any size saves nothing."
        return
    if best is None:
        yield (
            "Buy no memory for this cache alone: at these prices none of the sizes pays. Use what "
            f"the machine has anyway.{_would_pay(plan, currency)}"
        )
    else:
        bends = ", where the curve bends" if best is bend else ""
        yield (
            f"Give the cache {write_bytes(best.memory_bytes)}{bends}: it saves "
            f"{_spoken(best.saved_money)} {currency} of compute per hour for "
            f"{_spoken(best.memory_money)} {currency} of memory. {_finds('It', best, plan)}"
        )
    if bend is not best:
        yield _bends(bend, best, plan, write_bytes, currency)
    rest = f"the other {1 - ceiling.hit_ratio:.1%} are seen for the first time."
    if best is ceiling:
        yield f"More is not to be had: {rest}"
    else:
        size = write_bytes(ceiling.memory_bytes)
        most = f"No memory finds more than {ceiling.hit_ratio:.1%}"
        yield f"{most}, for which {size} are enough: {rest}"


def money(amount: float) -> str:
    """Write an amount of money; cents where they matter."""
    if abs(amount) < 10_000:
        return f"{amount:,.2f}"
    return f"{amount:,.0f}" if abs(amount) < 1_000_000 else f"{amount:.3g}"


def _spoken(amount: float) -> str:
    return "less than 0.01" if 0 < amount < 0.005 else money(amount)


def _would_pay(plan: Plan, currency: str) -> str:
    """Say at which price of memory a first size would pay."""
    most = max(o.saved_money / o.memory_bytes * GIB for o in plan.options)
    if not most:
        return ""
    return f" Memory would pay below {most:.2g} {currency} for a GiB and hour."


def _bends(
    bend: Option,
    best: Option | None,
    plan: Plan,
    write_bytes: Callable[[int], str],
    currency: str,
) -> str:
    """Say what the knee is good for, beside the best buy."""
    size = write_bytes(bend.memory_bytes)
    if best is None:
        return f"The curve bends at {size}. {_finds('There the cache', bend, plan)}"
    left = (
        f"{money(bend.net_money)} instead of {money(best.net_money)} {currency} per hour are left"
        if bend.net_money >= 0
        else f"memory costs {money(-bend.net_money)} {currency} per hour more than it saves"
    )
    if bend.memory_bytes < best.memory_bytes:
        share = 1 - bend.memory_bytes / best.memory_bytes
        where = f"The curve bends before, at {size}: with {share:.0%} less memory"
        return f"{where} the cache finds {bend.hit_ratio:.1%}, and {left}."
    where = f"The curve bends later, at {size}: there"
    return f"{where} the cache finds {bend.hit_ratio:.1%}, but {left}."


def _finds(who: str, option: Option, plan: Plan) -> str:
    return (
        f"{who} finds {option.hit_ratio:.1%} of all prompt tokens and saves "
        f"{option.saved_share:.1%} of the prefill work: {_load(option, plan)}."
    )


def _load(option: Option, plan: Plan) -> str:
    """Say how busy prompts keep machines, with the cache and without."""
    machines, with_cache = plan.prefill_s / _HOUR_S, (plan.prefill_s - option.saved_s) / _HOUR_S
    if machines >= 1:
        return f"prompts keep {with_cache:.1f} machines busy instead of {machines:.1f}"
    return f"prompts keep a machine busy {with_cache:.1%} of the time instead of {machines:.1%}"


def _prefill_s(trace: BlockTrace, hits: npt.NDArray[np.float64], cost: CostModel) -> float:
    """Return the seconds that all prefills take behind their hits; steps are shared and free."""
    computed = trace.input_tokens - hits
    pairs = computed * hits + computed * (computed + 1) / 2
    return float(computed.sum() * cost.token_s + pairs.sum() * cost.pair_s)

"""What is measured? The rows of the table, and what is aimed at.

A measure prepares once per engine (a prefix that is to be warm) and then takes one sample per
repetition.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.peers.samples import (
    Prepare,
    Sample,
    agents,
    batch_cold,
    batch_warm,
    cold_prefill,
    conversations,
    decode,
    first_token,
    managed,
    strangers,
    warm,
)


@dataclass(frozen=True)
class Goal:
    """What is aimed at.

    Attributes:
        factor: How many times as fast as the peer ours is to be.
        engine: The peer; None is the quickest there is.
        at_most: Or a figure that is not to be exceeded, in the measure's unit.
    """

    factor: float = 1.0
    engine: str | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Measure:
    """One row of the table.

    Attributes:
        name: What it is called on the command line and in JSON.
        title: What it is called in tables.
        unit: Of a sample.
        more_is_better: Whether it is a rate; else it is a time.
        sample: Takes one.
        prepare: Makes warm what is to be warm; returns the prefix.
        goals: What ours is to reach.
        without: Engines that are not asked, and why not, by name.
        kind: ``serve`` or ``manage``.
        per_request: Whether a variant of ours that reads per request takes part.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool
    sample: Sample
    prepare: Prepare | None = None
    goals: tuple[Goal, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    kind: str = "serve"
    per_request: bool = False


NO_SCHEDULER = {"transformers": "plain forward passes have no scheduler"}
SLOW = "not asked: takes minutes a sample"
TOO_SLOW = dict.fromkeys(("transformers", "transformers-cb"), SLOW)
MEASURES = (
    Measure(
        "cold_prefill", "cold prefill, 2,048 tokens", "tokens/s", True, cold_prefill,
        goals=(Goal(1.10, "openvino"), Goal(1.25, "vllm")),
    ),
    Measure(
        "first_token", "first token, 2,048 cached + 32 new", "s", False, first_token,
        warm("prefix"), (Goal(1 / 0.80, "openvino"),),
    ),
    Measure(
        "batch_cold", "16 × (2,048 shared + 32 own), cold, 32 out", "s", False, batch_cold,
        goals=(Goal(1 / 0.65, "vllm"),),
    ),
    Measure(
        "batch_warm", "16 × (2,048 shared + 32 own), warm, 32 out", "s", False, batch_warm,
        warm("prefix"), (Goal(1 / 0.55, "vllm"),),
    ),
    Measure(
        "decode_1", "decode, batch 1 on 2k", "tokens/s", True,
        decode(lambda sizes: 1, lambda sizes: sizes.alone),
        warm("prefix"), (Goal(1.0, "openvino"),),
    ),
    Measure(
        "decode_16", "decode, 16 on a shared 2k", "tokens/s", True,
        decode(lambda sizes: sizes.batch, lambda sizes: sizes.outputs),
        warm("prefix"), (Goal(1.9, "vllm"),),
    ),
    Measure(
        "strangers", "16 × 512 with nothing shared, 64 out", "s", False, strangers,
        goals=(Goal(1.0),),
    ),
    Measure(
        "conversations", "16 conversations × 10 turns, growing", "requests/s", True,
        conversations, goals=(Goal(1.3, "vllm"),), without=NO_SCHEDULER,
    ),
    Measure(
        "agents", "4 agents × 12 turns on 1.5k of tools, growing", "requests/s", True,
        agents, without=NO_SCHEDULER,
    ),
    Measure(
        "decode_32_4k", "decode, 32 on a shared 4k", "tokens/s", True,
        decode(lambda sizes: sizes.wide, lambda sizes: sizes.outputs),
        warm("long"), (Goal(2.5, "vllm"),), without=TOO_SLOW,
    ),
    Measure(
        "decode_32_16k", "decode, 32 on a shared 16k", "tokens/s", True,
        decode(lambda sizes: sizes.wide, lambda sizes: sizes.outputs // 2),
        warm("longest"), (Goal(5.0, "ours:never"),), without=TOO_SLOW | {"llamacpp": SLOW},
        per_request=True,
    ),
    Measure(
        "manager_hit", "manager: 32,768 tokens that are cached, as a list", "ms", False,
        managed("hit", 1e3), goals=(Goal(at_most=0.2),), kind="manage",
    ),
    Measure(
        "manager_hit_packed", "manager: 32,768 tokens that are cached, packed", "ms", False,
        managed("hit packed", 1e3), goals=(Goal(at_most=0.05),), kind="manage",
    ),
    Measure(
        "manager_miss", "manager: 32,768 new tokens, published", "ms", False,
        managed("miss", 1e3), goals=(Goal(at_most=0.4),), kind="manage",
    ),
    Measure(
        "manager_chats", "manager: 64 conversations × 20 turns × 500 on 4k", "s", False,
        managed("chats", 1.0), goals=(Goal(at_most=0.11),), kind="manage",
    ),
)  # fmt: skip

LOW_BITS_GOALS: Mapping[int, Mapping[str, float]] = {
    8: {"decode_1": 1.35, "decode_16": 2.2},
    4: {"decode_1": 2.0, "decode_16": 2.5},
}
"""By bits of weights and measure: how many times as fast ours is to be as the best peer."""


def speed(measure: Measure, value: float) -> float:
    """How fast a figure is: the more the better, whatever its unit."""
    return value if measure.more_is_better else 1 / value


def named(names: list[str]) -> list[Measure]:
    """Return the measures of these names, in the table's order; all if none is named.

    Raises:
        ValueError: There is none of a name.
    """
    known = [measure.name for measure in MEASURES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no measure is called {unknown[0]}; there are {', '.join(known)}")
    return [measure for measure in MEASURES if not names or measure.name in names]


def without_goals(measure: Measure) -> Measure:
    """The measure in another size, for which the goals were not meant."""
    return replace(measure, goals=())


def with_goals_of(measure: Measure, weight_bits: int) -> Measure:
    """The measure with the goals for weights of so many bits."""
    if weight_bits == 16:
        return measure
    factor = LOW_BITS_GOALS[weight_bits].get(measure.name)
    return replace(measure, goals=() if factor is None else (Goal(factor),))

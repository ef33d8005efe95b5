"""What is measured?

A measure prepares once per engine (a prefix that is to be warm) and then takes one sample per
repetition. Tokens are drawn from a seed that hangs on measure and repetition, so all engines get
the same prompts, and no repetition meets a prompt of another one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from benchmarks.peers.protocol import Served, Talk


@dataclass(frozen=True)
class Sizes:
    """How much of everything; lengths in tokens."""

    prefix: int = 2048
    own: int = 32
    batch: int = 16
    outputs: int = 32
    alone: int = 64
    wide: int = 32
    long: int = 4096
    longest: int = 16_384
    strangers: int = 512
    stranger_outputs: int = 64
    chats: int = 16
    turns: int = 10
    system: int = 512
    turn: tuple[int, int] = (32, 64)
    answer: tuple[int, int] = (16, 32)
    managed: int = 32_768
    managed_chats: int = 64
    managed_turns: int = 20
    managed_turn: int = 500
    managed_system: int = 4096


FULL = Sizes()
QUICK = Sizes(
    prefix=96, own=8, batch=4, outputs=6, alone=12, wide=6, long=128, longest=192, strangers=32,
    stranger_outputs=8, chats=3, turns=3, system=32, turn=(4, 8), answer=(4, 8), managed=512,
    managed_chats=4, managed_turns=3, managed_turn=50, managed_system=64,
)  # fmt: skip


class Asked(Protocol):
    """An engine that can be asked; see ``session``."""

    def serve(self, talks: list[Talk]) -> Served:
        """Serve conversations at once."""

    def manage(self, scene: str, size: dict[str, int]) -> float:
        """Take a cache manager through a scene; seconds of CPU time."""


class Draw:
    """Token ids at random."""

    def __init__(self, vocab_size: int, *seed: Any) -> None:
        """The same seed draws the same."""
        self._random, self._vocab_size = random.Random(repr(seed)), vocab_size

    def __call__(self, num_tokens: int) -> list[int]:
        """Draw so many ids; none of them ends a text."""
        return [self._random.randrange(1, self._vocab_size) for _ in range(num_tokens)]

    def between(self, bounds: tuple[int, int]) -> int:
        """Draw a number."""
        return self._random.randint(*bounds)


Prepare = Callable[[Asked, Draw, Sizes], list[int]]
Sample = Callable[[Asked, Draw, Sizes, list[int]], float]


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
        without: Engines that are not asked, by name.
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
    without: tuple[str, ...] = ()
    kind: str = "serve"
    per_request: bool = False


def batch_of(prompts: list[list[int]], num_outputs: int) -> list[Talk]:
    """One turn each."""
    return [[(prompt, num_outputs)] for prompt in prompts]


def decode_rate(served: Served) -> float:
    """Tokens per second from the moment when everybody has a first token.

    Those of a request that began earlier count in proportion, as if evenly spread.
    """
    start, end = max(served.first), max(served.last)
    tokens = sum(
        (count - 1) * (last - start) / (last - first)
        for count, first, last in zip(served.tokens, served.first, served.last, strict=True)
        if last > first
    )
    return tokens / (end - start)


def cold_prefill(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
    """A prompt that nobody has seen: its tokens by the time of the first answer."""
    return sizes.prefix / asked.serve(batch_of([draw(sizes.prefix)], 1)).first[0]


def warm(length: str) -> Prepare:
    """Have a prefix of that length computed, with a tail of its own; returns the prefix."""

    def prepare(asked: Asked, draw: Draw, sizes: Sizes) -> list[int]:
        prefix = draw(getattr(sizes, length))
        asked.serve(batch_of([prefix + draw(sizes.own)], 2))
        return prefix

    return prepare


def first_token(asked: Asked, draw: Draw, sizes: Sizes, prefix: list[int]) -> float:
    """Seconds until the first token behind a cached prefix; the median of three."""
    prompts = [prefix + draw(sizes.own) for _ in range(3)]
    return median(asked.serve(batch_of([prompt], 1)).first[0] for prompt in prompts)


def batch_cold(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
    """Seconds for requests that share what nobody has seen."""
    return batch_warm(asked, draw, sizes, draw(sizes.prefix))


def batch_warm(asked: Asked, draw: Draw, sizes: Sizes, prefix: list[int]) -> float:
    """Seconds for requests that share what is cached."""
    prompts = [prefix + draw(sizes.own) for _ in range(sizes.batch)]
    return asked.serve(batch_of(prompts, sizes.outputs)).seconds


def decode(count: Callable[[Sizes], int], outputs: Callable[[Sizes], int]) -> Sample:
    """Tokens per second while so many decode on a cached prefix."""

    def sample(asked: Asked, draw: Draw, sizes: Sizes, prefix: list[int]) -> float:
        prompts = [prefix + draw(sizes.own) for _ in range(count(sizes))]
        return decode_rate(asked.serve(batch_of(prompts, outputs(sizes) + 1)))

    return sample


def conversations(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
    """Requests per second: conversations that grow, each turn as soon as the last has ended.

    Turns and answers differ in length, so that prompts and answers of others mix in steps.
    """
    system = draw(sizes.system)
    talks: list[Talk] = []
    for _number in range(sizes.chats):
        talk: Talk = []
        for turn in range(sizes.turns):
            tokens = draw(draw.between(sizes.turn))
            talk.append((tokens if turn else system + tokens, draw.between(sizes.answer)))
        talks.append(talk)
    return sizes.chats * sizes.turns / asked.serve(talks).seconds


def strangers(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
    """Seconds for requests that share nothing."""
    prompts = [draw(sizes.strangers) for _ in range(sizes.batch)]
    return asked.serve(batch_of(prompts, sizes.stranger_outputs)).seconds


def managed(scene: str, scale: float) -> Sample:
    """CPU time of a cache manager in a scene, without model and tensors."""

    def sample(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
        size = {
            "prompt": sizes.managed,
            "chats": sizes.managed_chats,
            "turns": sizes.managed_turns,
            "turn": sizes.managed_turn,
            "system": sizes.managed_system,
            "seed": draw.between((0, 2**31)),
        }
        return asked.manage(scene, size) * scale

    return sample


TRANSFORMERS = ("transformers", "transformers-cb")
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
        "batch_warm", "the same, warm", "s", False, batch_warm,
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
        conversations, goals=(Goal(1.3, "vllm"),), without=("llamacpp", "transformers"),
    ),
    Measure(
        "decode_32_4k", "decode, 32 on a shared 4k", "tokens/s", True,
        decode(lambda sizes: sizes.wide, lambda sizes: sizes.outputs),
        warm("long"), (Goal(2.5, "vllm"),), without=TRANSFORMERS,
    ),
    Measure(
        "decode_32_16k", "decode, 32 on a shared 16k", "tokens/s", True,
        decode(lambda sizes: sizes.wide, lambda sizes: sizes.outputs // 2),
        warm("longest"), (Goal(5.0, "ours:never"),), without=("llamacpp", *TRANSFORMERS),
        per_request=True,
    ),
    Measure(
        "manager_hit", "manager: 32,768 tokens that are cached, as a list", "ms", False,
        managed("hit", 1e3), goals=(Goal(at_most=0.2),), kind="manage",
    ),
    Measure(
        "manager_hit_packed", "manager: the same, packed", "ms", False,
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

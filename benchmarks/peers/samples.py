"""One sample of each measure: its prompts, how they are sent, and its figure.

Tokens are drawn from a seed of measure and repetition, so all engines get the same
prompts, and no repetition meets a prompt of another one.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    eight_thousand: int = 8_192
    longest: int = 16_384
    thirty_thousand: int = 32_768
    strangers: int = 512
    stranger_outputs: int = 64
    chats: int = 16
    turns: int = 10
    system: int = 512
    turn: tuple[int, int] = (32, 64)
    answer: tuple[int, int] = (16, 32)
    agents: int = 4
    agent_turns: int = 12
    agent_system: int = 1536
    observation: tuple[int, int] = (64, 256)
    action: tuple[int, int] = (24, 48)
    http_system: int = 1700
    http_turns: int = 5
    http_turn: tuple[int, int] = (24, 40)
    http_answer: int = 48
    managed: int = 32_768
    managed_chats: int = 64
    managed_turns: int = 20
    managed_turn: int = 500
    managed_system: int = 4096


FULL = Sizes()
QUICK = Sizes(
    prefix=96, own=8, batch=4, outputs=6, alone=12, wide=6, long=128, eight_thousand=160,
    longest=192, thirty_thousand=256, strangers=32, stranger_outputs=8, chats=3, turns=3, system=32,
    turn=(4, 8), answer=(4, 8), managed=512, managed_chats=4, managed_turns=3, managed_turn=50,
    managed_system=64, agents=2, agent_turns=3, agent_system=48, observation=(8, 16), action=(4, 8),
    http_system=48, http_turns=2, http_turn=(4, 8), http_answer=8,
)  # fmt: skip


class Asked(Protocol):
    """An engine that can be asked; see ``session``."""

    def serve(self, talks: list[Talk]) -> Served:
        """Serve conversations at once."""

    def manage(self, scene: str, size: dict[str, int]) -> float:
        """Take a cache manager through a scene; seconds of CPU time."""


class Draw:
    """Token ids at random, or pieces of a text that begin anywhere."""

    def __init__(self, vocab_size: int, *seed: Any, text: Sequence[int] = ()) -> None:
        """The same seed draws the same."""
        self._random, self._vocab_size = random.Random(repr(seed)), vocab_size
        self._text = text

    def __call__(self, num_tokens: int) -> list[int]:
        """Draw so many ids; none of them ends a text."""
        if self._text:
            start = self._random.randrange(len(self._text) - num_tokens)
            return list(self._text[start : start + num_tokens])
        return [self._random.randrange(1, self._vocab_size) for _ in range(num_tokens)]

    def between(self, bounds: tuple[int, int]) -> int:
        """Draw a number."""
        return self._random.randint(*bounds)


Prepare = Callable[[Asked, Draw, Sizes], list[int]]
Sample = Callable[[Asked, Draw, Sizes, list[int]], float]


def batch_of(prompts: list[list[int]], num_outputs: int) -> list[Talk]:
    """One turn each."""
    return [[(prompt, num_outputs)] for prompt in prompts]


def decode_rate(served: Served) -> float:
    """Tokens per second from the moment when all requests have a first token.

    Those of a request that began earlier count in proportion, as if evenly spread.
    """
    start, end = max(served.first), max(served.last)
    tokens = sum(
        (count - 1) * (last - start) / (last - first)
        for count, first, last in zip(served.tokens, served.first, served.last, strict=True)
        if last > first
    )
    return tokens / (end - start)


def cold_prefill(length: str) -> Sample:
    """A new prompt of a length of ``Sizes``: its tokens by the time of the first answer."""

    def sample(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
        num_tokens = getattr(sizes, length)
        rate: float = num_tokens / asked.serve(batch_of([draw(num_tokens)], 1)).first[0]
        return rate

    return sample


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
    """Seconds for requests that share a new prefix."""
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
    talks = [talk(draw, system, sizes.turns, sizes.turn, sizes.answer) for _ in range(sizes.chats)]
    return sizes.chats * sizes.turns / asked.serve(talks).seconds


def agents(asked: Asked, draw: Draw, sizes: Sizes, _: list[int]) -> float:
    """Requests per second: agents with one long system prompt, which holds their tools.

    A turn is what a tool answered, an answer the next call; the history only grows.
    """
    system = draw(sizes.agent_system)
    talks = [
        talk(draw, system, sizes.agent_turns, sizes.observation, sizes.action)
        for _ in range(sizes.agents)
    ]
    return sizes.agents * sizes.agent_turns / asked.serve(talks).seconds


def talk(
    draw: Draw, system: list[int], num_turns: int, turn: tuple[int, int], answer: tuple[int, int]
) -> Talk:
    """Draw a conversation behind a system prompt."""
    turns: Talk = []
    for number in range(num_turns):
        tokens = draw(draw.between(turn))
        turns.append((tokens if number else system + tokens, draw.between(answer)))
    return turns


def warm_system(asked: Asked, draw: Draw, sizes: Sizes) -> list[int]:
    """Have a chat's system prompt computed; returns it."""
    system = draw(sizes.http_system)
    asked.serve([[(system, 0), (draw(sizes.own), 2)]])
    return system


def http_chats(count: int) -> Sample:
    """Answers per second: so many chats stream behind one system prompt, each turn at once."""

    def sample(asked: Asked, draw: Draw, sizes: Sizes, system: list[int]) -> float:
        talks: list[Talk] = [
            [
                (system, 0),
                *(
                    (draw(draw.between(sizes.http_turn)), sizes.http_answer)
                    for _ in range(sizes.http_turns)
                ),
            ]
            for _ in range(count)
        ]
        return count * sizes.http_turns / asked.serve(talks).seconds

    return sample


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

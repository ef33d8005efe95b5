"""Traffic that is hard on a policy which learns; each kind is named after what it does.

Requests are paths of block ids, prefix-chained: a block has the same parent wherever it stands.
Times and lengths of outputs carry what a learner may be misled by.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        at_s: Arrival.
        path: Block ids of its prompt, in token order.
        num_output_tokens: Length of its output.
    """

    at_s: float
    path: list[int]
    num_output_tokens: int = 100


Traffic = Callable[[random.Random, int], Iterator[Asked]]
"""From a source of chance and the pool's size, requests without end."""


class _Ids:
    """Ids for documents, a thousand to each."""

    @staticmethod
    def of(document: int, length: int) -> list[int]:
        first = 1 + document * 1_000
        return list(range(first, first + length))


def scans(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """A few documents asked for now and then, among long ones that are read once."""
    number, at_s = 100, 0.0
    while True:
        at_s += rng.expovariate(1.0)
        if rng.random() < 0.4:
            yield Asked(at_s, _Ids.of(rng.randrange(20), 1 + num_blocks // 60))
        else:
            number += 1
            yield Asked(at_s, _Ids.of(number, 1 + num_blocks // 25), 10)


def loop(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """Documents by turns, a tenth more of them than fit."""
    length = max(1, num_blocks // 40)
    count, number = num_blocks * 11 // 10 // length + 1, 0
    while True:
        number += 1
        yield Asked(number * 1.0, _Ids.of(number % count, length))


def breathing_loop(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """A loop that is by turns a little larger and a little smaller than the pool."""
    length, number = max(1, num_blocks // 50), 0
    while True:
        for share in (1.15, 0.9, 1.05, 0.97):
            count = max(1, int(share * num_blocks) // length)
            for _ in range(rng.randrange(1, 4)):
                for document in range(count):
                    number += 1
                    yield Asked(number * 0.7, _Ids.of(document, length))


def uniform(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """Any of twice as many documents as fit: there is nothing to learn."""
    length, at_s = max(1, num_blocks // 50), 0.0
    while True:
        at_s += rng.expovariate(2.0)
        yield Asked(at_s, _Ids.of(rng.randrange(100), length), rng.randrange(800))


def stack_depths(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """Documents drawn by how lately they were used: what LRU is the best policy for."""
    length, at_s, stack, number = max(1, num_blocks // 50), 0.0, list[int](), 0
    while True:
        at_s += rng.expovariate(1.0)
        depth = int(rng.paretovariate(0.6)) if rng.random() < 0.9 else len(stack) + 1
        if depth > len(stack):
            number += 1
            document = number
        else:
            document = stack.pop(-depth)
        stack.append(document)
        yield Asked(at_s, _Ids.of(document, length), rng.randrange(800))


def phases(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """Whatever taught the policy something is over, and the opposite begins."""
    kinds, at_s, shift = [scans, stack_depths, loop, uniform, chats, crowds], 0.0, 0
    while True:
        kind = rng.choice(kinds)
        shift += 1
        begun_s = at_s
        requests = kind(rng, num_blocks)
        for _ in range(rng.randrange(40, 400)):
            asked = next(requests)
            at_s = begun_s + asked.at_s
            moved = [shift * 10**7 + block for block in asked.path]
            yield Asked(at_s, moved if rng.random() < 0.98 else asked.path, asked.num_output_tokens)


def chats(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """Conversations that pause for a minute and grow, more of them than fit."""
    at_s, number = 0.0, 0
    waiting: list[tuple[float, int, int]] = []
    while True:
        at_s += rng.expovariate(1.0)
        waiting.sort()
        if waiting and waiting[0][0] <= at_s:
            _, document, length = waiting.pop(0)
        else:
            number += 1
            document, length = number, rng.randrange(1, 2 + num_blocks // 40)
        yield Asked(at_s, _Ids.of(document, length), rng.randrange(400))
        if rng.random() < 0.6:
            length = min(length + rng.randrange(1, 4), num_blocks, 999)
            waiting.append((at_s + rng.lognormvariate(4.0, 0.7), document, length))


def crowds(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """Documents come once each for a while, and then all that LRU would hold comes back."""
    length, at_s, number = max(1, num_blocks // 60), 0.0, 0
    while True:
        fresh = [number := number + 1 for _ in range(rng.randrange(60, 400))]
        for document in fresh:
            at_s += 0.5
            yield Asked(at_s, _Ids.of(document, length), rng.choice((10, 300, 700)))
        for document in rng.sample(fresh[-58:], 58) if rng.random() < 0.5 else fresh[-1:-59:-1]:
            at_s += 0.05
            yield Asked(at_s, _Ids.of(document, length), 10)


def turncoats(rng: random.Random, num_blocks: int) -> Iterator[Asked]:
    """One kind never comes back and one always does, until they change places."""
    length, at_s, number, queue = max(1, num_blocks // 50), 0.0, 0, list[tuple[int, int]]()
    while True:
        liar = 0
        for _ in range(rng.randrange(3, 7)):
            liar = 1 - liar
            for _ in range(rng.randrange(100, 500)):
                at_s += rng.expovariate(1.0)
                if len(queue) > 70:
                    document, kind = queue.pop(0)
                else:
                    number += 1
                    document, kind = number, rng.randrange(2)
                yield Asked(at_s, _Ids.of(document, length), 10 if kind else 700)
                if kind == liar:
                    queue.append((document, kind))


HARD_TRAFFIC: tuple[Traffic, ...] = (
    scans, loop, breathing_loop, uniform, stack_depths, phases, chats, crowds, turncoats,
)  # fmt: skip

"""Lab 7: a router that weighs hits against load.

Fill the holes, then run ``ostinato labs check 7``.
"""

from dataclasses import dataclass


@dataclass
class Worker:
    """What a router knows of one engine, for one prompt; all in tokens but the name.

    Attributes:
        name: Its name.
        cached: Leading prompt tokens that it has cached.
        expected: Tokens after those that are being computed there for an earlier request.
        queued: Tokens still to be computed of prompts that were sent there before.
        recent: Tokens that it was sent lately.
    """

    name: str
    cached: int = 0
    expected: int = 0
    queued: int = 0
    recent: float = 0.0


def to_compute(num_tokens: int, worker: Worker) -> int:
    """Return how many prompt tokens a worker would compute."""
    # Hole 1 (What a hit saves): neither what is cached nor what is expected; the last token always.
    return max(1, num_tokens - worker.cached - worker.expected)
    # End of hole 1.


def above_share(worker: Worker, workers: list[Worker]) -> float:
    """Return how much more work than the mean a worker was sent lately; 0 if it was less."""
    # Hole 2 (A hot prefix): the mean is that of all workers' recent tokens.
    mean = sum(each.recent for each in workers) / len(workers)
    return max(0.0, worker.recent - mean)
    # End of hole 2.


def score(num_tokens: int, worker: Worker, workers: list[Worker]) -> float:
    """Return the cost of a prompt at a worker: lower is better."""
    # Hole 3 (One number): what waits there, what the prompt adds, and a quarter of what the worker
    # was sent above its share.
    return worker.queued + to_compute(num_tokens, worker) + above_share(worker, workers) / 4
    # End of hole 3.


class Policy:
    """Chooses the worker of a prompt."""

    def choose(self, num_tokens: int, workers: list[Worker]) -> int:
        """Return the place of the chosen worker in the list; changes nothing."""
        # Hole 4 (The lowest score): among equals, the one that was sent least lately.
        places = range(len(workers))
        return min(
            places, key=lambda at: (score(num_tokens, workers[at], workers), workers[at].recent)
        )
        # End of hole 4.


def reason(num_tokens: int, worker: Worker) -> str:
    """Say why a worker was chosen, in numbers."""
    # Hole 5 (Say why): such as "w1: 90 of 100 tokens cached, 10 to compute, 40 queued". Tokens that
    # are expected count as cached.
    hit = num_tokens - to_compute(num_tokens, worker)
    computed, queued = to_compute(num_tokens, worker), worker.queued
    head = f"{worker.name}: {hit} of {num_tokens} tokens cached"
    return f"{head}, {computed} to compute, {queued} queued"
    # End of hole 5.

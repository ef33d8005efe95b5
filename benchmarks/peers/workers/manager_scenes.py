"""The scenes of a cache manager alone. No model, no tensors; CPU time.

A request is served from its tokens to its release: key or hashes, look-up, room for what misses,
publication, and a release that leaves everything cached. Prompts are lists of ints, as they come
from a tokenizer; ``packed`` ones are what the engine itself would keep. The garbage collector is
off, for all managers.
"""

import gc
import random
from abc import abstractmethod
from collections.abc import Iterable
from statistics import median
from time import process_time
from typing import Any

from benchmarks.peers.protocol import Unsupported, Worker

BLOCK_SIZE = 16
REPEATS = 7


class ManagerWorker(Worker):
    """Takes a cache manager, called as its engine would call it, through the scenes."""

    @abstractmethod
    def make(self, num_tokens: int) -> None:
        """Begin with an empty cache for so many tokens."""

    @abstractmethod
    def take(self, tokens: Any) -> int:
        """Take a request through the cache; returns how many of its tokens were there."""

    def manage(self, scene: str, size: dict[str, int]) -> float:
        """Seconds of CPU time: of one request, or of all conversations.

        Raises:
            AssertionError: The manager did not find what was there, or found what was not.
        """
        rng = random.Random(size["seed"])
        gc.collect()
        gc.disable()
        try:
            if scene == "chats":
                return self._chats(rng, size)
            if scene == "miss":
                return self._misses(rng, size["prompt"])
            return self._hits(rng, size["prompt"], packed=scene == "hit packed")
        finally:
            gc.enable()

    def pack(self, tokens: list[int]) -> Any:
        """Return tokens as the engine would keep them."""
        raise Unsupported("takes no packed tokens")

    def _hits(self, rng: random.Random, num_tokens: int, packed: bool) -> float:
        self.make(3 * num_tokens)
        prompt = draw(rng, num_tokens)
        self.take(list(prompt))
        times = []
        for _ in range(REPEATS):
            again = self.pack(prompt) if packed else list(prompt)
            seconds, num_hits = self._timed(again)
            assert num_hits >= num_tokens - BLOCK_SIZE, num_hits
            times.append(seconds)
        return median(times)

    def _misses(self, rng: random.Random, num_tokens: int) -> float:
        self.make((REPEATS + 2) * num_tokens)
        self.take(draw(rng, num_tokens))
        times = []
        for _ in range(REPEATS):
            seconds, num_hits = self._timed(draw(rng, num_tokens))
            assert num_hits == 0, num_hits
            times.append(seconds)
        return median(times)

    def _chats(self, rng: random.Random, size: dict[str, int]) -> float:
        """Every conversation's next turn, one conversation after the other; all fit."""
        num_tokens = size["chats"] * size["turns"] * size["turn"] + size["system"]
        self.make(2 * num_tokens)
        texts = [draw(rng, size["system"])] * size["chats"]
        total, begun = 0.0, 0
        for _ in range(size["turns"]):
            for number, text in enumerate(texts):
                texts[number] = text + draw(rng, size["turn"])
                seconds, num_hits = self._timed(list(texts[number]))
                assert num_hits >= (len(text) if begun else 0) - BLOCK_SIZE, num_hits
                total, begun = total + seconds, begun + 1
        return total

    def _timed(self, tokens: Iterable[int]) -> tuple[float, int]:
        start = process_time()
        num_hits = self.take(tokens)
        return process_time() - start, num_hits


def draw(rng: random.Random, num_tokens: int) -> list[int]:
    """Draw ids of a vocabulary of 65,536."""
    data = rng.randbytes(2 * num_tokens)
    return [data[at] | data[at + 1] << 8 for at in range(0, len(data), 2)]

"""What a cached block of a class and an age is worth.

From counts of lives by class and age bin: the probability of being reused in a bin if not
before (the hazard), and from hazards the Gittins index, the most hits per block-second that
keeping a block up to some later age can bring::

                    P(reused at an age in (a, b])
    index(c, a) = max -------------------------------
                  b>a  E[seconds kept until b or reuse]

Scarce counts lean on those of wider classes: each class on the one with a feature less, the
widest on a hazard that falls with age, as under LRU.

Source: J. C. Gittins, Bandit processes and dynamic allocation indices, 1979; for caching,
LHD (Beckmann, Chen, Cidon, NSDI 2018), which ranks by hits per space and time likewise.
"""

import random
from array import array

import numpy as np
from numpy.typing import NDArray

EDGES_S = (
    *(0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 40.0, 48.0, 64.0, 80.0, 96.0),
    *(128.0, 160.0, 192.0, 256.0, 320.0, 384.0, 512.0, 768.0, 1024.0, 1536.0, 2048.0, 3072.0),
    1e9,
)
"""Ends of the age bins: finer where people and tools answer, coarser over hours."""

NUM_BINS = len(EDGES_S) - 1

_WIDTHS_S = np.diff(np.array(EDGES_S))
_WIDTHS_S[-1] = EDGES_S[-2]  # the last bin is taken to be as long as all before it

_RNG = random.Random(1)  # that of NumPy takes milliseconds to load
_ROW_HASH = np.array([_RNG.uniform(1.0, 2.0) for _ in range(NUM_BINS)])
"""Weights by which rows of hazards are told apart."""

_FADE = 0.995
"""What counts keep of their weight every 50 requests: a third after 10,000."""

_PRIOR_TURNS = 10.0
_LEAN_TURNS = 16.0
"""Turns that a class must have seen to weigh as much as the wider class that it leans on.
Blocks of one turn live and end together, so turns are what can be counted as evidence."""


class HazardTable:
    """Counts of lives, and the index fitted to them.

    Attributes:
        lives: Shares of turns' lives that entered a bin, class by class, shape (classes * bins,).
        reused: Those of them that were reused in it, likewise; both are added to from outside.
        index: Hits per block-second, likewise.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Start without counts: the index falls with age alone.

        Args:
            shape: Number of values of each feature, the most telling first.
        """
        self._shape = shape
        empty = bytes(8 * int(np.prod(shape)) * NUM_BINS)
        self.lives, self.reused, self.index = (array("d", empty) for _ in range(3))
        # The same memory for NumPy; single values are read and written faster in the arrays.
        views = (np.frombuffer(held) for held in (self.lives, self.reused, self.index))
        self._lives, self._reused, self._index = (view.reshape(-1, NUM_BINS) for view in views)
        self._index[:] = 1.0 / (np.array(EDGES_S[:-1]) + 1.0)

    def fit(self) -> None:
        """Compute the index from what was counted. Takes a millisecond."""
        hazards = np.clip(self._pooled(self._lives, self._reused), 1e-7, 0.999)
        # Classes without counts have the hazards of the wider class: one row for all.
        hashes = hazards @ _ROW_HASH
        _, rows, places = np.unique(hashes, return_index=True, return_inverse=True)
        self._index[:] = gittins(hazards[rows])[places]

    def fade(self) -> None:
        """Let what was counted until now weigh less."""
        self._lives *= _FADE
        self._reused *= _FADE

    def _pooled(
        self, lives: NDArray[np.float64], reused: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return hazards, each class leaning on a wider one; shape (classes, bins)."""
        prior = np.minimum(0.3, 0.05 * _WIDTHS_S / (np.array(EDGES_S[:-1]) + 1.0))
        prior[-1] = 0.01
        all_lives, all_reused = lives.sum(0), reused.sum(0)
        widest = (all_reused + _PRIOR_TURNS * prior) / (all_lives + _PRIOR_TURNS)
        hazards: NDArray[np.float64] = widest.reshape(1, NUM_BINS)
        for size in self._shape:  # each more feature splits a class into ``size``
            num_classes = len(hazards) * size
            some_lives = lives.reshape(num_classes, -1, NUM_BINS).sum(1)
            some_reused = reused.reshape(num_classes, -1, NUM_BINS).sum(1)
            wider = np.repeat(hazards, size, 0)
            hazards = (some_reused + _LEAN_TURNS * wider) / (some_lives + _LEAN_TURNS)
        return hazards


def gittins(hazards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the index of each class and bin.

    Args:
        hazards: Probability of reuse in a bin if not before, shape (classes, bins).

    Returns:
        Hits per block-second, shape (classes, bins).
    """
    dying = np.ascontiguousarray(hazards.T)  # (bins, classes): sums go from row to row
    num_bins, num_classes = dying.shape
    alive = np.ones_like(dying)  # at the beginning of each bin
    np.cumprod(1.0 - dying[:-1], 0, out=alive[1:])
    hits = alive * dying
    seconds = (alive - hits / 2) * _WIDTHS_S[:num_bins, None]
    # Sums from a bin to the end: differences of small numbers at the end stay exact.
    later_hits, later_seconds = (np.zeros((num_bins + 1, num_classes)) for _ in range(2))
    later_hits[:-1] = np.cumsum(hits[::-1], 0)[::-1]
    later_seconds[:-1] = np.cumsum(seconds[::-1], 0)[::-1]
    index = np.empty_like(dying)
    for place in range(num_bins):
        gained = later_hits[place] - later_hits[place + 1 :]
        gained /= later_seconds[place] - later_seconds[place + 1 :]
        gained.max(0, out=index[place])
    return index.T

"""Which blocks of the traffic stand for all?

A block is chosen by its content, so that it is chosen in every prompt that it is in: a cache of a
hundredth of the size sees of a hundredth of the blocks what the whole cache sees of all. Looking
at every block would cost more than it brings, so only those at every ``step``-th place are asked::

    prompt   b0 b1 b2 b3 b4 b5 b6 b7 b8 ..
    asked       b1       b4       b7          every third place, from the middle of the first three
    digest      d1 ────► d4 ────► d7          each goes on from the one before
    chosen               b4                   its digest is below the limit

Whether a block hits depends on all before it, and mostly on how deep it stands. Places at equal
distances see all depths alike, and each decides for itself: half of a sampled block of each of
many conversations tells more than all blocks of a few. The first place is the middle of a step:
what is between two places is as often before as behind them.

A chosen block has a name of four bytes. Its upper half is the digest's, so that those below a
lower limit are a sample of the sample; its lower half is of its content, its identity and the
images so far, and of a token from every fourth block before it. No token is kept.

Source: spatially hashed sampling: Waldspurger, Park, Garthwaite, Ahmad, Efficient MRC
construction with SHARDS, FAST 2015.
"""

from array import array
from zlib import crc32

from ostinato.cache.small_cache import SampledTurn
from ostinato.cache.tally import SoFar
from ostinato.core.identity import Identity, PrefixKey

_ASKED_TOKENS = 16
"""Leading tokens of a block that decide whether it is chosen."""

_BEFORE = 4
"""Blocks before a chosen one of which one token is in its name."""

_UPPER = 0xFFFF0000


class Sampler:
    """Chooses one block of ``stride``, and names it."""

    def __init__(self, block_size: int, stride: float, step: int, salt: int = 0) -> None:
        """Choose.

        Args:
            block_size: Tokens per block.
            stride: Blocks of which one is chosen, on average; at least 1.
            step: Blocks of which one is asked; at most ``stride``.
            salt: Samples of different salts have different blocks.
        """
        step = max(1, min(step, int(stride)))
        self._block_size = block_size
        self._asked_tokens = min(block_size, _ASKED_TOKENS)
        self._step_tokens = step * block_size
        self._first = step // 2 * block_size
        self._limit = int(2**32 * step / stride)
        self._salt = crc32(salt.to_bytes(8, "little"))
        self._last: tuple[Identity | None, int, int | None] = (None, 0, None)

    def choose(self, key: PrefixKey, num_tokens: int) -> list[tuple[int, int]]:
        """Choose among the full blocks of a sequence's first tokens.

        Returns:
            Where each chosen one begins, in tokens, and its digest.

        Cost: a fifth of a microsecond per place that is asked.
        """
        tokens, asked, limit, digest = key.tokens, self._asked_tokens, self._limit, self._salt
        chosen = []
        last = num_tokens - self._block_size + 1
        for start in range(self._first, last, self._step_tokens):
            digest = crc32(tokens[start : start + asked], digest)
            if digest < limit:
                chosen.append((start, digest))
        return chosen

    def names(self, key: PrefixKey, chosen: list[tuple[int, int]]) -> "array[int]":
        """Name the chosen ones; the same name means the same content, identity and images."""
        identity, tokens, size, names = key.identity, key.tokens, self._block_size, array("I")
        if identity is not self._last[0]:  # most come from one
            seam = None if identity.head is None else crc32(identity.encoded)
            self._last = identity, crc32(identity.root.encoded), seam
        _, before, seam = self._last
        seen = 0
        for start, digest in chosen:
            if seam is not None and start >= key.head_tokens:
                before, seam = before ^ seam, None
            before = crc32(tokens[seen : start : _BEFORE * size], before)
            seen = start
            name = crc32(tokens[start : start + size], before)
            for image in key.images:
                if image.start < start + size:
                    name = crc32(image.digest, name)
            names.append(digest & _UPPER | name & ~_UPPER)
        return names

    def limit_of(self, share: float) -> int:
        """Return what names of a share of the sample are below."""
        return int(self._limit * share)


class TrafficLog:
    """Sampled turns in the order in which they ended, packed."""

    def __init__(self) -> None:
        """Start empty."""
        self._names, self._places = array("I"), array("I")
        self._ends, self._asked = array("I"), array("I")
        self._outputs, self._kinds = array("I"), array("I")
        self._at_s, self._so_far = array("d"), array("d")

    def __len__(self) -> int:
        """Number of turns."""
        return len(self._ends)

    @property
    def num_blocks(self) -> int:
        """Sampled blocks of all turns, each as often as it was in use."""
        return len(self._names)

    def add(self, turn: SampledTurn, so_far: SoFar) -> None:
        """Note a turn, and how far the whole traffic has come: 8 bytes per block and 48 more."""
        names, places, num_asked, at_s, outputs, kinds = turn
        self._names.extend(names)
        self._places.extend(places)
        self._ends.append(len(self._names))
        self._asked.append(num_asked)
        self._outputs.append(outputs)
        self._kinds.append(kinds)
        self._at_s.append(at_s)
        self._so_far.extend(so_far)

    def turn(self, number: int) -> SampledTurn:
        """Return a turn."""
        first, last = self._ends[number - 1] if number else 0, self._ends[number]
        return SampledTurn(
            self._names[first:last],
            self._places[first:last],
            self._asked[number],
            self._at_s[number],
            self._outputs[number],
            self._kinds[number],
        )

    def so_far(self, number: int) -> SoFar:
        """Say how far the whole traffic had come with a turn."""
        return SoFar(*self._so_far[3 * number : 3 * number + 3])

"""Which blocks of the traffic stand for all?

A block is chosen by its content, so that it is chosen in every prompt that it is in: a cache of a
hundredth of the size sees of a hundredth of the blocks what the whole cache sees of all. Looking
at every block would cost more than it brings, so only those at every ``step``-th place are asked::

    prompt   b0 b1 b2 b3 b4 b5 b6 b7 b8 ..
    asked       b1       b4       b7          every third place
    chosen               b4                   its digest is below the limit

The chosen ones are named by their content, their place and the chosen ones before them, in four
bytes, and logged until they are replayed; no token is kept.

Source: spatially hashed sampling: Waldspurger, Park, Garthwaite, Ahmad, Efficient MRC
construction with SHARDS, FAST 2015.
"""

from array import array
from zlib import crc32

from ostinato.cache.small_cache import SampledTurn
from ostinato.core.identity import Identity, PrefixKey

_IDENTITY = Identity()
"""Names tell whose blocks they are."""

_ASKED_TOKENS = 16
"""Leading tokens of a block that decide whether it is chosen."""


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
        self._block_size = block_size
        self._asked_tokens = min(block_size, _ASKED_TOKENS)
        self._step = max(1, min(step, int(stride)))
        self._first = salt % self._step
        self._limit = int(2**32 * self._step / stride)
        self._salt = crc32(salt.to_bytes(4, "little"))

    def choose(self, key: PrefixKey, num_blocks: int) -> list[int]:
        """Return the places of the chosen ones among a sequence's first full blocks."""
        tokens, size, asked = key.tokens, self._block_size, self._asked_tokens
        salt, limit = self._salt, self._limit
        return [
            start // size
            for start in range(self._first * size, num_blocks * size, self._step * size)
            if crc32(tokens[start : start + asked], salt) < limit
        ]

    def names(self, key: PrefixKey, places: list[int]) -> "array[int]":
        """Name the chosen ones; the same name means the same content, identity and images."""
        identity, size, names = key.identity, self._block_size, array("I")
        seam = None if identity.head is None else crc32(identity.encoded)
        name = crc32(identity.root.encoded)
        for place in places:
            start = place * size
            if seam is not None and start >= key.head_tokens:
                name, seam = name ^ seam, None
            name = crc32(key.tokens[start : start + size], name ^ place)
            for image in key.images:
                if image.start < start + size:
                    name = crc32(image.digest, name)
            names.append(name)
        return names


class TrafficLog:
    """Sampled turns in the order in which they ended, packed."""

    def __init__(self) -> None:
        """Start empty."""
        self._names, self._places = array("I"), array("I")
        self._ends, self._asked, self._outputs = array("I"), array("I"), array("I")
        self._at_s = array("d")

    def __len__(self) -> int:
        """Number of turns."""
        return len(self._ends)

    @property
    def num_blocks(self) -> int:
        """Sampled blocks of all turns, each as often as it was in use."""
        return len(self._names)

    def add(
        self, names: "array[int]", places: list[int], num_asked: int, at_s: float, outputs: int
    ) -> None:
        """Note a turn, as ``SampledTurn`` has it: 8 bytes per block and 20 more."""
        self._names.extend(names)
        self._places.extend(places)
        self._ends.append(len(self._names))
        self._asked.append(num_asked)
        self._outputs.append(outputs)
        self._at_s.append(at_s)

    def turn(self, number: int) -> SampledTurn:
        """Return a turn."""
        first, last = self._ends[number - 1] if number else 0, self._ends[number]
        return SampledTurn(
            PrefixKey(_IDENTITY, self._names[first:last]),
            self._places[first:last],
            self._asked[number],
            self._at_s[number],
            self._outputs[number],
        )

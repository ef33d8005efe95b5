"""When is the KV of two tokens the same?

If and only if their tokens, the images that they stand for, everything before them and their
identities are. So the KV of a token is modelled by a number that stands for all of these.
"""

from ostinato.core.identity import PrefixKey


class Values:
    """Numbers for KV: equal if and only if the whole prefix is."""

    def __init__(self) -> None:
        """Start numbering."""
        self._numbers: dict[object, int] = {}

    def _number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def root(self, key: PrefixKey) -> int:
        """Return the value before a sequence's first token: its identity."""
        return self._number(key.identity)

    def of(self, key: PrefixKey, known: list[int] | None = None) -> list[int]:
        """Return one value per token; ``known`` are those of its first tokens."""
        values = list(known or ())
        before = values[-1] if values else self.root(key)
        for position in range(len(values), len(key)):
            token = (key.tokens[position], _image_mark(key, position))
            before = self._number((before, token))
            values.append(before)
        return values


def _image_mark(key: PrefixKey, position: int) -> tuple[bytes, int, int] | None:
    """Which part of which image stands at a position?"""
    for image in key.images:
        if image.start <= position < image.end:
            return image.digest, position - image.start, image.length
    return None


def num_text_tokens(key: PrefixKey, start: int, stop: int) -> int:
    """Count the tokens from ``start`` on before the first image token or ``stop``."""
    for position in range(start, stop):
        if _image_mark(key, position) is not None:
            return position - start
    return stop - start

"""``IncrementalTokenizer``: of a long text that extends a known one, only the end is tokenized.

Texts are found by the digests of their beginnings, a chunk longer each time::

    known   |---- chunk ----|---- chunk ----|-- ... its tokens, and where each begins
    new     |---- chunk ----|---- chunk ----|-- something else
                               └ window ┘ is tokenized again, with all that follows

A token depends on the text around it, not on all of it: if a few tokens of the window match the
known ones, those before are assumed to match, too. Otherwise the whole text is tokenized.
"""

import hashlib
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

from tokenizers import Tokenizer

CHUNK = 1024
"""Characters; shorter texts are tokenized as a whole."""

_WINDOW = 256
_AGREEING = 8
"""Consecutive tokens that must match."""

_MAX_TOKENS = 8_000_000


@dataclass(frozen=True, slots=True)
class _Known:
    """A text's tokens, and the position of each token's first character."""

    ids: "array[int]"
    starts: "array[int]"


@dataclass(frozen=True, slots=True)
class Beginning:
    """A text, and how much of it is known.

    Attributes:
        text: The whole text.
        add_special: Whether the tokenizer adds its special tokens.
        digests: Of all beginnings of whole chunks.
        num_known: Known ones among them.
    """

    text: str
    add_special: bool
    digests: list[bytes]
    num_known: int

    @property
    def num_left(self) -> int:
        """Characters that are not known."""
        return len(self.text) - self.num_known * CHUNK


class IncrementalTokenizer:
    """Tokenizes texts. For any thread.

    Attributes:
        num_characters: Characters that were tokenized.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_characters = 0
        self._tokenizer = tokenizer
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # by the digest of a beginning
        self._num_tokens = 0
        self._guard = threading.Lock()

    def begin(self, text: str, add_special: bool) -> Beginning:
        """Look up how much of a text is known."""
        digests = _digests(text, add_special)
        known = (at for at in range(len(digests), 0, -1) if digests[at - 1] in self._known)
        return Beginning(text, add_special, digests, next(known, 0))

    def finish(self, beginning: Beginning) -> "array[int]":
        """Return the tokens of the whole text."""
        text, digests = beginning.text, beginning.digests
        for number in range(beginning.num_known, 0, -1):
            known = self._known.get(digests[number - 1])
            tokens = None if known is None else self._continue(known, text, number * CHUNK)
            if tokens is not None:
                break
        else:
            tokens = self._tokenize(text, 0, beginning.add_special)
        with self._guard:
            self._remember(digests, tokens)
        return tokens.ids

    def _tokenize(self, text: str, start: int, add_special: bool) -> _Known:
        self.num_characters += len(text) - start
        encoding = self._tokenizer.encode(text[start:], add_special_tokens=add_special)
        starts = array("I", [start + at for at, _ in encoding.offsets])
        return _Known(array("I", encoding.ids), starts)

    def _continue(self, known: _Known, text: str, common: int) -> _Known | None:
        """Tokenize from a window before the end of the common text; None without a match."""
        end = bisect_left(known.starts, common)
        first = bisect_left(known.starts, common - _WINDOW)
        if end - first < 2 * _AGREEING:
            return None
        new = self._tokenize(text, known.starts[first], False)
        for at in range(first, end - _AGREEING):
            place = bisect_left(new.starts, known.starts[at])
            stop, new_stop = at + _AGREEING, place + _AGREEING
            same_ids = known.ids[at:stop] == new.ids[place:new_stop]
            if same_ids and known.starts[at:stop] == new.starts[place:new_stop]:
                return _Known(
                    known.ids[:at] + new.ids[place:], known.starts[:at] + new.starts[place:]
                )
        return None

    def _remember(self, digests: list[bytes], tokens: _Known) -> None:
        for digest in digests:
            before = self._known.pop(digest, None)
            self._num_tokens -= 0 if before is None else len(before.ids)
            self._known[digest] = tokens
            self._num_tokens += len(tokens.ids)
        while self._num_tokens > _MAX_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self._num_tokens -= len(oldest.ids)


def _digests(text: str, add_special: bool) -> list[bytes]:
    """Return the digests of all beginnings of whole chunks."""
    hashed, digests = hashlib.blake2b(b"+" if add_special else b"-", digest_size=16), []
    for end in range(CHUNK, len(text) + 1, CHUNK):
        hashed.update(text[end - CHUNK : end].encode("utf-8", "surrogatepass"))
        digests.append(hashed.digest())
    return digests

"""``IncrementalTokenizer``: of a text that begins as a known one, only the rest is tokenized.

Texts are found by the digests of their beginnings, a chunk longer each time. Each beginning has the
tokens of its last chunk, except those of a window at its end, which depend on what follows::

    known   |---- chunk ----|---- chunk ----|-- something
                          └ window ┘      └ window ┘
    new     |---- chunk ----|---- chunk ----|-- something else
                                      └ is tokenized again from the window before the first
                                        unknown token, with all that follows

A token depends on the text around it, not on all of it: if a few tokens of that window match the
known ones, those before are assumed to match, too. Otherwise the whole text is tokenized.
"""

import hashlib
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Tokenizer

CHUNK = 512
"""Characters; shorter texts are tokenized as a whole."""

_WINDOW = 192
_AGREEING = 8
"""Consecutive tokens that must match."""

_MAX_TOKENS = 8_000_000


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Consecutive tokens, and the position of each one's first character in the whole text."""

    ids: "array[int]"
    starts: "array[int]"

    def __add__(self, other: "_Tokens") -> "_Tokens":
        return _Tokens(self.ids + other.ids, self.starts + other.starts)

    def __getitem__(self, part: slice) -> "_Tokens":
        return _Tokens(self.ids[part], self.starts[part])


@dataclass(frozen=True, slots=True)
class Beginning:
    """A text, and how much of it is known.

    Attributes:
        text: The whole text.
        add_special: Whether the tokenizer adds its special tokens.
        digests: Of all beginnings of whole chunks.
        known: Tokens of the known ones among them.
    """

    text: str
    add_special: bool
    digests: list[bytes]
    known: list[_Tokens]

    @property
    def num_left(self) -> int:
        """Characters that are not known."""
        return len(self.text) - len(self.known) * CHUNK


class IncrementalTokenizer:
    """Tokenizes texts. For any thread.

    Attributes:
        num_characters: Characters that were tokenized.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_characters = 0
        self._tokenizer = tokenizer
        self._known: OrderedDict[bytes, _Tokens] = OrderedDict()  # by the digest of a beginning
        self._num_tokens = 0
        self._guard = threading.Lock()

    def begin(self, text: str, add_special: bool) -> Beginning:
        """Look up how much of a text is known."""
        digests, known = _digests(text, add_special), list[_Tokens]()
        with self._guard:
            for digest in digests:
                if (tokens := self._known.get(digest)) is None:
                    break
                self._known.move_to_end(digest)
                known.append(tokens)
        return Beginning(text, add_special, digests, known)

    def finish(self, beginning: Beginning) -> "array[int]":
        """Return the tokens of the whole text."""
        tokens = self._continue(beginning) if beginning.known else None
        num_known = len(beginning.known)
        if tokens is None:
            tokens, num_known = self._tokenize(beginning.text, 0, beginning.add_special), 0
        ends = range(num_known * CHUNK, (len(beginning.digests) + 1) * CHUNK, CHUNK)
        places = [bisect_left(tokens.starts, end - _WINDOW) for end in ends]
        with self._guard:
            parts = (tokens[start:end] for start, end in pairwise(places))
            for digest, part in zip(beginning.digests[num_known:], parts, strict=True):
                self._remember(digest, part)
        return tokens.ids

    def _tokenize(self, text: str, start: int, add_special: bool) -> _Tokens:
        self.num_characters += len(text) - start
        encoding = self._tokenizer.encode(text[start:], add_special_tokens=add_special)
        starts = array("I", [start + at for at, _ in encoding.offsets])
        return _Tokens(array("I", encoding.ids), starts)

    def _continue(self, beginning: Beginning) -> _Tokens | None:
        """Tokenize from a window before the first unknown token; None without a match."""
        known = _Tokens(array("I"), array("I"))
        for part in beginning.known:
            known.ids.extend(part.ids)
            known.starts.extend(part.starts)
        end = len(known.ids)
        first = bisect_left(known.starts, len(beginning.known) * CHUNK - 2 * _WINDOW)
        if end - first < 2 * _AGREEING:
            return None
        new = self._tokenize(beginning.text, known.starts[first], False)
        for at in range(first, end - _AGREEING):
            place = bisect_left(new.starts, known.starts[at])
            if known[at : at + _AGREEING] == new[place : place + _AGREEING]:
                return known[:at] + new[place:]
        return None

    def _remember(self, digest: bytes, tokens: _Tokens) -> None:
        before = self._known.pop(digest, None)
        self._num_tokens += len(tokens.ids) - (0 if before is None else len(before.ids))
        self._known[digest] = tokens
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

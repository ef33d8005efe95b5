"""A tokenizer for logs without a model.

A token is up to six letters with the blank before them, up to three digits, a run of blanks, or any
other character. Counts are close to those of byte-level BPE on English text, and the position at
which two texts differ is exact.
"""

import re

from ostinato.lab.explain_log import Tokenizer
from ostinato.lab.request_log import render_plainly

_PIECES = re.compile(r" ?[^\W\d_]{1,6}|\d{1,3}|\s+|.", re.DOTALL)


class _Numbers(dict[str, int]):
    """Numbers keys in the order in which they are first asked for."""

    def __missing__(self, key: str) -> int:
        """Give the next number."""
        number = self[key] = len(self)
        return number


class WordTokens:
    """Numbers pieces of text in the order in which they come."""

    def __init__(self) -> None:
        """Know no piece."""
        self._ids = _Numbers()
        self._pieces: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's pieces."""
        ids = self._ids
        return [ids[piece] for piece in _PIECES.findall(text)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of pieces."""
        if len(self._pieces) < len(self._ids):
            self._pieces = list(self._ids)
        return "".join(self._pieces[number] for number in ids)


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer that needs no model, and renders requests without a template."""
    words = WordTokens()
    return Tokenizer(words.encode, render_plainly, words.decode)

"""A tokenizer for logs without a model.

A token is up to six letters with the blank before them, up to three digits, a run of blanks, or any
other character. Counts are close to those of byte-level BPE on English text, and the position at
which two texts differ is exact.
"""

import re
from collections import defaultdict

from ostinato.lab.log.request_log import render_plainly
from ostinato.lab.replay.explain_log import Tokenizer

_PIECES = re.compile(r" ?[^\W\d_]{1,6}|\d{1,3}|\s+|.", re.DOTALL)


class WordTokens:
    """Numbers pieces of text in order of first appearance."""

    def __init__(self) -> None:
        """Start without pieces."""
        self._ids = defaultdict[str, int]()
        self._ids.default_factory = self._ids.__len__  # a new piece gets the next number
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

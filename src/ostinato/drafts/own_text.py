"""The text of one sequence as a source of drafts: its prompt and what it has generated.

An edit quotes the file of the prompt, a loop repeats a call, a list its own shape. Where
the last tokens stood before, the text may go on as it did there.
"""

from array import array

import numpy as np

from ostinato.core.identity import PrefixKey
from ostinato.drafts.ngrams import LONG, SHORT, NgramTable, digests, salted, weigh

FEW_TOKENS = 16
"""New tokens up to which they are indexed one by one."""


class OwnText:
    """Positions in the tokens of a key, which grow.

    Attributes:
        weights: Of the last ``LONG`` and ``SHORT`` tokens, as ``weigh`` returns them.
    """

    def __init__(self, min_places: int = 256) -> None:
        """Begin with nothing indexed; tables have four places per token, and at least these."""
        self._min_places = min_places
        self.weights: dict[int, int] = {}
        self._num_indexed = 0
        self._tables: dict[int, NgramTable] = {}

    def place(self, key: PrefixKey, length: int) -> int:
        """Return where the text goes on after an earlier occurrence of its last tokens; 0 if none.

        Args:
            key: The sequence, of which ``update`` has indexed the tokens so far.
            length: Tokens to compare, ``LONG`` or ``SHORT``.
        """
        tokens, end = key.tokens, len(key.tokens)
        if end <= length or not self._tables:
            return 0
        tail = tokens[end - length :]
        place = self._tables[length].get(salted(self.weights[length]))
        is_earlier = length <= place < end
        return place if is_earlier and tokens[place - length : place] == tail else 0

    def read_on(self, key: PrefixKey, place: int, num_tokens: int) -> "array[int]":
        """Return the tokens from a place on; where the text ends first, its repetition goes on."""
        known = key.tokens[place : place + num_tokens]
        if len(known) < num_tokens:  # a repetition of what lies between the two places
            known = (known * (num_tokens // len(known) + 1))[:num_tokens]
        return known

    def update(self, key: PrefixKey) -> None:
        """Index the tokens that were added: each position that has a token.

        Cost: 5 µs for one token, and 20 ns per token of a prompt.
        """
        end = len(key.tokens)
        if not self._tables or 2 * end > len(self._tables[SHORT].places):
            self._tables = {n: NgramTable(n, max(self._min_places, 4 * end)) for n in (LONG, SHORT)}
            self._num_indexed = 0
        for length, table in self._tables.items():
            first = max(self._num_indexed, length)
            if end - first > FEW_TOKENS:
                tokens = np.frombuffer(key.tokens[first - length : end - 1], dtype=np.uint32)
                table.put_all(digests(tokens, length), np.arange(first, end))
                continue
            if first == self._num_indexed < end and length in self.weights:
                table.put(salted(self.weights[length]), first)  # these were the last ones
                first += 1
            for place in range(first, end):
                table.put(salted(weigh(key.tokens[place - length : place])), place)
        self._num_indexed = end
        self.weights = {n: weigh(key.tokens[-n:]) for n in (LONG, SHORT) if n <= end}

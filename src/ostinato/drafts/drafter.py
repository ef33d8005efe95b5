"""Looks for drafts of the sequences that decode, and learns how often they are right.

Sources, in the order in which they are tried:

1. ``grammar``: what a structured output must continue with;
2. ``answer``, ``prompt``: where the last 8 tokens of the sequence stood before, then the last 4;
3. ``cache``: the same in the text of its tenant's cached blocks.

Whatever a source offers is compared with the tokens that come, whether rows were computed for it or
not, so a source whose guesses are wrong costs its look-ups and no more.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from ostinato.core.ids import SequenceId
from ostinato.drafts.gain import RowPrice, rows_worth
from ostinato.drafts.ngrams import LONG, SHORT
from ostinato.drafts.own_text import OwnText
from ostinato.drafts.tree_text import TreeText
from ostinato.sched.sequence import Sequence
from ostinato.sched.step_planner import Drafts
from ostinato.scheduling.learned_prices import LearnedPrices

MAX_ROWS = 16
"""Drafted rows of one sequence in a step."""

LEARNING_RATE = 1 / 8
"""Weight of the newest token in how often a source is right."""

Kind = tuple[str, int]
"""A source, and the tokens of its match; 0 for a grammar."""

FIRST_CHANCES: dict[Kind, float] = {
    ("grammar", 0): 0.95,
    ("answer", LONG): 0.8,
    ("prompt", LONG): 0.8,
    ("cache", LONG): 0.7,
    ("answer", SHORT): 0.5,
    ("prompt", SHORT): 0.5,
    ("cache", SHORT): 0.4,
}
"""How often the next token of each kind of draft is taken to be right before any was seen."""


@runtime_checkable
class Foresight(Protocol):
    """A constraint of an output that knows more than its next token."""

    def forced(self) -> list[int]:
        """Return the ids that must come next, as the tokenizer would write them; often none."""

    def num_allowed(self, tokens: "array[int]") -> int:
        """Return how many of some tokens it would allow to come next, one after the other."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafted tokens since the start, by source.

    Attributes:
        drafted: Rows that were computed for drafts.
        accepted: Drafts that were the model's own tokens.
    """

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)


class Drafter(Drafts):
    """Drafts from a sequence's own text, its grammar and its tenant's cached text."""

    def __init__(
        self,
        prices: LearnedPrices,
        tree: TreeText | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin with nothing learned.

        Args:
            prices: What steps cost.
            tree: The text of cached blocks; None reads none.
            is_paused: Whether steps have one token per sequence for now.
        """
        self._price, self._tree, self._is_paused = RowPrice(prices), tree, is_paused
        self._readers: dict[SequenceId, _Reader] = {}
        self._drafted, self._accepted = Counter[str](), Counter[str]()

    @property
    def counts(self) -> DraftCounts:
        """Counts since the start."""
        return DraftCounts(dict(self._drafted), dict(self._accepted))

    def propose(self, decoding: list[Sequence]) -> "dict[SequenceId, array[int]]":
        """Return drafts for those sequences whose expected gain is above its price."""
        if self._is_paused():
            return {}
        if len(self._readers) > 2 * len(decoding) + 8:
            live = {sequence.sequence_id for sequence in decoding}
            self._readers = {name: r for name, r in self._readers.items() if name in live}
        readers = [reader for s in decoding if (reader := self._reader(s)) and reader.look(s)]
        if not readers:
            return {}
        step_s, row_s = self._price.of([len(sequence.key) for sequence in decoding])
        chances = [(reader.chance, len(reader.guess)) for reader in readers]
        counts = rows_worth(chances, step_s, row_s, len(decoding))
        pairs = zip(readers, counts, strict=True)
        return {reader.sequence_id: reader.guess[:count] for reader, count in pairs if count}

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of a step by their source."""
        reader = self._readers.get(sequence.sequence_id)
        if reader is not None:
            self._drafted[reader.kind[0]] += num_drafted
            self._accepted[reader.kind[0]] += num_accepted

    def _reader(self, sequence: Sequence) -> "_Reader | None":
        """Return what looks for a sequence's drafts; None where it may have none."""
        if sequence.fork_seeds or sequence.max_drafts < 1:
            return None
        reader = self._readers.get(sequence.sequence_id)
        if reader is None:
            reader = self._readers[sequence.sequence_id] = _Reader(sequence, self._tree)
        return reader


class _Reader:
    """The drafts of one sequence.

    Attributes:
        sequence_id: The sequence.
        guess: The present draft, however long.
        kind: Its source and the length of the match.
    """

    def __init__(self, sequence: Sequence, tree: TreeText | None) -> None:
        self.sequence_id = sequence.sequence_id
        self.guess, self.kind = array("I"), ("answer", SHORT)
        self._guessed_at = 0  # tokens of the sequence when the guess was made
        self._own, self._tree = OwnText(), tree
        self._owners = () if tree is None else tree.owners(sequence.key.identity)
        self._chances = dict(FIRST_CHANCES)
        self._has_foresight = isinstance(sequence.constraint, Foresight)  # slow, hence once

    @property
    def chance(self) -> float:
        """How often a token of the present guess is right if all before it are."""
        return self._chances[self.kind]

    def look(self, sequence: Sequence) -> bool:
        """Learn from the last guess, and make another; False if there is none."""
        self._learn(sequence)
        self._own.update(sequence.key)
        limit = min(MAX_ROWS, sequence.max_drafts)
        self.guess, self.kind = self._guess(sequence, limit)
        self._guessed_at = len(sequence.key)
        return bool(self.guess)

    def _learn(self, sequence: Sequence) -> None:
        """Compare the last guess with the tokens that came, up to the first that differs."""
        came = sequence.key.tokens[self._guessed_at : self._guessed_at + len(self.guess)]
        chance = self._chances[self.kind]
        for token, guess in zip(came, self.guess, strict=False):
            chance += LEARNING_RATE * ((token == guess) - chance)
            if token != guess:
                break
        self._chances[self.kind] = chance

    def _guess(self, sequence: Sequence, limit: int) -> "tuple[array[int], Kind]":
        constraint = sequence.constraint
        foresight = cast(Foresight, constraint) if self._has_foresight else None
        if foresight is not None and (forced := foresight.forced()):
            return array("I", forced[:limit]), ("grammar", 0)
        guess, kind = self._from_texts(sequence, limit)
        if guess and foresight is not None:
            guess = guess[: foresight.num_allowed(guess)]
        return guess, kind

    def _from_texts(self, sequence: Sequence, limit: int) -> "tuple[array[int], Kind]":
        """Look the last tokens up, the longer match first."""
        key = sequence.key
        tail = key.tokens[-LONG:]
        for length in (LONG, SHORT):
            place = self._own.place(key, length)
            if place:
                source = "prompt" if place < sequence.num_prompt_tokens else "answer"
                return self._own.read_on(key, place, limit), (source, length)
            if self._tree is not None and len(tail) >= length:
                weight = self._own.weights[length]
                guess = self._tree.continuation(tail[-length:], weight, self._owners, limit)
                if guess:
                    return guess, ("cache", length)
        return array("I"), self.kind

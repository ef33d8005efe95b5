"""The lists of token ids in sampling parameters, in the form in which every step reads them.

A request's prompts and forks share its parameters, so a list of 200,000 ids becomes a mask once,
not once per row and step. What was prepared is kept for as long as the parameters are alive.
"""

import weakref
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostinato.core.plan import SampleTask
from ostinato.core.sampling_params import SamplingParams

Mask = NDArray[np.uint8]
"""One bit per id, the lowest of a byte first, shape (ceil(vocab / 8),)."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The prepared lists of one request's parameters.

    Attributes:
        bias_ids: Ids with a bias, shape (num_biases,).
        biases: Their biases, shape (num_biases,).
        allowed: The ``allowed_token_ids``; None allows all.
        before_end: All ids but the ``stop_token_ids``; None if there are none.
        bad_ids: Words of one token, shape (num_bad_ids,).
        bad_words: Words of several tokens by the last token but one: those before the last, and the
            last.
    """

    bias_ids: NDArray[np.int32]
    biases: NDArray[np.float64]
    allowed: Mask | None
    before_end: Mask | None
    bad_ids: NDArray[np.int64]
    bad_words: dict[int, list[tuple[list[int], int]]] = field(default_factory=dict)

    def completed_words(self, output: "array[int]") -> list[int]:
        """Return the ids that would complete a bad word of several tokens.

        Cost: one lookup, and a comparison for each word whose last token but one was sampled last.
        """
        if not output:
            return []
        return [
            last
            for first, last in self.bad_words.get(output[-1], ())
            if output[-len(first) :].tolist() == first
        ]


class PreparedLists:
    """The token lists of all live sampling parameters."""

    def __init__(self) -> None:
        self._prepared: dict[int, TokenLists] = {}

    def of(self, params: SamplingParams, vocab: int) -> TokenLists:
        """Return the lists of some parameters, prepared at their first use."""
        prepared = self._prepared.get(id(params))
        if prepared is None:
            prepared = prepare(params, vocab)
            self._prepared[id(params)] = prepared
            weakref.finalize(params, self._prepared.pop, id(params)).atexit = False
        return prepared


def prepare(params: SamplingParams, vocab: int) -> TokenLists:
    """Prepare lists for a vocabulary; ids outside of it are left out."""
    bias, allowed = params.logit_bias, params.allowed_token_ids
    assert not bias or max(bias) < vocab, "admission refuses biased ids outside the vocabulary"
    bad_words: dict[int, list[tuple[list[int], int]]] = {}
    for *first, last in params.bad_words_ids:
        if first:
            bad_words.setdefault(first[-1], []).append((first, last))
    stops = params.stop_token_ids
    return TokenLists(
        np.fromiter(bias, np.int32, len(bias)),
        np.fromiter(bias.values(), np.float64, len(bias)),
        None if allowed is None else np.packbits(_is_in(allowed, vocab), bitorder="little"),
        np.packbits(~_is_in(stops, vocab), bitorder="little") if stops else None,
        np.array([word[0] for word in params.bad_words_ids if len(word) == 1], dtype=np.int64),
        bad_words,
    )


def masks_of(task: SampleTask, lists: TokenLists) -> list[Mask]:
    """Return the masks of a row: only ids whose bit is set in each may be sampled."""
    masks = (
        lists.allowed,
        lists.before_end if len(task.output) < task.params.min_tokens else None,
        None if task.constraint is None else task.constraint.mask(),
    )
    return [mask for mask in masks if mask is not None]


def banned_ids(task: SampleTask, lists: TokenLists) -> NDArray[np.int64]:
    """Return ids that may not be sampled now, besides those that a mask excludes."""
    words = lists.completed_words(task.output) if lists.bad_words else []
    if not task.banned and not words:
        return lists.bad_ids
    return np.array([*task.banned, *words, *lists.bad_ids], dtype=np.int64)


def _is_in(ids: Collection[int], vocab: int) -> NDArray[np.bool_]:
    bits = np.zeros(vocab, dtype=np.bool_)
    numbers = np.fromiter(ids, np.int64, len(ids))
    bits[numbers[numbers < vocab]] = True
    return bits

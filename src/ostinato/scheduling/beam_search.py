"""Beam search: which beams of a request go on after each token, and which answers are the best.

After each step the beams' most likely next tokens are compared by the log-probability of all that
was generated::

    beam 0  ─► a  -0.3      beam 0 a          the best that do not end go on
            ─► b  -1.1  ─►  beam 1 c
    beam 1  ─► c  -0.9      "beam 0 b": ended, if it is among the best ``width``

The rules, and the three kinds of stopping early, are those of ``transformers``; so equal logits
give equal answers.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.plan import SampledToken, TokenLogprob
from ostinato.core.sampling_params import Beams


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of a beam, as a chain from the last one.

    Attributes:
        parent: What precedes its last token; None at the prompt's end.
        token: Its last token; None at the prompt's end.
        logprob: Natural logarithm of the probability of all of its tokens.
        num_tokens: How many there are.
    """

    parent: "Beam | None" = None
    token: SampledToken | None = None
    logprob: float = 0.0
    num_tokens: int = 0

    def continued(self, token: SampledToken, logprob: float) -> "Beam":
        """Return the beam with one token more."""
        return Beam(self, token, logprob, self.num_tokens + 1)

    @property
    def tokens(self) -> list[SampledToken]:
        """Its tokens in order."""
        tokens, beam = list[SampledToken](), self
        while beam.token is not None and beam.parent is not None:
            tokens.append(beam.token)
            beam = beam.parent
        return tokens[::-1]


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """A beam that has ended.

    Attributes:
        beam: The beam.
        score: Its log-probability, divided by a power of its length.
        is_cut: Whether it ended because it is as long as an answer may be.
    """

    beam: Beam
    score: float
    is_cut: bool


class BeamSearch:
    """The beams of one request.

    Attributes:
        answers: The best answers so far, the best first; at most ``width``.
        is_over: Whether nothing goes on.
        num_tokens: Tokens that were computed for all beams so far.
    """

    def __init__(
        self, beams: Beams, ends: frozenset[int], max_tokens: int, num_shown: int = 0
    ) -> None:
        """Begin at the end of a prompt.

        Args:
            beams: How they are searched.
            ends: Tokens that end an answer.
            max_tokens: Most tokens of an answer.
            num_shown: Alternatives to keep of each token.
        """
        self.answers: list[BeamAnswer] = []
        self.is_over = False
        self.num_tokens = 0
        self._settings, self._ends, self._max_tokens = beams, ends, max_tokens
        self._num_shown = num_shown
        self._beams = [Beam()]

    @property
    def width(self) -> int:
        """Most beams at once."""
        return self._settings.width

    @property
    def num_alternatives(self) -> int:
        """Number of most likely tokens needed of each beam, those that may end it included."""
        return self.width + len(self._ends)

    def choose(self, samples: Sequence[SampledToken]) -> list[tuple[int, int]]:
        """Extend the beams; see ``core.plan.Search``."""
        self.num_tokens += len(samples)
        going, closed = list[tuple[int, Beam]](), self._is_closed
        ended = list[BeamAnswer]()
        for place, (row, beam) in enumerate(self._candidates(samples)):
            is_cut = beam.num_tokens >= self._max_tokens
            if not is_cut and beam.token is not None and beam.token.token_id not in self._ends:
                going.append((row, beam))
            elif place < self.width and not closed:
                is_end = beam.token is not None and beam.token.token_id in self._ends
                score: float = beam.logprob / beam.num_tokens**self._settings.length_penalty
                ended.append(BeamAnswer(beam, score, not is_end))
        del going[self.width :]
        self.answers = sorted([*self.answers, *ended], key=lambda answer: -answer.score)
        del self.answers[self.width :]
        self._beams = [beam for _, beam in going]
        self.is_over = not going or self._is_closed or not self._can_improve
        if self.is_over:
            return []
        return [(row, beam.token.token_id) for row, beam in going if beam.token is not None]

    def _candidates(self, samples: Sequence[SampledToken]) -> list[tuple[int, Beam]]:
        """Return the best continuations of all beams, with the row of each; the best first.

        Among these, ``width`` go on, even if every beam could end in all ways.
        """
        num_candidates = (1 + len(self._ends)) * self.width
        pairs = [
            (beam.logprob + other.logprob, row, other)
            for row, (beam, sample) in enumerate(zip(self._beams, samples, strict=True))
            for other in sample.logprobs[1:]
        ]
        best = heapq.nsmallest(
            num_candidates, pairs, key=lambda pair: (-pair[0], pair[1], pair[2].rank)
        )
        return [
            (row, self._beams[row].continued(self._shown(token, samples[row]), logprob))
            for logprob, row, token in best
        ]

    def _shown(self, token: TokenLogprob, sample: SampledToken) -> SampledToken:
        """Return a token as if it had been sampled, with the alternatives that are shown."""
        others = sample.logprobs[1 : 1 + self._num_shown]
        return SampledToken(token.token_id, (token, *others))

    @property
    def _is_full(self) -> bool:
        return len(self.answers) == self.width

    @property
    def _is_closed(self) -> bool:
        """Whether the search ends with the answers that there are."""
        return self._is_full and self._settings.early_stopping is True

    @property
    def _can_improve(self) -> bool:
        """Whether the best beam may become a better answer than the last of them."""
        if not self._is_full:
            return True
        settings, best = self._settings, self._beams[0]
        is_long = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self._max_tokens if is_long else best.num_tokens
        score: float = best.logprob / length**settings.length_penalty
        return score > self.answers[-1].score

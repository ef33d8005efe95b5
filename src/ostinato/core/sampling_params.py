"""The sampling parameters that the scheduler and the sampler read.

A user gives those of ``engine.sampling_params``, which checks them and adds what concerns text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Beams:
    """How beams are searched, with the meaning of ``transformers``.

    Attributes:
        width: Beams that go on after each token.
        length_penalty: Exponent of an answer's length, which its log-probability is divided by:
            above 0 longer answers gain, below 0 shorter ones.
        early_stopping: True ends the search with the ``width``-th answer; False once the best
            beam, at its length now, is not better than the last of them; ``never`` once it cannot
            become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SamplingParams:
    """How the tokens of one request are sampled.

    Attributes:
        n: Continuations to sample; the prompt is computed once for all.
        temperature: 0 is greedy.
        top_p: Keep the most likely tokens up to this mass, in (0, 1].
        top_k: Keep this many of the most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one.
        presence_penalty: Subtracted once from the logit of each token generated so far.
        frequency_penalty: Subtracted for each time that a token was generated.
        repetition_penalty: Divides (or, below zero, multiplies) logits of seen tokens, prompt
            included; 1 is off.
        logit_bias: Added to the logits of these token ids.
        allowed_token_ids: No other token is generated; None allows all. Without the model's
            end-of-sequence id, the text ends at ``max_tokens`` or a stop string.
        bad_words_ids: Rows of token ids that are not generated: the id that would complete one
            is not sampled.
        seed: The same seed gives the same tokens whatever else is in the batch; None draws one.
        stop_token_ids: Ids that end the text, besides the model's end-of-sequence ids.
        max_tokens: Most tokens to generate; None is the model's or the pool's limit.
        min_tokens: No end-of-sequence, stop id or stop string before this many tokens.
        ignore_eos: Go on after the model's end-of-sequence ids.
        logprobs: Log-probabilities of the sampled token and of this many alternatives; -1 is the
            whole vocabulary. At most the engine's ``max_logprobs``.
        prompt_logprobs: The same for each prompt token from ``prompt_logprob_start`` on.
        prompt_logprob_start: Position of the first prompt token that gets one, at least 1, since
            nothing precedes the token at 0. Each needs the logits before it, so a request reads
            the cache up to the token before; with 1 it does not read it.
        readout: Rows of the head whose logits are read after the prompt, in place of a text; an
            empty tuple reads the hidden state, which is the head's input. None reads nothing.
            Needs ``n=1`` and ``max_tokens=1``.
        pooling: Which hidden state an empty ``readout`` reads: that of the last token, or the mean
            of all. A mean needs those of the whole prompt, so such a request does not read the
            cache.
        drafts: ``off`` computes one token per step; tokens and log-probabilities are the same.
        beams: Search the most likely answers in place of sampling, and return the best ``n``.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 1
    readout: tuple[int, ...] | None = None
    pooling: Literal["last", "mean"] = "last"
    drafts: Literal["auto", "off"] = "auto"
    beams: Beams | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

"""The plan of one step and its result.

A step is one forward pass over a flattened row of tokens from many sequences. The scheduler
returns a ``StepPlan``, the runner a ``StepResult`` in the same order::

    sequence     new tokens       written to slots          read through
    A (decode)   x                table[p // B] * B + p % B  tables of A
    B (prefill)  x x x x x        ...                        tables of B
    copies       source slots ──► target slots, in every layer, after its writes

Copies come after the writes of the same layer, so that a sequence may copy what another
sequence of the same step computes (law 1), and before attention reads.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ostinato.core.identity import Identity, ImageSpan
from ostinato.core.ids import SequenceId, SlotId
from ostinato.core.sampling_params import SamplingParams


class TokenConstraint(Protocol):
    """Restricts the next token of one output, such as a grammar's state. Methods never raise."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    @property
    def allows_all(self) -> bool:
        """Whether any id may come next, so that no mask is needed."""

    @property
    def error(self) -> str:
        """Why the output cannot be continued; empty if it can."""

    def copy(self) -> Self:
        """Return an independent constraint in the same state."""

    def mask(self) -> NDArray[np.uint8]:
        """Return the ids that may come next: one bit each, the lowest of a byte first.

        Shape (>= ceil(vocab_size / 8),); all clear after a failure.
        """

    def advance(self, token_id: int) -> None:
        """Add a sampled token, which the mask allowed."""


class Search(Protocol):
    """Chooses which sequences of one request go on, such as its best beams; never raises."""

    @property
    def width(self) -> int:
        """Most sequences at once."""

    def choose(self, samples: "Sequence[SampledToken]") -> "list[tuple[int, int]]":
        """Take what was sampled behind each sequence; return what goes on.

        Args:
            samples: One per sequence that goes on, in the order of the last answer; first the
                prompt's alone.

        Returns:
            Rows of ``samples``, each with the token that follows; a row may go on several times.
            Empty once the search is over.
        """


@dataclass(slots=True)
class CopyRun:
    """Neighbouring slots to copy in every layer; immutable once it is handed out."""

    source: SlotId  # first slot read; written before this step, or in it by no copy
    target: SlotId  # first slot written; no other run or new token writes there
    num_tokens: int  # slots copied; neither side crosses a block
    group: int = 0  # layers to copy in: 0 for full attention, then one per window size


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy between two slots of the pool of states, in every layer that keeps a state."""

    source: int | None  # slot read; None is the zero state, at the beginning of a prompt
    target: int  # slot written; no other copy of the step writes there


@dataclass(frozen=True, slots=True)
class SampleTask:
    """How to choose the token after a sequence's last new token."""

    params: SamplingParams
    seeds: tuple[int, ...]
    """One per sample wanted; more than one where a prompt is forked (``n > 1``)."""
    prompt: "array[int]"  # prompt ids, shape (num_prompt_tokens,), for the repetition penalty
    output: "array[int]"  # ids generated so far, shape (num_output_tokens,)
    banned: tuple[int, ...] | frozenset[int] = ()
    """Ids that may not be sampled now, besides the stop ids of ``params`` below ``min_tokens``."""
    constraint: TokenConstraint | None = None
    """Which ids may be sampled now; only read here. None allows all."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence_id: SequenceId
    tokens: "array[int]"  # ids to compute, shape (num_new_tokens,), at least one
    start: int  # position of the first of them; all before it are in the KV store
    tables: "tuple[array[int], ...]"
    """One block table per group of layers, each of shape (>= ceil((start + num_new_tokens) /
    block_size),). A window group's table names its null block (as many as it has blocks) where the
    window does not reach."""
    sample: SampleTask | None = None
    """What to sample after the last token; None in the middle of a prompt."""
    prompt_targets: "array[int]" = field(default_factory=lambda: array("I"))
    """For prompt log-probs, the prompt ids that follow the new tokens from ``first_target`` on,
    shape (<= num_new_tokens,); empty if none are requested."""
    num_prompt_logprobs: int = 0  # alternatives per prompt target
    identity: Identity = field(default_factory=Identity)
    """Names the adapter that computes it, and from which token on."""
    state_slot: int | None = None
    """Slot of the state that the step reads and writes; None if no layer keeps one."""
    images: tuple[ImageSpan, ...] = ()  # images anywhere in the sequence, in order
    first_target: int = 0  # new tokens before the first that has a prompt target
    drafted: tuple[SampleTask, ...] = ()
    """What to sample after each of the last new tokens, which are drafts: guesses of what the rows
    before them sample. Each task takes the drafts before it to be right."""
    hidden_sum: "array[float] | None" = None
    """Of the hidden states before the new tokens, empty at position 0; None sums none up."""

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes."""

    sequences: tuple[ScheduledSequence, ...]
    """Decoding sequences first, then prefill; each at most once."""
    copies: tuple[CopyRun, ...] = ()  # slots to copy in every layer after its writes
    state_loads: tuple[StateCopy, ...] = ()  # states to copy before anything is computed
    state_saves: tuple[StateCopy, ...] = ()  # states to copy after all is computed, in this order

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(len(sequence.tokens) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability."""

    token_id: int
    logprob: float  # natural logarithm of its probability, before temperature and truncation
    rank: int  # 1 for the most likely token


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token."""

    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """If requested, its own log-probability first, then those of the alternatives from the most
    likely one on."""
    error: str = ""  # why nothing could be sampled, which ends this sequence alone; else empty
    readout: "array[float] | None" = None  # what the parameters' ``readout`` names; else None


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """The result for one scheduled sequence."""

    samples: tuple[SampledToken, ...] = ()
    """One per seed of its sample task; empty without a task. With drafts: one per row up to the
    first whose token is not the draft after it, that one included."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """One tuple per prompt target, laid out as in ``SampledToken``."""
    hidden_sum: "array[float] | None" = None  # the plan's, with the new tokens' hidden states


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one forward pass, in the plan's order."""

    sequences: tuple[SequenceResult, ...]

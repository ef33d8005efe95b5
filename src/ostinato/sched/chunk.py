"""What does one sequence get of a step, and what does the step bring it?"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ostinato.cache.block_table import BlockTable
from ostinato.core.plan import SampledToken, ScheduledSequence
from ostinato.sched.sequence import Sequence


@dataclass(slots=True)
class ScheduledChunk:
    """One sequence's share of the step that is planned or runs.

    Attributes:
        sequence: Who computes.
        num_tokens: New tokens, at least 1.
        children: Continuations that are forked off at the end of this chunk.
        end: Tokens of the sequence that are computed after the step.
        samples: Whether a token follows: all tokens so far are computed after the step.
    """

    sequence: Sequence
    num_tokens: int
    children: list[Sequence] = field(default_factory=list)
    end: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note what stays true until the step is over; every decode is asked for it often."""
        self.end = self.sequence.num_computed + self.num_tokens
        self.samples = self.end == len(self.sequence.key)

    @property
    def family(self) -> list[Sequence]:
        """The sequence and its children, in the order of their samples."""
        return [self.sequence, *self.children]

    def schedule(self) -> ScheduledSequence:
        """Write the chunk down for the runner."""
        sequence, start = self.sequence, self.sequence.num_computed
        assert sequence.table is not None
        seeds = (sequence.seed, *(child.seed for child in self.children))
        return ScheduledSequence(
            sequence.sequence_id,
            sequence.key.tokens[start : self.end],
            start,
            sequence.table.groups,
            sequence.sample_task(seeds) if self.samples else None,
            sequence.prompt_targets(start, self.end),
            sequence.request.params.prompt_logprobs or 0,
        )


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step brought for one sequence.

    Attributes:
        sequence: Whose token it is; its ``finish_reason`` says whether it ended.
        token: The new token; None if it ended without one.
    """

    sequence: Sequence
    token: SampledToken | None = None


def tables_of(chunks: Iterable[ScheduledChunk]) -> list[BlockTable]:
    """List the tables of a step, publishers before those who share their blocks."""
    chunks = list(chunks)
    members = [chunk.sequence for chunk in chunks]
    members += [child for chunk in chunks for child in chunk.children]
    return [member.table for member in members if member.table is not None]

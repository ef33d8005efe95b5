"""One continuation of a request, and its chunk of a step.

A sequence is what the scheduler moves: one prompt and one output. A request with ``n > 1``
starts as one sequence and is forked when its prompt has been computed::

    waiting ──admit──► running ──finish──► ended
       ▲                  │
       └─────preempt──────┘
"""

from array import array
from dataclasses import dataclass, field
from operator import attrgetter
from sys import maxsize

from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import SequenceId
from ostinato.core.plan import (
    SampledToken,
    SampleTask,
    ScheduledSequence,
    TokenConstraint,
    TokenLogprob,
)
from ostinato.core.request import FinishReason, Request

_NO_TOKENS = array("I")
_SEED_OF = attrgetter("seed")


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request."""

    sequence_id: SequenceId  # unique; also the order of arrival
    request: Request
    index: int  # which of the request's ``n`` continuations
    key: PrefixKey  # identity, prompt and output tokens so far
    seed: int
    fork_seeds: tuple[int, ...] = ()
    """Of the other continuations, which are forked when the prompt is computed."""
    num_computed: int = 0  # leading tokens whose KV is in the store
    constraint: TokenConstraint | None = None  # which ids may be sampled next; None allows all
    table: BlockTable | None = None  # its blocks while it runs; None while it waits
    match: PrefixMatch | None = None  # what it found when it came, until it is tried
    num_known_tokens: int = 0  # prompt tokens that would have hit in whole blocks when it came
    num_shared_tokens: int = 0  # prompt tokens that hit in whole blocks at first admission
    num_copied_tokens: int = 0  # prompt tokens that were copied at first admission
    first_planned_s: float | None = None  # when it was first admitted, by the scheduler's clock
    num_preemptions: int = 0
    num_overtakes: int = 0  # later requests that were admitted while it waited
    waits_for: str = ""  # name of the request that it waits or waited for; empty if for none
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    """One tuple per prompt token from ``prompt_logprob_start`` on, if asked for."""
    hidden_sum: "array[float] | None" = None  # of computed tokens, if their mean is read
    finish_reason: FinishReason | None = None  # why it ended; None while it lives
    stop_reason: int | str | None = None  # the id or string that ended it, if one did
    sampled: SampledToken | None = None  # what its search waits for others with; else None
    num_drafted_tokens: int = 0  # rows that were computed for drafts
    num_accepted_tokens: int = 0  # drafts that were right
    num_prompt_tokens: int = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """Its place among others: lower goes first, and is preempted last."""

    def __post_init__(self) -> None:
        """Note what never changes; every step asks for it."""
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.rank = self.request.priority, self.sequence_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.key.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.key.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that still have to go through the model; 1 while decoding."""
        return len(self.key.tokens) - self.num_computed

    @property
    def num_waited_tokens(self) -> int:
        """Prompt tokens that it found, and that were not there when it came."""
        return max(0, self.num_shared_tokens - self.num_known_tokens)

    @property
    def output(self) -> "array[int]":
        """Tokens sampled so far, shape (num_output_tokens,)."""
        return self.key.tokens[self.num_prompt_tokens :]

    @property
    def max_drafts(self) -> int:
        """Most drafts of use to its next step, which samples one token more."""
        params = self.request.params
        limit = maxsize if params.max_tokens is None else params.max_tokens
        return limit - self.num_output_tokens - 1 if params.drafts == "auto" else 0

    @property
    def next_scored(self) -> int | None:
        """Position of the first prompt token whose log-probs are to come; None if none are.

        Of forks the first has them.
        """
        params = self.request.params
        if params.prompt_logprobs is None or self.index:
            return None
        position = params.prompt_logprob_start + len(self.prompt_logprobs)
        return position if position < self.num_prompt_tokens else None

    @property
    def max_hit(self) -> int | None:
        """Tokens that may hit: prompt log-probs need the logits of those that follow.

        A mean needs all hidden states, which no block has. None is all of them.
        """
        params = self.request.params
        if not self.request.cache_read or params.pooling == "mean":
            return 0
        position = None if params.prompt_logprobs is None else self.next_scored
        return None if position is None else position - 1

    @property
    def reading_is_off(self) -> str:
        """The setting that keeps it from using hits; empty if it reads the cache."""
        if not self.request.cache_read:
            return "cache_read=False"
        if self.request.params.pooling == "mean":
            return "pooling='mean'"
        if self.max_hit == 0:  # every logit is needed
            return f"prompt_logprobs={self.request.params.prompt_logprobs}"
        return ""

    def twin(self, index: int, seed: int) -> "Sequence":
        """Make another continuation of the request that has the same tokens so far."""
        return Sequence(
            SequenceId(self.sequence_id - self.index + index),
            self.request,
            index,
            self.key.copy(),
            seed,
            constraint=None if self.constraint is None else self.constraint.copy(),
            num_known_tokens=self.num_known_tokens,
            num_shared_tokens=self.num_shared_tokens,
            num_copied_tokens=self.num_copied_tokens,
            first_planned_s=self.first_planned_s,
        )

    def drafted_tasks(self, drafts: "array[int]") -> tuple[SampleTask, ...]:
        """Describe how the token after each draft is chosen, if all drafts up to it are right."""
        tasks: list[SampleTask] = []
        output, constraint = self.output, self.constraint
        for count, draft in enumerate(drafts, 1):
            if constraint is not None:
                constraint = constraint.copy()
                constraint.advance(draft)
            tasks.append(self.sample_task((self.seed,), output + drafts[:count], constraint))
        return tuple(tasks)

    def sample_task(
        self, seeds: tuple[int, ...], output: "array[int]", constraint: TokenConstraint | None
    ) -> SampleTask:
        """Describe how the token after some output is chosen."""
        params = self.request.params
        if constraint is not None and constraint.allows_all:
            constraint = None
        holds_back = len(output) < params.min_tokens
        # A constraint lets end-of-sequence ids end the text, also where they are to be ignored.
        holds_back = holds_back or (constraint is not None and params.ignore_eos)
        banned = self.request.eos_token_ids if holds_back else ()
        prompt = self.request.prompt_token_ids
        return SampleTask(params, seeds, prompt, output, banned, constraint)


@dataclass(slots=True)
class ScheduledChunk:
    """One sequence's share of the step that is planned or runs."""

    sequence: Sequence  # whose tokens are computed
    num_tokens: int  # new tokens, at least 1
    members: list[Sequence] = field(init=False)
    """The sequence, and its forks if its prompt is complete; each samples a token."""
    end: int = field(init=False)  # tokens of the sequence that are computed after the step
    samples: bool = field(init=False)
    """Whether a token follows: all tokens so far are computed after the step."""
    is_published: bool = False  # whether its blocks are findable already
    drafts: "array[int] | None" = None
    """What may follow; a row is computed for each, and its slot counts only if it is right."""

    def __post_init__(self) -> None:
        """Note what stays true until the step is over; every decode is asked for it often."""
        self.members = [self.sequence]
        self.end = self.sequence.num_computed + self.num_tokens
        self.samples = self.end == len(self.sequence.key.tokens)

    def schedule(self) -> ScheduledSequence:
        """Return what the runner reads of it."""
        sequence, start = self.sequence, self.sequence.num_computed
        params, targets, skipped = sequence.request.params, _NO_TOKENS, 0
        if params.prompt_logprobs is not None and (position := sequence.next_scored) is not None:
            skipped = max(0, position - 1 - start)
            targets = sequence.request.prompt_token_ids[start + skipped + 1 : self.end + 1]
        assert sequence.table is not None
        tokens, task = sequence.key.tokens[start : self.end], None
        if self.samples:
            output = sequence.key.tokens[sequence.num_prompt_tokens :]
            seeds = tuple(map(_SEED_OF, self.members))
            task = sequence.sample_task(seeds, output, sequence.constraint)
        return ScheduledSequence(
            sequence.sequence_id,
            tokens if self.drafts is None else tokens + self.drafts,
            start,
            sequence.table.groups,
            task,
            targets, params.prompt_logprobs or 0,
            sequence.key.identity, sequence.table.state_slot, sequence.key.images, skipped,
            () if self.drafts is None else sequence.drafted_tasks(self.drafts),
            sequence.hidden_sum if start or params.pooling != "mean" else array("d"),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """The result of a step for one sequence."""

    sequence: Sequence  # whose token it is; its ``finish_reason`` says whether it ended
    token: SampledToken | None = None
    """The new token; None if it ended without one, or if its search has not chosen any yet."""

"""A runner without tensors: it executes plans on slots of text, ``fake_kv``.

The runner knows the sequences by what it was told when they were added and by what it sampled
itself, never by asking the scheduler.

A state is the text of all tokens that went into it. States are loaded before the step, each
sequence finds in its slot that of its own prefix or fails, and states are saved after the step.
"""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import SequenceId
from ostinato.core.plan import (
    SampledToken,
    SampleTask,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from ostinato.core.request import Request
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.fake_kv import TORN, Chunk, FakeKV, spell

Sampler = Callable[[SampleTask, int], int]
"""Chooses a token by what came before and a seed, and by nothing else."""


def count_letters(task: SampleTask, seed: int) -> int:
    """Answer a, b, c, ... with seed 0, k, l, m, ... with seed 1: outputs that can be drawn."""
    return ord("a") + (10 * seed + len(task.output)) % 26


def toss_a_coin(task: SampleTask, seed: int) -> int:
    """Answer A or B, unless one of them is banned; the whole prefix and the seed decide."""
    digest = hashlib.blake2b(task.prompt.tobytes() + task.output.tobytes() + str(seed).encode())
    choice = digest.digest()[0] % 2
    is_short = len(task.output) < task.params.min_tokens
    banned = {*task.banned, *(task.params.stop_token_ids if is_short else ())}
    return next(t for t in (ord("AB"[choice]), ord("BA"[choice])) if t not in banned)


class ForwardPassFailed(Exception):
    """What a step raises that was told to fail."""


@dataclass(eq=False)
class Truth:
    """What the KV of one sequence has to be.

    Attributes:
        request: Whose continuation it is.
        seeds: Its own, and those of the siblings that its first sample brings along.
        tokens: Prompt and output.
        identity: The request's, under the weights that it runs with.
        texts: What the slot of each token holds.
    """

    request: Request
    seeds: tuple[int, ...]
    tokens: "array[int]"
    identity: Identity
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Spell the prompt out."""
        self._spell()

    def renew(self, epoch: int) -> None:
        """Begin again under other weights."""
        self.identity = self.identity.renewed(self.identity.weights, epoch)
        self.texts.clear()
        self._spell()

    def append(self, token: int) -> None:
        """Take a sampled token."""
        self.tokens.append(token)
        self._spell()

    def twin(self, seed: int) -> "Truth":
        """Return the truth of a sibling that goes on from here."""
        return Truth(self.request, (seed,), self.tokens[:], self.identity, self.texts[:])

    @property
    def output(self) -> "array[int]":
        """Tokens sampled so far."""
        return self.tokens[len(self.request.prompt_token_ids) :]

    def _spell(self) -> None:
        key = PrefixKey(self.identity, self.tokens, self.request.images)
        self.texts = spell(key, self.texts)


class FakeRunner(FakeKV):
    """Executes plans on slots of text, and does not let anything wrong pass."""

    def __init__(self, config: PrefixCacheConfig, sample: Sampler = count_letters) -> None:
        """Make a store in which nothing was ever written."""
        super().__init__(config)
        self._sample = sample
        self._truths: dict[SequenceId, Truth] = {}
        self._fails = False
        self._cannot_sample: set[SequenceId] = set()

    def expect(self, sequence_id: SequenceId, request: Request, seeds: tuple[int, ...]) -> None:
        """Learn what a sequence is before it is first planned."""
        tokens = request.prompt_token_ids[:]
        self._truths[sequence_id] = Truth(request, seeds, tokens, request.identity)

    def knows(self, sequence_id: SequenceId) -> bool:
        """Whether it has seen a sequence's tokens; not of a sibling before its first one."""
        return sequence_id in self._truths

    def truth(self, sequence_id: SequenceId) -> Truth:
        """Return what a sequence is."""
        return self._truths[sequence_id]

    def renew(self, sequence_id: SequenceId, epoch: int) -> None:
        """Let a sequence that it knows begin again under other weights, if they are others."""
        truth = self._truths.get(sequence_id)
        if truth is not None and truth.identity.epoch != epoch:
            truth.renew(epoch)

    def forget(self, sequence_id: SequenceId) -> None:
        """Let go of a sequence that ended, before or after its first token."""
        self._truths.pop(sequence_id, None)

    def fail_next(self) -> None:
        """Let the next step raise halfway: what it was to write may hold anything."""
        self._fails = True

    def cannot_sample(self, sequence_id: SequenceId) -> None:
        """Let the next row of a sequence be one from which nothing can be sampled."""
        self._cannot_sample.add(sequence_id)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step.

        Raises:
            ForwardPassFailed: It was told to.
            AssertionError: The plan is wrong, or a sequence reads what is not its own.
        """
        ids = [scheduled.sequence_id for scheduled in plan.sequences]
        assert len(set(ids)) == len(ids), f"a sequence is planned twice: {ids}"
        fails, self._fails = self._fails, False
        chunks = [self._chunk(scheduled) for scheduled in plan.sequences]
        self.write(chunks, plan.copies, fails)
        self._check_copies(plan)
        self.load_states(plan.state_loads)
        for scheduled in plan.sequences if self.states else ():
            self._advance_state(scheduled, fails)
        self.save_states(plan.state_saves, fails)
        if fails:
            raise ForwardPassFailed
        for chunk in chunks:
            self.read(chunk)
        return StepResult(tuple(self._result(scheduled) for scheduled in plan.sequences))

    def _chunk(self, scheduled: ScheduledSequence) -> Chunk:
        truth = self._truths[scheduled.sequence_id]
        assert scheduled.tokens, "nothing to compute"
        assert scheduled.tokens == truth.tokens[scheduled.start : scheduled.end], "wrong tokens"
        number, tables = scheduled.sequence_id, scheduled.tables
        return Chunk(number, tables, truth.texts, scheduled.start, scheduled.end)

    def _check_copies(self, plan: StepPlan) -> None:
        """States are copied all at once: no two copies of a step meet in a slot."""
        targets = [copy.target for copy in (*plan.state_loads, *plan.state_saves)]
        assert len(set(targets)) == len(targets), "two copies of a step into one slot"
        assert not {copy.source for copy in plan.state_loads} & set(targets), "it is written"
        running = {scheduled.state_slot for scheduled in plan.sequences}
        assert not running & {copy.target for copy in plan.state_saves}, "it runs"

    def _advance_state(self, scheduled: ScheduledSequence, fails: bool) -> None:
        """Law 3 for states: what a sequence continues is the state of its own prefix."""
        texts, slot = self._truths[scheduled.sequence_id].texts, scheduled.state_slot
        before = texts[scheduled.start - 1] if scheduled.start else ""
        assert self.states[slot] == before, (
            f"sequence {scheduled.sequence_id} continues {self.states[slot]!r} at token "
            f"{scheduled.start}, not {before!r}"
        )
        self.states[slot] = TORN if fails else texts[scheduled.end - 1]

    def _result(self, scheduled: ScheduledSequence) -> SequenceResult:
        """Sample where the last token is computed, and only there."""
        truth, task = self._truths[scheduled.sequence_id], scheduled.sample
        logprobs = self._prompt_logprobs(scheduled, truth)
        assert (task is not None) == (scheduled.end == len(truth.tokens)), "samples too early"
        if task is None:
            return SequenceResult((), logprobs)
        assert (task.prompt, task.output) == (truth.request.prompt_token_ids, truth.output)
        assert task.seeds == truth.seeds, "every continuation has its seed, once"
        if scheduled.sequence_id in self._cannot_sample:
            self._cannot_sample.remove(scheduled.sequence_id)
            return SequenceResult((SampledToken(0, error="not a number"),) * len(task.seeds))
        tokens = [self._sample(task, seed) for seed in task.seeds]
        twins = [truth.twin(seed) for seed in task.seeds[1:]]
        for index, (member, token) in enumerate(zip([truth, *twins], tokens, strict=True)):
            member.append(token)
            self._truths[SequenceId(scheduled.sequence_id + index)] = member
        truth.seeds = truth.seeds[:1]
        return SequenceResult(tuple(map(SampledToken, tokens)), logprobs)

    def _prompt_logprobs(
        self, scheduled: ScheduledSequence, truth: Truth
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Answer each prompt target with a log-probability that tells its position."""
        if not scheduled.prompt_targets:
            return ()
        assert truth.request.params.prompt_logprobs == scheduled.num_prompt_logprobs
        first = scheduled.start + 1 + scheduled.first_target
        wanted = truth.request.prompt_token_ids[first : scheduled.end + 1]
        assert scheduled.prompt_targets == wanted, "prompt targets are the tokens that follow"
        return tuple((TokenLogprob(t, -float(p), 1),) for p, t in enumerate(wanted, first))

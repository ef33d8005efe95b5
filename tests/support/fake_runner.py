"""A runner without tensors: the KV of a token is the text that it stands for.

A slot holds whose text it is and all of it up to and including its own token, such as
``"tenant:ABC"`` for the C of ABCD, or ``"public:AB|tenant:C"`` after a public prefix AB. Since that
is all that KV depends on, reading a slot tells whether it is the right one (law 3), and a sequence
that reads a slot before it is written reads what was there before (law 5).

A step is what it is in the real runner: every new token is written, then all copies are made at
once, then every sequence reads all that is before it and its own new tokens. The runner knows the
sequences by what it was told when they were added and by what it sampled itself, never by asking
the scheduler.

Every group of layers has slots of its own. What a window does not reach is not read, and may be
anything; what it reaches has to be there.

A state is the text of all tokens that went into it. States are loaded before the step, each
sequence finds in its slot that of its own prefix or fails, and states are saved after the step.
"""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ostinato.core.identity import Identity, ImageSpan
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

TORN = "torn"
"""What a failed step leaves in the slots that it was to write."""

Sampler = Callable[[SampleTask, int], int]
"""Chooses a token by what came before and a seed, and by nothing else."""


def count_letters(task: SampleTask, seed: int) -> int:
    """Answer a, b, c, ... with seed 0, k, l, m, ... with seed 1: outputs that can be drawn."""
    return ord("a") + (10 * seed + len(task.output)) % 26


def toss_a_coin(task: SampleTask, seed: int) -> int:
    """Answer A or B, unless one of them is banned; the whole prefix and the seed decide."""
    digest = hashlib.blake2b(task.prompt.tobytes() + task.output.tobytes() + str(seed).encode())
    choice = digest.digest()[0] % 2
    return next(t for t in (ord("AB"[choice]), ord("BA"[choice])) if t not in task.banned)


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
        self.identity = replace(self.identity, epoch=epoch)
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
        text = self.texts[-1] if self.texts else spell_identity(self.identity.root)
        public = self.identity.public_prefix
        for position in range(len(self.texts), len(self.tokens)):
            if public is not None and position == public.num_tokens:
                text += "|" + spell_identity(self.identity)
            text += spell_token(self.tokens[position], position, self.request.images)
            self.texts.append(text)


def spell_identity(identity: Identity) -> str:
    """Return what the text of every slot of that identity begins with."""
    others = [identity.weights.decode(), str(identity.epoch or ""), identity.adapter.decode()]
    return "/".join([identity.tenant.decode(), *filter(None, others)]) + ":"


def spell_token(token: int, position: int, images: tuple[ImageSpan, ...]) -> str:
    """Return a letter, or which part of which image the token stands for."""
    for image in images:
        if image.start <= position < image.end:
            return f"<{image.digest.decode()} {position - image.start}/{image.length}>"
    return chr(token)


class FakeRunner:
    """Executes plans on slots of text, and does not let anything wrong pass.

    Attributes:
        stores: What each slot holds, group by group.
        states: What each slot of a state holds; of no tokens, nothing.
    """

    def __init__(self, config: PrefixCacheConfig, sample: Sampler = count_letters) -> None:
        """Make a store in which nothing was ever written."""
        self.block_size = config.block_size
        self.windows = (None, *(window.window for window in config.windows))
        pools = (config.num_blocks, *(window.num_blocks for window in config.windows))
        self.stores: list[list[str]] = [["never written"] * (n * config.block_size) for n in pools]
        num_states = 0 if config.states is None else config.states.num_slots
        self.states = ["never written"] * num_states
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

    def first_read(self, group: int, position: int) -> int:
        """Return the first token that a query sees in a group of layers."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step.

        Raises:
            ForwardPassFailed: It was told to.
            AssertionError: The plan is wrong, or a sequence reads what is not its own.
        """
        ids = [scheduled.sequence_id for scheduled in plan.sequences]
        assert len(set(ids)) == len(ids), f"a sequence is planned twice: {ids}"
        groups = range(len(self.stores))
        writes = [(self._written(plan, group), self._copied(plan, group)) for group in groups]
        fails, self._fails = self._fails, False
        for kv, (written, copied) in zip(self.stores, writes, strict=True):
            assert not written.keys() & copied.keys(), "a copy and a new token in one slot"
            assert not copied.keys() & set(copied.values()), "a copy reads what another one writes"
            for slot, text in written.items():
                kv[slot] = TORN if fails else text
            for target, source in copied.items():
                kv[target] = TORN if fails else kv[source]
        self._load_states(plan)
        for scheduled in plan.sequences if self.states else ():
            self._advance_state(scheduled, fails)
        if fails:
            for copy in plan.state_saves:
                self.states[copy.target] = TORN
            raise ForwardPassFailed
        for copy in plan.state_saves:
            self.states[copy.target] = self.states[copy.source]
        for scheduled in plan.sequences:
            self._read(scheduled)
        return StepResult(tuple(self._result(scheduled) for scheduled in plan.sequences))

    def _written(self, plan: StepPlan, group: int) -> dict[int, str]:
        """Return the step's new tokens in one group, slot by slot."""
        written: dict[int, str] = {}
        for scheduled in plan.sequences:
            truth = self._truths[scheduled.sequence_id]
            assert scheduled.tokens, "nothing to compute"
            assert scheduled.tokens == truth.tokens[scheduled.start : scheduled.end], "wrong tokens"
            for position in range(scheduled.start, scheduled.end):
                slot = self._slot(scheduled, group, position)
                assert slot not in written, "two tokens of a step in one slot"
                written[slot] = truth.texts[position]
        return written

    def _copied(self, plan: StepPlan, group: int) -> dict[int, int]:
        """Return the step's copies in one group, slot by slot: target and source."""
        copied: dict[int, int] = {}
        for run in [run for run in plan.copies if run.group == group]:
            assert run.num_tokens > 0, "nothing to copy"
            for first in (run.source, run.target):
                last = first + run.num_tokens - 1
                assert first // self.block_size == last // self.block_size, "crosses a block"
            for offset in range(run.num_tokens):
                assert run.target + offset not in copied, "two copies into one slot"
                copied[run.target + offset] = run.source + offset
        return copied

    def _load_states(self, plan: StepPlan) -> None:
        """Copy states to running slots, all at once; no two copies of a step meet in a slot."""
        targets = [copy.target for copy in (*plan.state_loads, *plan.state_saves)]
        assert len(set(targets)) == len(targets), "two copies of a step into one slot"
        assert not {copy.source for copy in plan.state_loads} & set(targets), "it is written"
        running = {scheduled.state_slot for scheduled in plan.sequences}
        assert not running & {copy.target for copy in plan.state_saves}, "it runs"
        for copy in plan.state_loads:
            self.states[copy.target] = "" if copy.source == -1 else self.states[copy.source]

    def _advance_state(self, scheduled: ScheduledSequence, fails: bool) -> None:
        """Law 3 for states: what a sequence continues is the state of its own prefix."""
        texts, slot = self._truths[scheduled.sequence_id].texts, scheduled.state_slot
        before = texts[scheduled.start - 1] if scheduled.start else ""
        assert self.states[slot] == before, (
            f"sequence {scheduled.sequence_id} continues {self.states[slot]!r} at token "
            f"{scheduled.start}, not {before!r}"
        )
        self.states[slot] = TORN if fails else texts[scheduled.end - 1]

    def _read(self, scheduled: ScheduledSequence) -> None:
        """Law 3: what a sequence attends to is its own prefix, all of it, and in place."""
        truth = self._truths[scheduled.sequence_id]
        assert len(scheduled.tables) == len(self.stores), "a table per group"
        assert len(set(scheduled.tables[0])) == len(scheduled.tables[0]), "a block twice in a table"
        for group, kv in enumerate(self.stores):
            for position in range(self.first_read(group, scheduled.start), scheduled.end):
                found = kv[self._slot(scheduled, group, position)]
                assert found == truth.texts[position], (
                    f"sequence {scheduled.sequence_id} reads {found!r} at token {position} in "
                    f"group {group}, not {truth.texts[position]!r}"
                )

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
        first = scheduled.start + 1
        wanted = truth.request.prompt_token_ids[first : scheduled.end + 1]
        assert scheduled.prompt_targets == wanted, "prompt targets are the tokens that follow"
        return tuple((TokenLogprob(t, -float(p), 1),) for p, t in enumerate(wanted, first))

    def _slot(self, scheduled: ScheduledSequence, group: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        slot = scheduled.tables[group][block] * self.block_size + offset
        assert slot < len(self.stores[group]), f"token {position} has no slot in group {group}"
        return slot

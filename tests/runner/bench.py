"""A workbench: plans written by hand, and the answers that ``transformers`` gives.

::

    bench = Bench(loaded)
    leader = bench.sequence(prompt)             # scattered blocks of its own
    bench.step(leader.next(9))                  # a chunk: computes, samples nothing
    token = bench.step(leader.rest())[0]        # the rest of the prompt: samples
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core.ids import SequenceId, SlotId
from ostinato.core.plan import CopyRun, SampleTask, ScheduledSequence, StateCopy, StepPlan
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.attention.backend import AttentionBackend
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.experts.mixture import PackedExperts
from ostinato.runner.inputs import build_inputs
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.native.packed import required_library

NO_EOS = 10**6
"""An end-of-sequence id that no model ever samples."""


def greedy(num_samples: int = 1) -> SampleTask:
    """Ask for the most likely token."""
    params = SamplingParams(temperature=0.0)
    return SampleTask(params, (0,) * num_samples, array("I", [0]), array("I"))


def random_prompt(seed: int, num_tokens: int, vocab_size: int = 320) -> list[int]:
    """Draw ids, but for the special ones."""
    return np.random.default_rng(seed).integers(3, vocab_size, num_tokens).tolist()


@dataclass
class HandSequence:
    """One sequence that a test walks through the model by hand."""

    sequence_id: int
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    state_slot: int | None = None

    def next(self, num_tokens: int, sample: bool = False) -> ScheduledSequence:
        """Schedule the next tokens that are not computed yet."""
        start, self.computed = self.computed, self.computed + num_tokens
        return ScheduledSequence(
            SequenceId(self.sequence_id),
            array("I", self.tokens[start : self.computed]),
            start,
            (array("I", self.blocks),),
            greedy() if sample else None,
            state_slot=self.state_slot,
        )

    def rest(self) -> ScheduledSequence:
        """Schedule all that is left, and sample."""
        return self.next(len(self.tokens) - self.computed, sample=True)


@dataclass
class Bench:
    """A runner, and a supply of scattered blocks."""

    loaded: LoadedModel
    num_blocks: int = 96
    block_size: int = 4
    attention: AttentionBackend | None = None
    num_state_slots: int = 0
    runner: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        """Build the runner and shuffle its blocks."""
        self.runner = ModelRunner(
            self.loaded,
            self.num_blocks,
            self.block_size,
            attention=self.attention,
            num_state_slots=self.num_state_slots,
        )
        self._free = np.random.default_rng(7).permutation(self.num_blocks).tolist()
        self._num_sequences = 0

    def sequence(
        self,
        tokens: Sequence[int],
        room: int = 16,
        shared: Sequence[int] = (),
        computed: int = 0,
        state_slot: int | None = None,
    ) -> HandSequence:
        """Make a sequence with blocks for its tokens and ``room`` more, some of them shared."""
        needed = -(-(len(tokens) + room) // self.block_size) - len(shared)
        own = [self._free.pop() for _ in range(needed)]
        self._num_sequences += 1
        blocks = [*shared, *own]
        return HandSequence(self._num_sequences, list(tokens), blocks, computed, state_slot)

    def slot(self, sequence: HandSequence, position: int) -> SlotId:
        """Where a sequence keeps a position."""
        block = sequence.blocks[position // self.block_size]
        return SlotId(block * self.block_size + position % self.block_size)

    def step(
        self,
        *scheduled: ScheduledSequence,
        copies: Sequence[CopyRun] = (),
        loads: Sequence[StateCopy] = (),
        saves: Sequence[StateCopy] = (),
    ) -> list[int | None]:
        """Execute one step; returns each sequence's token, None if it did not sample."""
        plan = StepPlan(scheduled, tuple(copies), tuple(loads), tuple(saves))
        result = self.runner.execute(plan)
        return [r.samples[0].token_id if r.samples else None for r in result.sequences]

    def logits(self, *scheduled: ScheduledSequence) -> Tensor:
        """Run the model for one step; returns the logits of wanted rows."""
        inputs = build_inputs(StepPlan(scheduled), self.block_size, torch.device("cpu"))
        with torch.inference_mode():
            return self.runner.forward(inputs)

    def finish(self, sequence: HandSequence, token: int | None, num_tokens: int) -> list[int]:
        """Decode alone, the given token first, until there are so many; returns them."""
        assert token is not None
        generated = [token]
        while len(generated) < num_tokens:
            sequence.tokens.append(generated[-1])
            generated.append(self.step(sequence.rest())[0])
        return generated


def generated_alone(loaded: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What ``generate`` says, with the model's own attention and its own cache."""
    with own_attention(loaded):
        output = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=NO_EOS,
        )
    return output[0, len(prompt) :].tolist()


def own_logits(loaded: LoadedModel, prompt: Sequence[int]) -> Tensor:
    """The model's own logits of a prompt, shape (num_tokens, vocab_size)."""
    with own_attention(loaded), torch.inference_mode():
        return loaded.model(torch.tensor([prompt]), use_cache=False).logits[0]


@contextmanager
def own_attention(loaded: LoadedModel) -> Iterator[None]:
    """Let a model use the attention that it came with."""
    loaded.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        loaded.model.set_attn_implementation("ostinato")


def has_same_weights(one: LoadedModel, other: LoadedModel) -> bool:
    """Whether two models have the same weights by name, to the bit."""
    own, expected = one.model.state_dict(), other.model.state_dict()
    return own.keys() == expected.keys() and all(torch.equal(own[n], expected[n]) for n in own)


def packed_experts(loaded: LoadedModel) -> list[Any]:
    """The weights of all experts, gates and ups before what leads back."""
    experts = [m for m in loaded.model.modules() if isinstance(m, PackedExperts)]
    return [part.packed for each in experts for part in each.parts.values()]


def has_same_bits_in_any_steps(loaded: LoadedModel) -> bool:
    """Whether a prompt has the same logits whole, by token and in chunks, beside a stranger."""
    attention = NativeAttention(required_library())
    whole, *others = (
        logits_in_steps(Bench(loaded, block_size=16, attention=attention), random_prompt(1, 21), n)
        for n in ([21], [1] * 21, [5, 16], [20, 1])
    )
    return all(torch.equal(each, whole) for each in others)


def logits_in_steps(bench: Bench, prompt: list[int], lengths: Sequence[int]) -> Tensor:
    """Return all logits of a prompt that is computed in such steps, beside a stranger."""
    ours, stranger = bench.sequence(prompt), bench.sequence(random_prompt(9, len(prompt)))
    rows = []
    for length in lengths:
        targets = array("I", [0] * length)
        both = [replace(s.next(length), prompt_targets=targets) for s in (stranger, ours)]
        rows.append(bench.logits(*both)[length:].clone())
    return torch.cat(rows)

"""Executes one step.

One call of the model over one row, then one call of the sampler::

    StepPlan ─► inputs ─► model ─► logits of some rows ───┬─► sampler ─────┐
                            │                             └─► log-probs ───┴─► StepResult
                            └─ each layer: write, copy, read
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, starmap

import torch
from torch import Tensor

from ostinato.core.plan import (
    SampledToken,
    SampleTask,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from ostinato.runner.adapters.lora import LoraAdapter, StepAdapters
from ostinato.runner.attention.backend import AttentionBackend, GroupedStep, WholeSteps
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.attention.torch_backend import TorchAttention
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.heads import HiddenRows
from ostinato.runner.images.step import ImageStep, SeeingAhead, adapted_ahead, lay_out
from ostinato.runner.images.store import ImageStore
from ostinato.runner.inputs import StepInputs, build_inputs
from ostinato.runner.kv.kv_store import StoreShape
from ostinato.runner.kv.layer_groups import LayerGroups, one_group
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.sampling.logprobs import token_logprobs
from ostinato.runner.sampling.readouts import HIDDEN_STATE, hidden_sums, read_rows, with_mean
from ostinato.runner.sampling.sampler import Sampler
from ostinato.runner.states.step import StateStep
from ostinato.runner.states.store import StateStore


class ModelRunner:
    """Executes step plans on one model and one KV store.

    Attributes:
        loaded: The model.
        groups: Which layers share block tables.
        attention: The attention backend.
        kv_stores: Keys and values of all blocks, one store per group.
        images: The images of live requests; None for a model that serves text alone.
        adapters: Loaded adapters by their digests.
        states: States of all slots.
        whole_steps: Computes steps of nothing but tokens; None if the model is called here.
        num_tokens_computed: Tokens that the model has computed so far, without wrong drafts, to
            test law 1.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int | Sequence[int],
        block_size: int,
        kv_dtype: torch.dtype | None = None,
        attention: AttentionBackend | None = None,
        groups: LayerGroups | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """Allocate the KV store and the states.

        Args:
            loaded: The model.
            num_blocks: Blocks of the store; one number per group if there are several.
            block_size: Tokens per block.
            kv_dtype: Format of keys and values; None is the model's dtype.
            attention: The attention backend; None is plain torch.
            groups: Which layers share block tables; None is one group.
            num_state_slots: Slots for the states of layers that carry one.

        Raises:
            ConfigError: The blocks or the states do not fit the memory.
        """
        self.loaded = loaded
        self.groups = groups or one_group(loaded.kv_spec)
        sizes = [num_blocks] if isinstance(num_blocks, int) else num_blocks
        dtype = kv_dtype or loaded.dtype
        self.attention = attention or TorchAttention()
        shapes = (
            StoreShape(
                loaded.kv_spec, size, block_size, dtype, loaded.device, self.groups.layers(group)
            )
            for group, size in zip(range(self.groups.num_groups), sizes, strict=True)
        )
        self.kv_stores = tuple(map(self.attention.new_store, shapes))
        self.images: ImageStore | None = None
        self.adapters: dict[bytes, LoraAdapter] = {}
        self.states = StateStore(loaded.state_spec, num_state_slots, loaded.device)
        self.num_tokens_computed = 0
        self._call = loaded.fused or loaded.call
        self.whole_steps: WholeSteps | None = None
        if not isinstance(self._call, FusedForward):
            self.whole_steps = self.attention.whole_steps(
                self._call, self.kv_stores, self.groups.of_layer
            )
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step.

        Args:
            plan: At least one sequence.

        Returns:
            Samples and prompt log-probs, in the plan's order.

        Effects: writes the plan's slots in every layer, and its states. If it raises, their
            content is undefined and all others are unchanged; the next step may follow.
        """
        inputs = build_inputs(plan, self.kv_stores[0].block_size, self.loaded.device)
        last = inputs.position_ids.max()
        assert last < self.loaded.length_limit.num_tokens, "the scheduler knows the model's limit"
        laid_out = None
        if self.images is not None and any(sequence.images for sequence in plan.sequences):
            laid_out = lay_out(plan, inputs, self.images)
        if plan.state_loads:
            self.states.copy(plan.state_loads)
        adapters = StepAdapters.of(plan, self.adapters) if self.adapters else None
        if laid_out is not None:
            adapters = adapted_ahead(adapters, laid_out.images, self.adapters)
        hidden = HiddenRows() if _reads_hidden(plan) else None
        more = laid_out, adapters, hidden, inputs.state_slots
        if self.whole_steps is not None and all(each is None for each in more):
            logits, ids = self.whole_steps(inputs, _tasks(plan))
            self.num_tokens_computed += len(inputs.input_ids)
            return self.sample(plan, inputs, logits, ids=ids)
        logits = self.forward(inputs, adapters, laid_out, hidden)
        if plan.state_saves:
            self.states.copy(plan.state_saves)
        self.num_tokens_computed += len(inputs.input_ids)
        return self.sample(plan, inputs, logits, hidden)

    def forward(
        self,
        inputs: StepInputs,
        adapters: StepAdapters | None = None,
        images: ImageStep | None = None,
        hidden: HiddenRows | None = None,
    ) -> Tensor:
        """Run the model; returns logits of ``logit_rows``, shape (num_logit_rows, vocab_size).

        Effects: sets the rows of ``hidden`` to the input of the head.
        """
        pairs = zip(inputs.groups, self.kv_stores, strict=True)
        steps = tuple(starmap(self.attention.start, pairs))
        states = None
        if inputs.state_slots is not None:
            states = StateStep(inputs.state_slots, inputs.groups[0], self.states)
        step = GroupedStep(steps, self.groups.of_layer, states)
        ids, rows = inputs.input_ids, inputs.logit_rows
        if images is None:
            return self._call(ids, inputs.position_ids, step, rows, adapters, hidden=hidden)
        attention: LayerAttention = step
        if self.images is not None and self.images.vision.sees_ahead and images.images:
            attention = SeeingAhead(step, images, len(ids), self.kv_stores, self.groups)
        positions, vectors = images.positions, images.vectors
        if images.later is None:
            return self._call(ids, positions, attention, rows, adapters, vectors, hidden=hidden)
        return self.loaded.call(
            ids, positions, attention, rows, adapters, vectors, images.later, hidden=hidden
        )

    def sample(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        logits: Tensor,
        hidden: HiddenRows | None = None,
        ids: Sequence[int] | None = None,
    ) -> StepResult:
        """Sample tokens, compute prompt log-probs, and read what is asked for besides.

        Args:
            plan: The step.
            inputs: The same as arrays.
            logits: Of ``logit_rows``, shape (num_logit_rows, vocab_size).
            hidden: The input of the head, if it is read.
            ids: What was sampled from each of these rows already; -1 is sampled again, to say why
                it has no token.
        """
        tasks = _tasks(plan)
        rows = logits  # nearly always all of them: only prompt log-probs need others
        if len(tasks) < len(logits):
            rows = logits[torch.from_numpy(inputs.sample_rows).to(logits.device)]
        if ids is None or -1 in ids:
            outcomes = self._sampler.sample(rows, tasks)
        else:
            outcomes = [(SampledToken(token),) for token in ids]
        if [task for task in tasks if task.params.readout is not None]:
            outcomes = read_rows(outcomes, tasks, rows, hidden, inputs.sample_rows)
        sampled = iter(outcomes)
        sums = {} if hidden is None else hidden_sums(plan, inputs.prompt_rows, hidden)
        results = []
        for index, sequence in enumerate(plan.sequences):
            samples: tuple[SampledToken, ...] = ()
            logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
            if sequence.sample is not None:
                samples = self._taken(sequence, sampled, sums.get(index))
            if targets := sequence.prompt_targets:
                target_rows = inputs.prompt_rows[index]
                counts = [sequence.num_prompt_logprobs] * len(target_rows)
                logprobs = token_logprobs(logits, target_rows, targets, counts)
            results.append(SequenceResult(samples, logprobs, sums.get(index)))
        return StepResult(tuple(results))

    def _taken(
        self,
        sequence: ScheduledSequence,
        sampled: "Iterator[tuple[SampledToken, ...]]",
        hidden_sum: "array[float] | None",
    ) -> tuple[SampledToken, ...]:
        """Return a sequence's samples, up to the first that is not the draft after its row."""
        samples = next(sampled)
        if hidden_sum is not None:
            return with_mean(samples, hidden_sum, sequence.end)
        if not sequence.drafted:
            return samples
        count = len(sequence.drafted)
        drafts, rows = sequence.tokens[-count:], list(islice(sampled, count))
        for draft, row in zip(drafts, rows, strict=True):
            if samples[-1].error or samples[-1].token_id != draft:
                break
            samples += row
        self.num_tokens_computed -= count + 1 - len(samples)
        return samples


def _reads_hidden(plan: StepPlan) -> bool:
    """Return whether a sequence of a step reads hidden states."""
    for sequence in plan.sequences:
        task = sequence.sample
        is_read = task is not None and task.params.readout == HIDDEN_STATE
        if is_read or sequence.hidden_sum is not None:
            return True
    return False


def _tasks(plan: StepPlan) -> list[SampleTask]:
    """Return what is sampled, one task per row."""
    tasks = list[SampleTask]()
    for sequence in plan.sequences:
        if sequence.sample is not None:
            tasks += (sequence.sample, *sequence.drafted)
    return tasks

"""Computes a step of a decoder with as few passes over memory as possible.

The results are those of the modules of ``transformers``, rounded at the same places, but one
product computes queries, keys and values, one computes gate and up, and the operations between two
products are one pass, without Python between them.

A decode step takes some tens of milliseconds and has about three hundred operations: if Python
called them one by one, it would take an eighth of the time. So they form one program, from the ids
to the logits, with stores and attention in between, as ``step_operations`` builds it.

Between two attentions a long step is computed in chunks that use the same buffers, so that the
output of one operation is still in the processor's cache when the next reads it. Attention sees all
rows at once.

Operations in Python cut a program into several. A program is kept for the steps after it: they set
ids, positions, slots and plans, see ``StepArguments``.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import AdapterUpdates
from ostinato.runner.attention.backend import GroupedStep
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import Attention, Call, Decoder
from ostinato.runner.forward.embedding_and_rope import Angles, Lookup, look_up_embeddings
from ostinato.runner.forward.program import NativeSteps, Program, StepArguments, StepInput
from ostinato.runner.forward.step_operations import ModuleCalls, StepOperations, width_in_arena
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.native.packed import Matrix, row_stride

ROWS_PER_CHUNK = 384
"""Rows of a chunk: few enough that the output of an operation stays in the processor's cache, and
enough that weights are not read too often."""

_MIN_ROWS = 128
"""Rows that every program has buffers for."""


class Steps:
    """Computes steps of a decoder, one at a time."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, calls: ModuleCalls) -> None:
        """Take a decoder; its programs are built in the first steps."""
        self._decoder, self._library, self._calls = decoder, library, calls
        like = torch.empty(0, dtype=decoder.head.weight.dtype)
        kinds = {part.angles for part in decoder.parts() if isinstance(part, Attention | Call)}
        self._angles = {
            kind: Angles(decoder.rotary, like, kind)
            for kind in kinds
            if kind is not None and decoder.rotary is not None
        }
        self._attending = [
            layer.index
            for layer in decoder.layers
            if any(isinstance(branch.part, Attention) for branch in layer.branches)
        ]
        self._programs: dict[tuple[bool, bool], _StepProgram] = {}

    def run(self, step_input: StepInput, hidden: HiddenRows | None = None) -> Tensor:
        """Compute a step.

        Args:
            step_input: The step.
            hidden: Takes the input of the head; None keeps none.

        Returns:
            New logits, shape (num_logit_rows, vocab_size).

        Effects: writes the step's slots in every layer.
        Cost: some milliseconds more when the stores are not those of the step before.
        """
        steps = native_steps(step_input.step, self._attending)
        key = step_input.adapters is not None, steps is not None
        program, num_rows = self._programs.get(key), len(step_input.vectors.places)
        if program is None or not program.fits(steps or {}, num_rows):
            program = self._program(step_input, steps or {}, num_rows)
            self._programs[key] = program
        logits = program.run(step_input, steps or {}, num_rows)
        if hidden is not None:
            hidden.rows = program.hidden[: len(step_input.logit_rows)].clone()
        return logits

    def _program(self, step_input: StepInput, steps: NativeSteps, num_rows: int) -> "_StepProgram":
        decoder, lora = self._decoder, None
        if step_input.adapters is not None:
            lora = AdapterUpdates(decoder.adapted())
        max_rows = max(_MIN_ROWS, 1 << (num_rows - 1).bit_length())
        dtype = decoder.head.weight.dtype
        arena = Arena(max_rows, ROWS_PER_CHUNK, width_in_arena(decoder), dtype)
        arguments = StepArguments(self._angles, steps, max_rows, lora)
        operations = StepOperations(decoder, self._calls, arena, arguments)
        return _StepProgram(self._library, arena, arguments, operations)


class _StepProgram:
    """A decoder's program on the stores of one runner.

    Attributes:
        hidden: The input of the head, of the rows whose logits the last step computed.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        arena: Arena,
        arguments: StepArguments,
        operations: StepOperations,
    ) -> None:
        self._arena, self._arguments = arena, arguments
        self._head, self.hidden = operations.head, operations.hidden
        self._stride = row_stride(self._head.num_outputs)
        self._program = Program(library, operations.operations, arena)

    def fits(self, steps: NativeSteps, num_rows: int) -> bool:
        """Whether buffers are large enough, and the stores are those that it was built for."""
        stores = self._arguments.stores
        own = {layer: step.store for layer, step in steps.items()}
        return num_rows <= self._arena.max_rows and own == stores

    def run(self, step_input: StepInput, steps: NativeSteps, num_rows: int) -> Tensor:
        """Compute a step; see ``Steps``."""
        tables = self._arguments.set(step_input, steps)
        num_logit_rows = len(step_input.logit_rows)
        block = torch.empty(num_logit_rows, self._stride, dtype=self._arena.dtype)
        self._head.outputs = Matrix.of(block)
        self._program.run(num_rows, num_logit_rows, torch.get_num_threads())
        del tables  # read until here
        return block[:, : self._head.num_outputs]


def native_steps(step: LayerAttention, attending: Sequence[int]) -> dict[int, NativeStep] | None:
    """Return the native attention of each layer that attends; None unless all have one."""
    if not isinstance(step, GroupedStep):
        return None
    native = {}
    for layer in attending:
        own = step.steps[step.of_layer[layer]]
        if not isinstance(own, NativeStep):
            return None
        native[layer] = own
    return native or None


class Forward(Protocol):
    """Computes the steps of a decoder; called like a ``ModelCall``."""

    @property
    def decoder(self) -> Decoder:
        """What is computed."""

    @property
    def promises_bits(self) -> bool:
        """Whether a row has the same bits alone and in any step."""

    @property
    def called(self) -> str:
        """What is called as a module, and why; empty if nothing is."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Return logits, shape (num_rows, vocab_size); arguments as in ``ModelCall``."""


class FusedForward:
    """Computes the steps of a decoder; called like a ``ModelCall``, one step at a time."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, calls: ModuleCalls) -> None:
        """Wrap a decoder with packed weights; ``calls`` passes steps to modules that are called."""
        self._decoder = decoder
        self._steps = Steps(decoder, library, calls)

    @property
    def decoder(self) -> Decoder:
        """What is computed."""
        return self._decoder

    @property
    def promises_bits(self) -> bool:
        """Whether a row has the same bits alone and in any step, if attention is native.

        Modules that are called promise nothing of the kind, and a layer with a state gives a token
        other bits in a prompt than in a step of its own.
        """
        return not self.called and not self._decoder.has_states

    @property
    def called(self) -> str:
        """What is called as a module, and why; empty if nothing is."""
        return ", ".join(dict.fromkeys(map(str, self._decoder.calls)))

    def __call__(
        self,
        input_ids: Ints,
        position_ids: Ints | None,
        step: LayerAttention | None,
        rows: Ints | None = None,
        adapters: StepAdapters | None = None,
        vectors: Tensor | None = None,
        *,
        hidden: HiddenRows | None = None,
    ) -> Tensor:
        """Return logits, shape (num_rows, vocab_size); arguments as in ``ModelCall``."""
        assert position_ids is not None and step is not None, "a step of ours"
        decoder = self._decoder
        if vectors is None:
            given = look_up_embeddings(decoder.embedding, input_ids, decoder.embedding_scale)
        else:
            given = Lookup.whole(vectors)
        logit_rows = np.arange(len(given)) if rows is None else rows
        logits = self._steps.run(StepInput(given, position_ids, step, logit_rows, adapters), hidden)
        return logits if decoder.edit_logits is None else decoder.edit_logits(logits)

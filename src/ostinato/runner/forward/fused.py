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

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import AdapterUpdates
from ostinato.runner.attention.backend import GroupedStep
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import Attention, Decoder, ModuleCall
from ostinato.runner.forward.embedding_and_rope import Angles, Lookup, look_up_embeddings
from ostinato.runner.forward.program import NativeSteps, Program, StepArguments, StepInput
from ostinato.runner.forward.step_operations import ModuleCalls, StepOperations, width_in_arena
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.native.packed import Matrix, row_stride
from ostinato.runner.native.store import NativeKVStore

ROWS_PER_CHUNK = 384
"""Rows of a chunk: few enough that the output of an operation stays in the processor's cache, and
enough that weights are not read too often."""

_MIN_ROWS = 128
"""Rows that every program has buffers for."""


class _StepProgram:
    """A decoder's program on the stores of one runner.

    Attributes:
        stores: Store of each layer whose attention is native.
        max_rows: Rows that it has buffers for.
        hidden: The input of the head, of the rows whose logits the last step computed.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        arena: Arena,
        arguments: StepArguments,
        operations: StepOperations,
    ) -> None:
        self._dtype, self._arguments = arena.dtype, arguments
        self.stores, self.max_rows = arguments.stores, arena.max_rows
        self._head, self.hidden = operations.head, operations.hidden
        self._stride = row_stride(self._head.num_outputs)
        self._program = Program(library, operations.operations, arena)

    def run(self, step_input: StepInput, steps: NativeSteps, num_rows: int) -> Tensor:
        """Compute a step; returns new logits, shape (num_logit_rows, vocab_size)."""
        tables = self._arguments.set(step_input, steps)
        num_logit_rows = len(step_input.logit_rows)
        block = torch.empty(num_logit_rows, self._stride, dtype=self._dtype)
        self._head.outputs = Matrix(block.data_ptr(), self._stride)
        self._program.run(num_rows, num_logit_rows, torch.get_num_threads())
        del tables  # read until here
        return block[:, : self._head.num_outputs]


def native_steps(step: LayerAttention, attending: Sequence[int]) -> dict[int, NativeStep]:
    """Return the native attention of each layer that attends; empty unless all have one."""
    native = dict[int, NativeStep]()
    if not isinstance(step, GroupedStep):
        return native
    for layer in attending:
        own = step.steps[step.of_layer[layer]]
        if not isinstance(own, NativeStep):
            return {}
        native[layer] = own
    return native


class FusedForward:
    """Computes the steps of a decoder; called like a ``ModelCall``, one step at a time.

    Attributes:
        decoder: What is computed.
    """

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, calls: ModuleCalls) -> None:
        """Wrap a decoder with packed weights; ``calls`` passes steps to modules that are called."""
        self.decoder, self._library, self._calls = decoder, library, calls
        like = torch.empty(0, dtype=decoder.head.weight.dtype)
        kinds = {
            part.angles for part in decoder.parts() if isinstance(part, Attention | ModuleCall)
        }
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

    @property
    def promises_bits(self) -> bool:
        """Whether a row has the same bits alone and in any step, if attention is native.

        Modules that are called promise nothing of the kind, and a layer with a state gives a token
        other bits in a prompt than in a step of its own.
        """
        return not self.called and not self.decoder.has_states

    @property
    def called(self) -> str:
        """What is called as a module, and why; empty if nothing is."""
        return ", ".join(dict.fromkeys(map(str, self.decoder.calls)))

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
        """Return logits, shape (num_rows, vocab_size); arguments as in ``ModelCall``.

        Effects: writes the step's slots in every layer; sets the rows of ``hidden`` to the input
            of the head.
        Cost: some milliseconds more when the stores are not those of the step before.
        """
        assert position_ids is not None and step is not None, "a step of ours"
        decoder = self.decoder
        if vectors is None:
            given = look_up_embeddings(decoder.embedding, input_ids, decoder.embedding_scale)
        else:
            given = Lookup.whole(vectors)
        num_rows = len(given.places)
        logit_rows = np.arange(num_rows) if rows is None else rows
        step_input = StepInput(given, position_ids, step, logit_rows, adapters)
        steps = native_steps(step, self._attending)
        stores, has_adapters = {n: own.store for n, own in steps.items()}, adapters is not None
        key = has_adapters, bool(stores)
        program = self._programs.get(key)
        if program is None or num_rows > program.max_rows or program.stores != stores:
            program = self._programs[key] = self._program(stores, num_rows, has_adapters)
        logits = program.run(step_input, steps, num_rows)
        if hidden is not None:
            hidden.rows = program.hidden[: len(logit_rows)].clone()
        return logits if decoder.edit_logits is None else decoder.edit_logits(logits)

    def _program(
        self, stores: dict[int, NativeKVStore], num_rows: int, has_adapters: bool
    ) -> _StepProgram:
        """Build the operations for a number of rows, on the store of each layer that attends."""
        decoder = self.decoder
        lora = AdapterUpdates(decoder.adapted()) if has_adapters else None
        max_rows = max(_MIN_ROWS, 1 << (num_rows - 1).bit_length())
        dtype = decoder.head.weight.dtype
        arena = Arena(max_rows, ROWS_PER_CHUNK, width_in_arena(decoder), dtype)
        arguments = StepArguments(self._angles, stores, max_rows, lora)
        operations = StepOperations(decoder, self._calls, arena, arguments)
        return _StepProgram(self._library, arena, arguments, operations)

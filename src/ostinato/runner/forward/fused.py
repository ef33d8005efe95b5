"""Computes a step of a decoder with as few passes over memory as possible.

The results are those of the modules of ``transformers``, rounded at the same places, but one
product computes queries, keys and values, one computes gate and up, and the operations between two
products are one pass. ``steps`` runs the program; this adds ids and edits of logits to it.
"""

import ctypes
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.decoder import Decoder
from ostinato.runner.forward.embedding_and_rope import Lookup, look_up_embeddings
from ostinato.runner.forward.step_arguments import StepInput
from ostinato.runner.forward.step_operations import ModuleCalls
from ostinato.runner.forward.steps import Steps
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints


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

        Modules that are called promise nothing of the kind.
        """
        return not self.called

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

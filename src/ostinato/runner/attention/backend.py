"""The interface of an attention backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from ostinato.core.plan import SampleTask
from ostinato.runner.inputs import AttentionMetadata, StepInputs
from ostinato.runner.kv.kv_store import KVStore, StoreShape
from ostinato.runner.states.step import LayerStates


@dataclass(frozen=True, slots=True)
class AttentionStyle:
    """Parameters of one layer's attention.

    Attributes:
        scale: Factor on the product of query and key.
        window: Positions that a query sees, its own included; None sees all before it.
        soft_cap: Scores are limited to ``cap * tanh(score / cap)`` (Gemma 2).
        sinks: One logit per query head that takes part in the softmax and has no value, shape
            (num_heads,) (gpt-oss; Xiao et al., arXiv 2309.17453).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a plain softmax over scaled products."""
        return self.soft_cap is None and self.sinks is None


@dataclass(eq=False)
class AttentionStep(ABC):
    """Attention of one step, for one group of layers.

    Attributes:
        metadata: Slots and block tables of the step.
        store: Keys and values of all slots.
    """

    metadata: AttentionMetadata
    store: KVStore

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots to write, to copy from and to copy to, on the device."""
        metadata = self.metadata
        slots, sources, targets = (
            torch.from_numpy(slots).to(metadata.device)
            for slots in (metadata.slots, metadata.copy_sources, metadata.copy_targets)
        )
        return slots, sources, targets

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Store the new tokens of a layer, run the copies, and attend.

        Args:
            layer: Index of the layer.
            queries: Shape (num_tokens, num_heads, key_dim), any strides.
            keys: Shape (num_tokens, num_kv_heads, key_dim), any strides.
            values: Shape (num_tokens, num_kv_heads, value_dim), any strides.
            style: Parameters of attention.

        Returns:
            Shape (num_tokens, num_heads, value_dim), in the dtype of the queries.

        Effects: writes the slots of the new tokens, then those of the plan's copies, whose sources
            may be new tokens; reads after that.
        """
        slots, sources, targets = self._places
        self.store.write(layer, keys, values, slots)
        if len(targets):
            self.store.copy(layer, sources, targets)
        return self.read(layer, queries, style)

    @abstractmethod
    def read(self, layer: int, queries: Tensor, style: AttentionStyle) -> Tensor:
        """Attend from each query to its sequence up to itself, over what the store has.

        Args:
            layer: Index of the layer.
            queries: Shape (num_tokens, num_heads, key_dim), any strides.
            style: Parameters of attention.

        Returns:
            Shape (num_tokens, num_heads, value_dim), in the dtype of the queries.
        """


@dataclass(frozen=True, slots=True)
class GroupedStep:
    """Attention of one step, for all groups of layers.

    Attributes:
        steps: One per group.
        of_layer: The group of each layer, shape (num_layers,).
        states: Computes the layers with a state; None if there are none.
    """

    steps: tuple[AttentionStep, ...]
    of_layer: tuple[int, ...]
    states: LayerStates | None = None

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Attend in one layer; shapes as in ``AttentionStep.attend``."""
        return self.steps[self.of_layer[layer]].attend(layer, queries, keys, values, style)


CallsModel: TypeAlias = Callable[..., Tensor]
"""A ``ModelCall``, which takes ids, positions and rows as tensors, too."""


WholeSteps: TypeAlias = Callable[
    [StepInputs, Sequence[SampleTask]], tuple[Tensor, Sequence[int] | None]
]
"""Computes whole steps: without images, adapters, states and hidden rows.

From a step, and what is sampled from ``sample_rows``, one task per row, to the logits of
``logit_rows``, shape (num_logit_rows, vocab_size), valid until the next call, and the id sampled
from each of these rows, -1 where none can be; None if they are to be sampled from the logits.
Effects: writes the step's slots in every layer.
"""


class AttentionBackend(ABC):
    """Creates KV stores, and computes attention over them."""

    def whole_steps(
        self, call: CallsModel, stores: Sequence[KVStore], of_layer: tuple[int, ...]
    ) -> WholeSteps | None:
        """Return what computes whole steps; None, the default, if the runner calls the model.

        Args:
            call: Calls the model.
            stores: Stores from ``new_store``, one per group of layers.
            of_layer: The group of each layer.
        """
        return None

    @abstractmethod
    def new_store(self, shape: StoreShape) -> KVStore:
        """Create a store; errors as in ``KVStore``."""

    @abstractmethod
    def start(self, metadata: AttentionMetadata, store: KVStore) -> AttentionStep:
        """Begin a step.

        Args:
            metadata: Slots and block tables of the step.
            store: A store from ``new_store``.
        """

"""Plans which keys the layers of a step read; for decodes, while the step before still runs.

A step of decodes is usually followed by one of the same sequences, each a token further. Only its
token ids are unknown until the running step ends, and the block of a sequence that has filled its
last one. A plan depends on neither: on lengths, and on which blocks sequences share. So it is made
ahead, and used if lengths and all known blocks are as predicted; any other step is planned anew.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from ostinato.runner.gpu.read_parts import PartLimits, ReadParts, plan_parts
from ostinato.runner.inputs import AttentionMetadata, Ints

_UNKNOWN = -1
"""A block that the pool has yet to allocate."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are read by one plan.

    Attributes:
        group: Query heads per head of keys.
        dim: Elements of the largest key or value.
        itemsize: Bytes of an element of queries.
        window: Positions that a query sees; None sees all before it.
    """

    group: int
    dim: int
    itemsize: int
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Prediction:
    """The next step of a group of layers, and its plans."""

    metadata: AttentionMetadata
    parts: dict[LayerKind, ReadParts] = field(default_factory=dict)

    def holds_for(self, metadata: AttentionMetadata) -> bool:
        """Whether a step has the predicted lengths, and the blocks that were known."""
        predicted = self.metadata
        return (
            len(metadata.slots) == len(metadata.first_positions)
            and np.array_equal(metadata.first_positions, predicted.first_positions)
            and np.array_equal(metadata.table_starts, predicted.table_starts)
            and bool(np.all((metadata.blocks == predicted.blocks) | (predicted.blocks == _UNKNOWN)))
        )


class ReadPlanner:
    """Plans the reads of steps.

    Attributes:
        same_bits: Whether a row's bits depend on its own sequence alone.
        num_ahead: Steps of a group of layers whose plans were ready when they began.
    """

    def __init__(self, share: bool | None, same_bits: bool) -> None:
        """Plan nothing yet; ``share`` as in ``plan_parts``."""
        self.same_bits, self.num_ahead = same_bits, 0
        self._share = share
        self._predictions: dict[int, _Prediction] = {}  # by the group of layers

    def plan(
        self, index: int, metadata: AttentionMetadata, kinds: tuple[LayerKind, ...]
    ) -> dict[LayerKind, ReadParts]:
        """Return the plans of a step, for one group of layers and its kinds."""
        prediction = self._predictions.pop(index, None)
        if prediction is not None and prediction.holds_for(metadata):
            self.num_ahead += 1
            if all(kind in prediction.parts for kind in kinds):
                return prediction.parts
        return {kind: self.plan_kind(metadata, kind) for kind in kinds}

    def plan_ahead(
        self, index: int, metadata: AttentionMetadata, kinds: tuple[LayerKind, ...]
    ) -> None:
        """Plan the step that follows one of decodes, and keep it until then."""
        following = next_decodes(metadata)
        parts = {kind: self.plan_kind(following, kind) for kind in kinds}
        self._predictions[index] = _Prediction(following, parts)

    def plan_kind(self, metadata: AttentionMetadata, kind: LayerKind) -> ReadParts:
        """Plan the reads of one kind of layers now."""
        return plan_parts(metadata, self.limits(kind), kind.window, self._share)

    def limits(self, kind: LayerKind) -> PartLimits:
        """Return the sizes of the parts of one kind of layers."""
        return PartLimits.of(kind.group, kind.dim, self.same_bits, kind.itemsize)


def next_decodes(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the step that follows one of decodes if all go on; blocks to come are unknown."""
    positions, starts = metadata.first_positions + 1, metadata.table_starts
    is_full = positions // metadata.block_size >= np.diff(starts)
    blocks = np.insert(metadata.blocks, starts[1:][is_full], _UNKNOWN)
    grown: Ints = starts + np.append(0, np.cumsum(is_full))
    return replace(metadata, first_positions=positions, blocks=blocks, table_starts=grown)

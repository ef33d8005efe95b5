"""Which layers share block tables.

Layers that keep the same tokens form a group: all with full attention, and all with one window
size. Group 0 is full attention, even if no layer has it: then its blocks have no bytes, and only
show which prefixes exist. A window that no sequence can exceed counts as full attention. A layer
without attention is in no group.
"""

from dataclasses import dataclass

import torch

from ostinato.runner.kv.kv_store import KVSpec


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model by what they keep.

    Attributes:
        windows: One window size per group from group 1 on, smallest first.
        of_layer: The group of each layer, shape (num_layers,); -1 is none.
    """

    windows: tuple[int, ...]
    of_layer: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Groups, full attention included."""
        return 1 + len(self.windows)

    def layers(self, group: int) -> tuple[int, ...]:
        """List the layers of a group."""
        return tuple(layer for layer, own in enumerate(self.of_layer) if own == group)

    def bytes_per_token(self, spec: KVSpec, group: int, dtype: torch.dtype) -> int:
        """Bytes of one slot of a group, over its layers."""
        return sum(spec.layers[layer].bytes_per_token(dtype) for layer in self.layers(group))


def one_group(spec: KVSpec) -> LayerGroups:
    """Return one group of all layers; windows are only masks then."""
    attending = set(spec.attending)
    return LayerGroups((), tuple(0 if i in attending else -1 for i in range(len(spec.layers))))


def group_layers(spec: KVSpec, max_model_len: int) -> LayerGroups:
    """Group layers by window, for sequences of at most ``max_model_len`` tokens."""
    seen = [layer.sliding_window for layer in spec.layers]
    real = [None if window is None or window >= max_model_len else window for window in seen]
    windows = tuple(sorted({window for window in real if window is not None}))
    all_in_one = one_group(spec).of_layer
    pairs = zip(all_in_one, real, strict=True)
    of_layer = (full if window is None else 1 + windows.index(window) for full, window in pairs)
    return LayerGroups(windows, tuple(of_layer))

"""Which layers of a model get packed weights, and how are they had back?

Linear layers and nothing else, each of them in place, so that at most one weight is in memory
twice. A weight that is an embedding as well stays plain there, where rows are looked up, and has a
packed copy here; one that other modules share in any other way is left alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ostinato.runner.forward.packed import PackedWeight
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.native.face import DTYPES
from ostinato.runner.native.library import library


def why_unpacked(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why weights of that kind stay plain here; None if they can be packed."""
    if device.type != "cpu":
        return f"weights are packed on a CPU, and device={str(device)!r}"
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} weights are not packed"
    return "packed weights need the native library" if library() is None else None


def pack_linears(model: nn.Module) -> int:
    """Pack every linear layer that is still plain; returns how many there were.

    Effects: replaces the layers in the model, and lets go of their weights.
    """
    shared = _shared_parameters(model)
    embeddings = _embeddings(model)
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear and is_plain(child)
    ]
    num_packed = 0
    for parent, name, linear in found:
        tied = cast(nn.Parameter, linear.weight) if id(linear.weight) in embeddings else None
        if tied is None and id(linear.weight) in shared:
            continue
        setattr(parent, name, PackedLinear(linear, PackedWeight([linear.weight]), 0, tied))
        num_packed += 1
    return num_packed


def stack(parent: nn.Module, names: Sequence[str]) -> PackedWeight:
    """Pack linear layers that read one input into one weight.

    Args:
        parent: Their module.
        names: Of its children, in the order of rows.

    Effects: replaces them.
    """
    linears = [parent.get_submodule(name) for name in names]
    assert all(isinstance(linear, nn.Linear) for linear in linears)
    packed = PackedWeight([linear.weight for linear in linears])  # type: ignore[misc]
    first_row = 0
    for name, linear in zip(names, linears, strict=True):
        assert isinstance(linear, nn.Linear)
        setattr(parent, name, PackedLinear(linear, packed, first_row))
        first_row += linear.out_features
    return packed


def unpack_linears(model: nn.Module) -> None:
    """Make all packed layers plain again."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())


def is_plain(linear: nn.Linear) -> bool:
    """Say whether a layer is what it appears to be: a plain weight of a known format, no hooks."""
    hooks = (*linear._forward_hooks.values(), *linear._forward_pre_hooks.values())
    plain = type(linear.weight) is nn.Parameter and not hooks
    return plain and linear.weight.dtype in DTYPES and linear.weight.numel() > 0


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules hold."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {parameter for parameter, count in holders.items() if count > 1}


def _embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}

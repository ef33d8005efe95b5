"""Packs the weights of a model's linear layers, and unpacks them.

Layers are replaced one by one, so that at most one weight is in memory twice. A weight tied to an
embedding stays plain in the embedding, where rows are looked up, and the layer has a packed copy;
weights that modules share in any other way are not packed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import transformers
from torch import nn

from ostinato.runner.experts.mixture import (
    PackedExperts,
    expert_weights,
    pack_mixtures,
    with_parents,
)
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.native.ctypes_api import DTYPES
from ostinato.runner.native.library import library
from ostinato.runner.native.packed import PackedWeight


def why_unpacked(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why weights of a dtype cannot be packed here; None if they can."""
    if device.type != "cpu":
        return f"weights are packed on a CPU, and device={str(device)!r}"
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} weights are not packed"
    return "packed weights need the native library" if library() is None else None


Layers = Sequence[nn.Linear] | ExpertStack
"""What is packed into one weight: plain linear layers with the same input, or a layer's experts."""

Pack = Callable[[Layers, bool], PackedWeight]
"""Packs layers; the second argument is whether they are the head."""


def pack_plain(layers: Layers, is_head: bool = False) -> PackedWeight:
    """Pack layers without quantizing them; see ``Pack``."""
    if isinstance(layers, ExpertStack):
        return layers.pack()
    return PackedWeight([linear.weight for linear in layers])


def members(layers: Layers) -> Sequence[nn.Linear | ExpertStack]:
    """Return what has the weights: each linear layer, or the experts."""
    return [layers] if isinstance(layers, ExpertStack) else layers


def key_of(member: nn.Linear | ExpertStack) -> int:
    """Return what names a linear layer, whose weight may be replaced, or experts."""
    return id(member.weight if isinstance(member, ExpertStack) else member)


def names_of(layers: Layers, names: Mapping[int, str]) -> list[str]:
    """Return the names of what is packed into one weight.

    Args:
        layers: What is packed.
        names: By what ``key_of`` returns.
    """
    return [names[key_of(member)] for member in members(layers)]


def pack_linears(model: nn.Module, pack: Pack = pack_plain) -> int:
    """Pack every linear layer and all experts that are still plain; returns how many there were.

    Effects: replaces the layers in the model, and frees their weights.
    """
    num_packed = pack_mixtures(model, lambda stack: pack(stack, False))
    shared = _shared_parameters(model)
    embeddings = _embeddings(model)
    head = (
        model.get_output_embeddings() if isinstance(model, transformers.PreTrainedModel) else None
    )
    linears = [
        (parent, name, child)
        for parent, name, child in with_parents(model)
        if is_plain_linear(child) and not isinstance(parent, PackedRouter)
    ]
    for parent, name, linear in linears:
        tied = cast(nn.Parameter, linear.weight) if id(linear.weight) in embeddings else None
        if tied is None and id(linear.weight) in shared:
            continue
        setattr(parent, name, PackedLinear(linear, pack([linear], linear is head), 0, tied))
        num_packed += 1
    return num_packed


def stack(parent: nn.Module, names: Sequence[str], pack: Pack = pack_plain) -> PackedWeight:
    """Pack linear layers with the same input, children of ``parent``, into one weight.

    Effects: replaces them.
    """
    linears = [cast(nn.Linear, parent.get_submodule(name)) for name in names]
    packed, first_row = pack(linears, False), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, PackedLinear(linear, packed, first_row))
        first_row += linear.out_features
    return packed


def share_in_linears(model: nn.Module) -> float:
    """Return the share of linear layers and experts that can be packed in a model's weights.

    Embeddings are left out.
    """
    embeddings = _embeddings(model)
    sizes = {id(p): p.numel() for p in model.parameters() if id(p) not in embeddings}
    inside = {id(m.weight) for m in model.modules() if is_plain_linear(m)}
    inside |= {id(stack.weight) for _, stack in expert_weights(model)}
    inside &= sizes.keys()
    return sum(sizes[each] for each in inside) / max(1, sum(sizes.values()))


def unpack_linears(model: nn.Module) -> None:
    """Put plain linear layers, and the experts and routers of ``transformers``, back."""
    for parent, name, child in with_parents(model):
        if isinstance(child, (PackedLinear, PackedExperts, PackedRouter)):
            setattr(parent, name, child.unpacked())


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

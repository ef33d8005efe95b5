"""The weights of a model, packed or plain, and how they are replaced.

Names, shapes and dtypes are those of ``state_dict``, without unpacking anything.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.experts.mixture import PackedExperts, PackedPart
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.forward.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A reference to one weight.

    Attributes:
        shape: As in ``state_dict``.
        dtype: Likewise.
        home: Equal for names that are one tensor.
        owner: The packed layer, the embedding of blocks, or the plain tensor that holds it.
    """

    shape: torch.Size
    dtype: torch.dtype
    home: Hashable
    owner: PackedLinear | PackedPart | BlockEmbedding | Tensor

    def write(self, tensor: Tensor) -> None:
        """Replace the weight by one of the same shape and dtype."""
        if isinstance(self.owner, (PackedLinear, PackedPart, BlockEmbedding)):
            self.owner.load(tensor)
        else:
            self.owner.copy_(tensor)


def weight_places(model: nn.Module) -> dict[str, WeightRef]:
    """Return all weights and persistent buffers by their names in ``state_dict``."""
    return {
        prefix + name: place
        for path, module in model.named_modules(remove_duplicate=False)
        for prefix in (f"{path}." if path else "",)
        for name, place in _own_places(module)
    }


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of memory that a model's weights take, packed and plain."""
    packed = {id(m.packed): m.packed.nbytes for m in model.modules() if isinstance(m, PackedLinear)}
    experts = [m for m in model.modules() if isinstance(m, PackedExperts)]
    packed |= {id(p): p.packed.nbytes for m in experts for p in m.parts.values()}
    blocks = sum(m.nbytes for m in model.modules() if isinstance(m, BlockEmbedding))
    return blocks + sum(packed.values()) + sum(tensor.nbytes for tensor in model.parameters())


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large a model is.

    Attributes:
        num_bytes: Bytes of memory that its weights take.
        num_parameters: Numbers in its weights, packed or not; those that are tied count once.
    """

    num_bytes: int
    num_parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSize":
        """Measure a model."""
        shapes = {place.home: place.shape for place in weight_places(model).values()}
        return cls(weight_bytes(model), sum(shape.numel() for shape in shapes.values()))


@torch.no_grad()
def replace_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite some weights in place.

    Args:
        model: Packed or plain.
        tensors: By name, each of the shape and dtype that it has in the model.

    Cost: a packed weight is packed again for each layer in it that is replaced.
    """
    places = weight_places(model)
    for name, tensor in tensors.items():
        places[name].write(tensor)
    for module in model.modules():
        if isinstance(module, (PackedLinear, PackedExperts, PackedRouter)):
            module.sync()


def _own_places(module: nn.Module) -> Iterator[tuple[str, WeightRef]]:
    """Yield the weights and buffers of a module, without those of its children."""
    if isinstance(module, PackedLinear):
        (tied,) = module.tied
        shape = torch.Size((module.out_features, module.in_features))
        home: Hashable = id(module if tied is None else tied)
        if isinstance(tied, Tensor):
            home = (tied.device, tied.data_ptr())
        yield "weight", WeightRef(shape, module.packed.dtype, home, module)
    if isinstance(module, PackedExperts):
        for name, part in module.parts.items():
            yield name, WeightRef(part.shape, part.dtype, id(part), part)
    if isinstance(module, BlockEmbedding):
        shape = torch.Size((module.num_embeddings, module.embedding_dim))
        yield "weight", WeightRef(shape, module.dtype, id(module), module)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            home = (tensor.device, tensor.data_ptr())
            yield name, WeightRef(tensor.shape, tensor.dtype, home, tensor)

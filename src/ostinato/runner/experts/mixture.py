"""The experts of a layer as own products, in place of those of ``transformers``."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ostinato.runner.block_embedding import StoringModule
from ostinato.runner.experts.families import Gating, gating_of
from ostinato.runner.experts.routers import PackedRouter, Routing, family_of
from ostinato.runner.experts.stack import ExpertStack, padded, stacks_of
from ostinato.runner.native.ctypes_api import DTYPES, floats, int32s, int64s, pointers
from ostinato.runner.native.packed import (
    Matrix,
    PackedWeight,
    Product,
    padded_width,
    required_library,
)

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


class ExpertsRecord(ctypes.Structure):
    """``ost_experts``."""

    _fields_ = (
        ("inputs", Matrix),
        ("outputs", Matrix),
        *pointers("experts", "weights"),
        ("gate_up", Product),
        ("down", Product),
        *int32s("num_rows", "num_experts", "top_k", "activation", "has_up"),
        *floats("alpha", "limit"),
        *int32s("num_threads"),
        *pointers("adapters"),
        *int64s("adapter_layer"),
    )


Adapters = tuple[ctypes.Structure, int]
"""Rows of a step that adapters compute (``ost_lora_step``), and the first product of experts."""


def empty_weight(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """Return a weight without storage."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class PackedPart:
    """One packed weight of all experts.

    Attributes:
        stack: How it is laid out; its plain weight is freed.
        packed: The weight.
    """

    def __init__(self, stack: ExpertStack, packed: PackedWeight) -> None:
        """Free the plain weight."""
        self.stack, self.packed = stack, packed
        self.shape, self.dtype = stack.weight.shape, packed.dtype
        stack.weight = empty_weight(stack.weight.shape, packed.dtype)

    @property
    def weight(self) -> Tensor:
        """A copy of the weight in the layout of the model."""
        return self.stack.weight_of(self.packed.plain())

    def load(self, weight: Tensor) -> None:
        """Replace the weight by one of the same shape and dtype."""
        kept = self.stack.weight
        self.stack.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.stack.put(self.packed)
        self.stack.weight = kept

    def product(self, bias: Tensor | None) -> Product:
        """Describe the product of the first expert."""
        product = self.packed.template(bias)
        product.num_outputs = self.stack.expert_rows
        return product


class PackedExperts(StoringModule):
    """Takes the place of the experts of ``transformers``, as ``PackedLinear`` that of a layer.

    Attributes:
        parts: The packed weights by name: gates and ups, or ups alone, and what leads back.
        gating: What is between their products.
        origin: The module that it replaces, without its weights, in a tuple; or nothing.
    """

    def __init__(
        self,
        parts: Mapping[str, PackedPart],
        biases: Mapping[str, nn.Parameter | None],
        gating: Gating,
        origin: tuple[nn.Module, ...] = (),
    ) -> None:
        """Compute with packed weights and with biases by the names of the weights."""
        super().__init__()
        self.parts, self.gating, self.origin = parts, gating, origin
        for name in parts:
            self.register_parameter(f"{name}_bias", biases[name])
        self.sync()
        self.eval()

    @classmethod
    def of(cls, experts: nn.Module, pack: Callable[[ExpertStack], PackedWeight]) -> "PackedExperts":
        """Pack the weights of experts of ``transformers``, and free the plain ones."""
        gating, parts = gating_of(experts), dict[str, PackedPart]()
        assert gating is not None, "unknown experts stay as they are"
        own, biases = cast(Any, experts), dict[str, nn.Parameter | None]()
        for name, stack in stacks_of(experts).items():
            parts[name] = part = PackedPart(stack, pack(stack))
            experts._parameters[name] = part.stack.weight
            biases[name] = own._parameters.get(f"{name}_bias") if own.has_bias else None
        return cls(parts, biases, gating, (experts,))

    @property
    def stored(self) -> Mapping[str, PackedPart]:
        """The packed weights."""
        return self.parts

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.parts["down_proj"].stack.num_experts

    def sync(self) -> None:
        """Arrange the biases again, after they were replaced."""
        self._biases = {name: self._arranged_bias(name) for name in self.parts}

    def _arranged_bias(self, name: str) -> Tensor | None:
        bias, part = self._parameters[f"{name}_bias"], self.parts[name]
        if bias is None or name == "down_proj" or bias.is_meta:
            return bias
        return torch.stack([part.stack.arranged(own) for own in bias.detach()]).contiguous()

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """Return the weighted sum of each row's experts; see ``compute``."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        sums = self.compute(rows, top_k_index, top_k_weights, adapters)
        return sums.view(hidden_states.shape)

    def compute(
        self, rows: Tensor, experts: Tensor, weights: Tensor, adapters: Adapters | None = None
    ) -> Tensor:
        """Return the weighted sum of each row's experts.

        Args:
            rows: Shape (num_rows, width), of the dtype of the weights.
            experts: Ids, int64, shape (num_rows, top_k), of a row all different.
            weights: Of that shape.
            adapters: Updates of both products, see ``adapted_products``; not in float16.

        Returns:
            Shape (num_rows, width), a new tensor.
        """
        gate_up, down = self.parts.values()
        num_rows, width = rows.shape
        num_experts, top_k = self.num_experts, experts.shape[-1]
        assert rows.dtype == gate_up.dtype and width == gate_up.stack.in_features, rows.shape
        assert experts.shape == weights.shape == (num_rows, top_k), experts.shape
        outputs = rows.new_empty(num_rows, down.stack.part_rows)
        if not num_rows:
            return outputs
        assert experts.dtype == torch.int64 and top_k <= num_experts
        experts, weights = experts.contiguous(), weights.float().contiguous()
        low, high = torch.aminmax(experts)
        assert int(low) >= 0 and int(high) < num_experts, "no such expert"
        rows = functional.pad(rows, (0, padded_width(width) - width)).contiguous()
        products = [part.product(self._biases[name]) for name, part in self.parts.items()]
        products[1].num_outputs = down.stack.part_rows
        record = ExpertsRecord(
            Matrix.of(rows),
            Matrix.of(outputs),
            experts.data_ptr(),
            weights.data_ptr(),
            *products,
            num_rows,
            num_experts,
            top_k,
            self.gating.activation,
            gate_up.stack.num_parts == 2,
            self.gating.alpha,
            self.gating.limit,
            torch.get_num_threads(),
            None if adapters is None else ctypes.addressof(adapters[0]),
            0 if adapters is None else adapters[1],
        )
        required_library().ost_run_experts(ctypes.byref(record))
        return outputs

    def unpacked(self) -> nn.Module:
        """Return the module of ``transformers`` with its weights."""
        (experts,) = self.origin
        for name, part in self.parts.items():
            experts._parameters[name] = nn.Parameter(part.weight, requires_grad=False)
        return experts

    def extra_repr(self) -> str:
        """Say how many there are."""
        return f"num_experts={self.num_experts}, packed"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the weights, then the biases, and arrange these."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.sync()


def adapted_products(name: str, stacks: Mapping[str, ExpertStack]) -> list[list[tuple[str, int]]]:
    """Return what an adapter may change of each expert's first product, and of each one's second.

    Args:
        name: Name of the experts.
        stacks: Their weights by name.

    Returns:
        For each product, names of updates and their first outputs.
    """
    return [
        [(f"{name}[{expert}].{part}", first) for part, first in parts.items()]
        for weight, parts in first_outputs(stacks).items()
        for expert in range(stacks[weight].num_experts)
    ]


def first_outputs(stacks: Mapping[str, ExpertStack]) -> dict[str, dict[str, int]]:
    """Return what adapters may change of each weight, and where its rows begin in an expert's."""
    return {
        name: {name: 0, "gate_proj": 0, "up_proj": padded(stack.part_rows)}
        if stack.num_parts == 2
        else {name: 0}
        for name, stack in stacks.items()
    }


def stacks_by_name(module: nn.Module | None) -> dict[str, ExpertStack]:
    """Return the weights of experts, packed or not; empty if a module is none."""
    if isinstance(module, PackedExperts):
        return {name: part.stack for name, part in module.parts.items()}
    return stacks_of(module) if module is not None and is_experts(module) else {}


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a block of ``transformers``."""
    if not all(hasattr(module, name) for name in _LAYOUT):
        return False
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    weights = [module._parameters.get(name) for name in names]
    return all(weight is not None and weight.ndim == 3 for weight in weights)


def why_unpacked_experts(module: nn.Module) -> str | None:
    """Return why experts stay modules; None if they are packed."""
    own, name = cast(Any, module), type(module).__name__
    if own.has_post_expert_norm:
        return f"{name} has experts with norms"
    if gating_of(module) is None:
        return f"{name} gates in a way of its own"
    if own.down_proj.dtype not in DTYPES:
        return f"{str(own.down_proj.dtype).removeprefix('torch.')} experts are not packed"
    return None


def expert_weights(model: nn.Module) -> Iterator[tuple[str, ExpertStack]]:
    """Yield names and weights of the experts that are packed."""
    for path, module in model.named_modules():
        if is_experts(module) and why_unpacked_experts(module) is None:
            for name, stack in stacks_of(module).items():
                yield f"{path}.{name}", stack


def why_modules(model: nn.Module) -> str:
    """Return why some experts or routers of a model stay modules; empty if none do."""
    reasons = {why_unpacked_experts(module) for module in model.modules() if is_experts(module)}
    return "; ".join(sorted(reason for reason in reasons if reason is not None))


def pack_mixtures(model: nn.Module, pack: Callable[[ExpertStack], PackedWeight]) -> int:
    """Replace known routers and experts; returns how many experts there were.

    Effects: replaces modules of the model, and frees the experts' weights.
    """
    num_packed = 0
    for parent, name, child in with_parents(model):
        if is_experts(child) and why_unpacked_experts(child) is None:
            setattr(parent, name, PackedExperts.of(child, pack))
            num_packed += 1
        elif (family := family_of(child)) is not None:
            setattr(parent, name, PackedRouter(child, Routing.of(child, family)))
    return num_packed


def with_parents(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return all modules in a model, each after its parent and its name in it."""
    parents = list(model.modules())
    return [(parent, name, own) for parent in parents for name, own in parent.named_children()]

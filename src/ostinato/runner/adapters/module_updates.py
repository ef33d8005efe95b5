"""Adds the updates of adapters to modules that are called.

A linear layer, and packed routers and experts, get them from the library or in torch while they
compute. Others compute the rows of each adapter once more, with weights that have its updates, as
``peft`` does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ostinato.runner.adapters.lora import LoraAdapter, LoraLayer, PackedLoraLayer, StepAdapters
from ostinato.runner.adapters.lora_targets import linear_size
from ostinato.runner.adapters.lora_updates import AdapterUpdates, Groups, add_updates
from ostinato.runner.experts.mixture import (
    PackedExperts,
    adapted_products,
    first_outputs,
    stacks_by_name,
)
from ostinato.runner.experts.routers import PackedRouter

Current = Callable[[], StepAdapters | None]
"""Returns the adapters of the running step."""

Keywords = dict[str, Any]


def hook_updates(name: str, module: nn.Module, adapter: LoraAdapter, current: Current) -> None:
    """Add a hook for the updates of adapters to a module that one of them changes."""
    is_packed = isinstance(adapter.modules[name], PackedLoraLayer)
    if linear_size(module) is not None:
        module.register_forward_hook(_adding(name, current))
    elif is_packed and isinstance(module, PackedExperts | PackedRouter):
        more = _of_router(name) if isinstance(module, PackedRouter) else _of_experts(name, module)

        def with_updates(_module: nn.Module, inputs: tuple[Any, ...], keywords: Keywords) -> Any:
            adapters = current()
            return None if adapters is None else (inputs, keywords | more(adapters))

        module.register_forward_pre_hook(with_updates, with_kwargs=True)
    else:
        module.register_forward_hook(_MergedRows(name, current))


def _adding(name: str, current: Current) -> Callable[..., Tensor]:
    def with_updates(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        adapters = current()
        if adapters is None:
            return output
        rows = output.reshape(-1, output.shape[-1])
        add_updates(name, inputs[0].reshape(len(rows), -1), rows, adapters)
        return rows.view(output.shape)

    return with_updates


def _of_router(name: str) -> Callable[[StepAdapters], Keywords]:
    return lambda adapters: {"edit": partial(add_updates, name, adapters=adapters)}


def _of_experts(name: str, module: PackedExperts) -> Callable[[StepAdapters], Keywords]:
    updates = AdapterUpdates([(module, adapted_products(name, stacks_by_name(module)))])
    return lambda adapters: {"adapters": (Groups.of(updates.groups_of(adapters)), 0)}


class _MergedRows:
    """Computes the rows of adapters once more, with merged weights."""

    def __init__(self, name: str, current: Current) -> None:
        self._name, self._current, self._is_running = name, current, False

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        adapters = self._current()
        if adapters is None or self._is_running:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        for adapter, rows in adapters.rows_of_each().items():
            if self._name in adapter.modules:
                own = torch.from_numpy(rows).to(inputs[0].device)
                results = self._computed(module, inputs, adapter, own)
                pairs = zip(outputs, results, strict=True)
                outputs = tuple(_replaced(each, own, result) for each, result in pairs)
        return outputs if isinstance(output, tuple) else outputs[0]

    def _computed(
        self, module: nn.Module, inputs: tuple[Tensor, ...], adapter: LoraAdapter, rows: Tensor
    ) -> tuple[Tensor, ...]:
        base = module.origin[0] if isinstance(module, PackedExperts | PackedRouter) else module
        # A vector is the router's correction, and of no row.
        own = (each if each.ndim < 2 else each.reshape(-1, each.shape[-1])[rows] for each in inputs)
        self._is_running = True
        try:
            result = functional_call(base, self._merged(module, adapter), tuple(own))
        finally:
            self._is_running = False
        return result if isinstance(result, tuple) else (result,)

    def _merged(self, module: nn.Module, adapter: LoraAdapter) -> dict[str, Tensor]:
        """Return the weights of a module with an adapter's updates."""
        own, stacks = cast(Any, module), stacks_by_name(module)
        layers = cast(Mapping[str, LoraLayer], adapter.layers)  # of what is not packed
        if not stacks:
            name = f"{getattr(own, 'suffix', '')}.weight"[1:]
            return {name: own.get_parameter(name) + layers[self._name].weight()}
        merged: dict[str, Tensor] = {}
        for name, parts in first_outputs(stacks).items():
            stack = stacks[name]
            is_packed = isinstance(module, PackedExperts)
            weight = own.parts[name].weight if is_packed else own._parameters[name]
            rows = weight.new_zeros(stack.num_experts, stack.expert_rows, stack.in_features)
            for expert, (part, first) in product(range(stack.num_experts), parts.items()):
                if (layer := layers.get(f"{self._name}[{expert}].{part}")) is not None:
                    rows[expert, first:][: len(layer.up)] += layer.weight()
            merged[name] = weight + stack.weight_of(rows)
        return merged


def _replaced(output: Tensor, rows: Tensor, result: Tensor) -> Tensor:
    """Return an output with other numbers in some rows."""
    flat = output.reshape(-1, result.shape[-1])
    own = result.reshape(len(rows), -1).to(flat.dtype)
    return flat.index_copy(0, rows, own).view(output.shape)

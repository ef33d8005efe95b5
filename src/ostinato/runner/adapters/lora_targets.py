"""Finds what an adapter changes in a model: linear layers, routers, and experts in any notation.

::

    q_proj                   a linear layer
    gate                     a router, as a linear layer or by its ``weight``
    experts.3.gate_proj      one expert (transformers before 5); in Mixtral w1, w3 and w2
    experts                  a weight of all experts: A is (experts * rank, inputs), expert by
    experts.base_layer       expert, and B is (outputs, rank * experts), rank by rank

Which of the two weights of all experts is meant follows from the shapes, which always differ.
Before ``peft`` 0.19, A read outputs and B gave inputs, unless the experts are transposed: shapes
tell, or where both are possible, the config's version.
Experts' outputs are put in the order of ``ExpertStack``.
"""

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ostinato.core.errors import RequestError
from ostinato.runner.adapters.lora import LoraLayer
from ostinato.runner.adapters.lora_config import LoraConfig
from ostinato.runner.experts.families import ROUTERS
from ostinato.runner.experts.mixture import PackedExperts, first_outputs, stacks_by_name
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.experts.stack import ExpertStack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERT = re.compile(r"(?P<experts>.+)\.(?P<index>\d{1,9})\.(?P<part>\w+)")
_BOTH = "gate_up_proj"
_MIXTRAL_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

Factors = tuple[Tensor, Tensor]
"""``lora_A`` and ``lora_B``."""


class BaseModel:
    """A model that an adapter changes."""

    def __init__(self, model: "PreTrainedModel", folder: Path, config: LoraConfig) -> None:
        """Collect its modules by name; ``folder`` and ``config`` are the adapter's."""
        self._model, self._config = model, config
        self._adapter = f"adapter {str(folder)!r}"
        self._modules = dict(model.named_modules())
        self._decoder = set(model.get_decoder().modules())

    def packs(self, update: str) -> bool:
        """Whether the library computes what an update changes."""
        module = self._modules[update.partition("[")[0]]
        is_packed = isinstance(module, PackedExperts | PackedRouter)
        return is_packed or linear_size(module) is not None

    def layers(self, name: str, pair: Mapping[str, Tensor]) -> dict[str, LoraLayer]:
        """Return one layer's updates by name, checked against the model.

        Raises:
            RequestError: The model has no such layer, or the update is no update of it.
        """
        if pair.keys() != {"lora_A", "lora_B"}:
            raise RequestError(f"{self._adapter}: {name} has {min(pair)} alone")
        factors = down, up = pair["lora_A"], pair["lora_B"]
        if down.ndim != 2 or up.ndim != 2:
            raise self._of_another_model(name, factors, "a layer here takes two matrices")
        own = name.removesuffix(".base_layer")
        layer, _, rest = own.partition(".block_sparse_moe.")
        if rest and f"{layer}.block_sparse_moe" not in self._modules:
            own = f"{layer}.mlp.{rest}"  # Mixtral's had that name in transformers before 5
        if stacks := stacks_by_name(self._modules.get(own)):
            key, updates = self._of_all_experts(name, own, stacks, factors)
        else:
            update, inputs, outputs = self._one_expert(own) or self._layer(name, own)
            rank = len(down)
            if not rank or down.shape != (rank, inputs) or up.shape != (outputs, rank):
                size = f"the layer here has {inputs} inputs and {outputs} outputs"
                raise self._of_another_model(name, factors, size)
            key = f"{name}.weight" if self._config.targets(f"{own}.weight") else name
            updates = {update: factors}
        rank, scale = len(next(iter(updates.values()))[0]), self._config.scale_of(key)
        if rank != self._config.rank_of(key):
            raise RequestError(
                f"{self._adapter}: the weights of {key} have rank {rank}, and its config says "
                f"{self._config.rank_of(key)}"
            )
        to = {"dtype": self._dtype_of(own), "device": self._model.device}
        return {
            update: LoraLayer(down.to(**to).contiguous(), up.to(**to).contiguous(), scale)
            for update, (down, up) in updates.items()
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return what a layer reads rows in; routers and their linear layers have their own."""
        own = [self._modules.get(each) for each in (name, name.rpartition(".")[0])]
        if router := next((each for each in own if isinstance(each, PackedRouter)), None):
            return router.dtype
        is_wide = type(own[0]) is nn.Linear and own[0].weight.dtype == torch.float32
        return torch.float32 if is_wide else self._model.dtype

    def _of_all_experts(
        self, name: str, own: str, stacks: Mapping[str, ExpertStack], factors: Factors
    ) -> tuple[str, dict[str, Factors]]:
        """Return the name of the weight that factors change, and the factors of each expert."""
        down, up = factors
        turns = (self._config.is_turned, not self._config.is_turned)
        for is_turned, (weight, stack) in product(turns, stacks.items()):
            count, sizes = stack.num_experts, (stack.in_features, stack.num_outputs)
            first, second = reversed(sizes) if is_turned else sizes
            rank = len(down) // count
            shapes = [(rank * count, first), (second, rank * count)]
            if not rank or [down.shape, up.shape] != shapes or (is_turned and stack.is_transposed):
                continue
            downs = down.view(count, rank, first)
            ups = up.view(second, rank, count).permute(2, 0, 1)
            if is_turned:
                downs, ups = ups.transpose(1, 2), downs.transpose(1, 2)
            each = zip(downs, map(stack.arranged, ups), strict=True)
            names = (f"{own}[{expert}].{weight}" for expert in range(count))
            return f"{own}.{weight}", dict(zip(names, each, strict=True))
        weights = (
            f"{weight} of {stack.in_features} inputs and {stack.num_outputs} outputs"
            for weight, stack in stacks.items()
        )
        what = f"each of the {count} experts here has {' and '.join(weights)}"
        raise self._of_another_model(name, factors, what)

    def _one_expert(self, name: str) -> tuple[str, int, int] | None:
        """Return the update, inputs and outputs of an expert's layer; None if it is none."""
        match = _EXPERT.fullmatch(name)
        stacks = stacks_by_name(self._modules.get(match["experts"])) if match else {}
        if match is None or not stacks:
            return None
        firsts = first_outputs(stacks).items()
        parts = {part: stacks[weight] for weight, own in firsts for part in own if part != _BOTH}
        part, index = _MIXTRAL_PARTS.get(match["part"], match["part"]), int(match["index"])
        count = parts["down_proj"].num_experts
        if part not in parts or index >= count:
            raise RequestError(
                f"{self._adapter} changes {name!r:.200}; the experts here are 0 to {count - 1}, "
                f"each with {', '.join(parts)}"
            )
        return f"{match['experts']}[{index}].{part}", parts[part].in_features, parts[part].part_rows

    def _layer(self, name: str, own: str) -> tuple[str, int, int]:
        """Return the update, inputs and outputs of a linear layer or a router."""
        module, is_expert = self._modules.get(own), ".experts." in f".{own}."
        if module is None and not is_expert:
            raise RequestError(
                f"{self._adapter} changes {name!r:.200}, which the decoder here does not have: it "
                f"is for another base model ({self._config.base}), or for what encodes images, "
                "where adapters are not served"
            )
        size, kind = None, "an expert" if is_expert else f"a {type(module).__name__}"
        # Of a Conv1D, peft has the factors of a parameter and of a layer the other way around.
        is_turned = isinstance(module, Conv1D) and self._config.targets(f"{own}.weight")
        if module in self._decoder and module is not None and not is_expert and not is_turned:
            size = linear_size(module) or self._router_size(own, module)
        if size is None:
            raise RequestError(
                f"{self._adapter} targets {name!r:.200}, {kind}: adapters are served on the "
                "decoder's linear layers, known experts and their routers, not on embeddings, the "
                "output layer, or what encodes images"
            )
        return own, *size

    def _router_size(self, name: str, module: nn.Module) -> tuple[int, int] | None:
        """Return inputs and outputs of a router, which is beside experts; None if it is none."""
        weight = module._parameters.get("weight")
        beside = self._modules[name.rpartition(".")[0]].children()
        if weight is None or weight.ndim != 2 or not any(map(stacks_by_name, beside)):
            return None
        return weight.shape[1], weight.shape[0]

    def _of_another_model(self, name: str, factors: Factors, size: str) -> RequestError:
        down, up = (tuple(factor.shape) for factor in factors)
        return RequestError(
            f"{self._adapter} is for another base model ({self._config.base}): its {name} is "
            f"{down} and {up}, and {size}"
        )


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer; None if a module is none."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    if type(module).__name__.lower() in ROUTERS:
        return None  # Phi's router is a linear layer that returns more than its product
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not isinstance(sizes[0], int) or not isinstance(sizes[1], int):
        return None
    return sizes[0], sizes[1]

"""A linear layer whose weight is packed.

It replaces an ``nn.Linear`` in the model's tree, so that ``state_dict`` and ``load_state_dict`` go
on as before: reading unpacks a copy, loading packs anew.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.runner.native.packed import PackedWeight


class PackedLinear(nn.Module):
    """A linear layer whose weight is some rows of a packed one.

    Attributes:
        packed: The weight, which siblings may share.
        first_row: Where its rows begin.
        in_features: As in ``nn.Linear``.
        out_features: As in ``nn.Linear``.
        bias: As in ``nn.Linear``.
        tied: The embedding that the weight is a copy of; None if it is a weight of its own.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        linear: nn.Linear,
        packed: PackedWeight,
        first_row: int = 0,
        tied: nn.Parameter | None = None,
    ) -> None:
        """Stand for a linear layer whose weight was packed."""
        super().__init__()
        self.packed = packed
        self.first_row = first_row
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self.tied = (tied,)  # in a tuple, lest it becomes a parameter of this module as well
        self.eval()

    @property
    def weight(self) -> Tensor:
        """The weight as ``nn.Linear`` has it; a fresh copy, unless it is tied."""
        (tied,) = self.tied
        if tied is not None:
            return tied
        return self.packed.plain(self.first_row, self.first_row + self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply, like ``nn.Linear``; where siblings share the weight, theirs is computed too."""
        rows = inputs.reshape(-1, self.in_features)
        last_row = self.first_row + self.out_features
        if self.packed.num_rows == self.out_features:
            product = self.packed.multiply(rows, self.bias)
        else:
            product = self.packed.multiply(rows)[:, self.first_row : last_row]
            product = product if self.bias is None else product + self.bias
        return product.reshape(*inputs.shape[:-1], self.out_features)

    def unpacked(self) -> nn.Linear:
        """Return a plain linear layer of the same weight."""
        plain = nn.Linear(1, 1, bias=False, device="meta")
        plain.in_features, plain.out_features = self.in_features, self.out_features
        (tied,) = self.tied
        own = nn.Parameter(self.weight.clone(), requires_grad=False) if tied is None else tied
        plain.weight = own
        plain.register_parameter("bias", self.bias)
        return plain.eval()

    def load(self, weight: Tensor) -> None:
        """Take another weight, of the same shape and dtype."""
        (tied,) = self.tied
        if tied is not None:
            tied.copy_(weight)
        self.packed.replace(self.first_row, weight)

    def follow(self) -> None:
        """Take over what its embedding holds now, if it has one."""
        (tied,) = self.tied
        if tied is not None:
            self.packed.replace(self.first_row, tied)

    def extra_repr(self) -> str:
        """Describe it like ``nn.Linear``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Give the weight its place, before the bias as in ``nn.Linear``."""
        weight = self.weight
        destination[prefix + "weight"] = weight if keep_vars else weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the weight out of what is loaded; a tied one was loaded as the embedding."""
        weight = state_dict.get(prefix + "weight")
        if weight is None:
            missing_keys.append(prefix + "weight")
            self.follow()
        else:
            with torch.no_grad():
                self.load(weight)
        super()._load_from_state_dict(
            {name: tensor for name, tensor in state_dict.items() if name != prefix + "weight"},
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

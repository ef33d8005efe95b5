"""A linear layer whose weight is packed.

It replaces an ``nn.Linear`` in the model; ``state_dict`` and ``load_state_dict`` still work:
reading unpacks a copy, loading packs again.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ostinato.runner.block_embedding import BlockEmbedding, StoringModule
from ostinato.runner.forward.plain_layers import plain_linear
from ostinato.runner.native.packed import PackedWeight


class PackedLinear(StoringModule):
    """A linear layer whose weight is some rows of a packed one.

    Attributes:
        packed: The weight, which layers with the same input may share.
        first_row: The first of its rows.
        in_features: As in ``nn.Linear``.
        out_features: As in ``nn.Linear``.
        bias: As in ``nn.Linear``.
        tied: The embedding that the weight is tied to; None if it is not tied.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        linear: nn.Linear,
        packed: PackedWeight,
        first_row: int = 0,
        tied: nn.Parameter | BlockEmbedding | None = None,
    ) -> None:
        """Replace a linear layer whose weight was packed."""
        super().__init__()
        self.packed = packed
        self.first_row = first_row
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self.tied = (tied,)  # in a tuple, so that it is no parameter of this module
        self.eval()

    @property
    def weight(self) -> Tensor:
        """The weight as in ``nn.Linear``; an unpacked copy, unless it is tied."""
        (tied,) = self.tied
        if isinstance(tied, BlockEmbedding):
            return tied.weight
        if tied is not None:
            return tied
        return self.packed.plain(self.first_row, self.first_row + self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply like ``nn.Linear``; if the weight is shared, all its rows are multiplied."""
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
        return plain_linear(self.weight, self.bias)

    def load(self, weight: Tensor) -> None:
        """Replace the weight by one of the same shape and dtype."""
        (tied,) = self.tied
        if isinstance(tied, BlockEmbedding):
            tied.load(weight)
        elif tied is not None:
            tied.copy_(weight)
        self.packed.replace(self.first_row, weight)

    def sync(self) -> None:
        """Pack the embedding again, if the weight is tied to it."""
        (tied,) = self.tied
        if isinstance(tied, BlockEmbedding):
            if tied.is_replaced:
                self.packed.replace(self.first_row, tied.weight)
        elif tied is not None:
            self.packed.replace(self.first_row, tied)

    def extra_repr(self) -> str:
        """Describe it like ``nn.Linear``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the weight; a tied one is loaded with the embedding."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if prefix + "weight" not in state_dict:
            self.sync()

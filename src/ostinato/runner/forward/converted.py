"""Multiply 16-bit weights in float32 on processors that cannot multiply them as they are.

oneDNN packs float16 only on processors with AVX512-FP16 or AVX-NE-CONVERT, and bfloat16 only on
those and on processors with AVX-512. Elsewhere torch multiplies a few rows well, and many rows four
times slower than in float32. So weights keep their 16 bits; for many rows a piece at a time is
converted, small enough to stay in the processor's cache until it is multiplied.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ostinato.runner.forward.packing import is_plain

_MOST_ROWS_AS_THEY_ARE = 4
"""Rows up to which torch's own product is faster."""

_PIECE_BYTES = 2 << 20
"""Size of a converted piece; between half and twice as much makes no difference."""


class ConvertedLinear(nn.Linear):
    """A linear layer that multiplies many rows in float32; shares its parameters with another."""

    def __init__(self, linear: nn.Linear) -> None:
        """Stand for a plain linear layer."""
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply, like ``nn.Linear``."""
        rows = input.reshape(-1, self.in_features)
        if len(rows) <= _MOST_ROWS_AS_THEY_ARE:
            return functional.linear(input, self.weight, self.bias)
        outputs = rows.new_empty(len(rows), self.out_features)
        wide_rows = rows.float()
        num_outputs = max(1, _PIECE_BYTES // (4 * self.in_features))
        for first in range(0, self.out_features, num_outputs):
            piece = slice(first, first + num_outputs)
            bias = None if self.bias is None else self.bias[piece].float()
            outputs[:, piece] = functional.linear(wide_rows, self.weight[piece].float(), bias)
        return outputs.reshape(*input.shape[:-1], self.out_features)


def can_convert(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether weights of that kind would be converted, if they cannot be packed."""
    return dtype in (torch.float16, torch.bfloat16) and device.type == "cpu"


def convert_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Replace every plain linear layer; returns parents, names and what was there."""
    found = list(_plain_linears(model))
    for parent, name, linear in found:
        setattr(parent, name, ConvertedLinear(linear))
    return found


def _plain_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and is_plain(child):
                yield parent, name, child

"""How does a weight lie so that products with it are fast?

oneDNN reads a weight in tiles of its own; a plain one is brought into them again in each product.
A ``PackedWeight`` is in tiles from the start, and the plain one is gone: the memory is the same.
Several linear layers that read one input may lie in one weight, row below row::

    q_proj ┐  rows 0 .. 2047          q, k and v are one product
    k_proj ├─ rows 2048 .. 3071
    v_proj ┘  rows 3072 .. 4095

A ``PackedLinear`` stands for one of them in the model's tree, so that ``state_dict`` and
``load_state_dict`` go on as before: reading unpacks a copy, loading packs anew.

With AMX the native library multiplies. Without, oneDNN compiles a kernel for each number of rows
that it meets, 0.4 to 10 ms on this project's machine; so rows are padded to 16 sizes per octave, at
most a sixteenth more than are there.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ostinato.runner.forward.few_rows import for_tiles
from ostinato.runner.huge_pages import expect_block, into_huge_pages

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What oneDNN packs; float64, in which exactness is shown, stays plain."""

_SIZES_PER_OCTAVE = 16


def padded(num_rows: int) -> int:
    """Return the next number of rows that kernels are compiled for."""
    step = max(1, 1 << max(0, (num_rows - 1).bit_length() - _SIZES_PER_OCTAVE.bit_length()))
    return -(-num_rows // step) * step


class PackedWeight:
    """A weight of shape (num_rows, num_columns) in oneDNN's tiles.

    Attributes:
        num_rows: Outputs.
        num_columns: Inputs.
        dtype: Format.
        few: Who multiplies a few rows with it, or many as well; None leaves all to oneDNN.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Pack weights that read one input, the rows of each below those of the one before.

        Raises:
            RuntimeError: oneDNN does not take them.
        """
        plain = (torch.cat(list(parts)) if len(parts) > 1 else parts[0]).detach().contiguous()
        self.num_rows, self.num_columns = plain.shape
        self.dtype = plain.dtype
        expect_block(plain.nbytes)
        self._tiles = _in_tiles(plain)
        memory = torch.ops.mkldnn
        into_huge_pages(memory.data_ptr(self._tiles), memory._nbytes(self._tiles))
        self.few = for_tiles(self._tiles, plain)

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``rows @ weight.T + bias``, a fresh tensor; between rows there may be gaps.

        Args:
            rows: Shape (num_tokens, num_columns).
            bias: Shape (num_rows,).

        Returns:
            Shape (num_tokens, num_rows).
        """
        num_tokens = rows.shape[0]
        if num_tokens == 0:
            return rows.new_empty(0, self.num_rows)
        if self.few is not None and self.few.takes(num_tokens):
            return self.few.multiply(rows, bias)
        missing = padded(num_tokens) - num_tokens
        if missing:
            rows = functional.pad(rows, (0, 0, 0, missing))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._tiles, bias, "none", [], ""
        )
        return product[:num_tokens]

    def padded(self, num_rows: int) -> int:
        """Return how many rows to multiply in place of so many: more where a kernel is compiled."""
        takes = self.few is not None and self.few.takes(num_rows)
        return num_rows if takes else padded(num_rows)

    def plain(self) -> Tensor:
        """Return a fresh copy as ``nn.Linear`` holds it."""
        plain: Tensor = self._tiles.to_dense()
        return plain

    def replace(self, first: int, rows: Tensor) -> None:
        """Put other numbers into some rows, from ``first`` on.

        Effects: overwrites the tiles where they lie, since programs point to them.
        Cost: unpacks and packs all of it.
        """
        plain = self.plain()
        plain[first : first + rows.shape[0]].copy_(rows)
        fresh = _in_tiles(plain)
        memory = torch.ops.mkldnn
        assert memory._nbytes(fresh) == memory._nbytes(self._tiles), "one shape has one order"
        ctypes.memmove(memory.data_ptr(self._tiles), memory.data_ptr(fresh), memory._nbytes(fresh))


def _in_tiles(plain: Tensor) -> Tensor:
    """Return a weight in oneDNN's order, shape (num_rows, num_columns), contiguous."""
    # Without a number of rows, oneDNN picks tiles that do for one row and for thousands.
    tiles: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    return tiles


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
        return self.packed.plain()[self.first_row : self.first_row + self.out_features]

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

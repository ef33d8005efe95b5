"""An embedding whose rows stay in the blocks of a GGUF file; looked-up rows are dequantized."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class StoredWeight(Protocol):
    """A weight that is no parameter."""

    @property
    def weight(self) -> Tensor:
        """The weight as a plain module has it; a copy, unless it is another's."""

    def load(self, weight: Tensor) -> None:
        """Replace the weight by one of the same shape."""


class StoringModule(nn.Module):
    """A module of which some weights are saved and loaded as if they were parameters."""

    @property
    def stored(self) -> Mapping[str, StoredWeight]:
        """These weights by name; by default there is one, which is the module itself."""
        return {"weight": cast(StoredWeight, self)}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Add the weights before the parameters, as plain modules do."""
        for name, stored in self.stored.items():
            weight = stored.weight
            destination[prefix + name] = weight if keep_vars else weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the weights, then the parameters."""
        own, missing = {prefix + name: each for name, each in self.stored.items()}, arguments[2]
        for name, stored in own.items():
            if name in state_dict:
                with torch.no_grad():
                    stored.load(state_dict[name])
            else:
                missing.append(name)
        others = {name: tensor for name, tensor in state_dict.items() if name not in own}
        super()._load_from_state_dict(others, prefix, *arguments)


class BlockEmbedding(StoringModule):
    """An embedding of quantized rows.

    Attributes:
        num_embeddings: As in ``nn.Embedding``.
        embedding_dim: As in ``nn.Embedding``.
        kind: Format of the blocks, such as ``Q4_K``.
        dtype: Dtype of the rows that are looked up.
        is_replaced: Whether other numbers were loaded; they are kept plain.
    """

    def __init__(self, blocks: NDArray[np.uint8], kind: str, dtype: torch.dtype) -> None:
        """Take blocks of shape (num_embeddings, bytes of a row)."""
        super().__init__()
        num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        self.num_embeddings = len(blocks)
        self.embedding_dim = blocks.shape[1] // num_bytes * num_numbers
        self.kind, self.dtype = kind, dtype
        self._blocks = blocks
        self._table: Tensor | None = None
        self.eval()

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The blocks, shape (num_embeddings, bytes of a row)."""
        return self._blocks

    @blocks.setter
    def blocks(self, blocks: NDArray[np.uint8]) -> None:
        """Keep the same blocks in other memory."""
        assert blocks.shape == self._blocks.shape and blocks.dtype == np.uint8, blocks.shape
        self._blocks = blocks

    @property
    def is_replaced(self) -> bool:
        """Whether other numbers were loaded."""
        return self._table is not None

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._blocks.nbytes if self._table is None else self._table.nbytes

    @property
    def weight(self) -> Tensor:
        """All rows as in ``nn.Embedding``; a dequantized copy."""
        return self.rows(torch.arange(self.num_embeddings))

    def rows(self, ids: Tensor) -> Tensor:
        """Return some rows, shape (num_ids, embedding_dim); ``ids`` are within the table."""
        if self._table is not None:
            return self._table.index_select(0, ids)
        numbers = gguf.dequantize(self._blocks[ids.numpy()], gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(numbers).to(self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, shape (..., embedding_dim).

        Raises:
            IndexError: An id is not in the table.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"rows {ids.min()} to {ids.max()} of {self.num_embeddings}")
        return self.rows(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)

    def load(self, weight: Tensor) -> None:
        """Replace all rows by others, which are kept as they are."""
        self._table = weight.detach().to(self.dtype).clone()
        self._blocks = self._blocks[:0]

    def extra_repr(self) -> str:
        """Describe it like ``nn.Embedding``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, blocks of {self.kind}"

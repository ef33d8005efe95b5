"""The weights of a GGUF file, read one by one under the names of the model.

Names come from ``transformers``, which reads no weights. Files differ from its models in three
ways: llama.cpp's RoPE pairs neighbours, so that rows of queries and keys are in another order; some
norms have one added; and the RoPE of Llama 3.1 and later is scaled by a tensor of factors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.checkpoints.gguf_file import architecture_of
from ostinato.runner.experts.mixture import expert_weights
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.codes import Codes, LaterCodes, encode
from ostinato.runner.forward.gguf_codes import NEAREST, PLAIN_KINDS, BlockRows, dequantized
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization, QuantizedWeight
from ostinato.runner.loading.weight_source import FileRange, equal_ranges

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WITH_TURNED_HEADS = "llama"
_WITH_ADDED_ONE = frozenset({"gemma2", "gemma3", "nemotron"})
_WITH_EXPERTS = frozenset({"qwen3moe"})
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """Weights in a GGUF file and its further parts."""

    def __init__(
        self, tensors: Mapping[str, Any], model: "PreTrainedModel", architecture: str
    ) -> None:
        """Name tensors as a model does, which may be without storage."""
        self.on_read: Callable[[int], object] = lambda _: None
        self._architecture = architecture
        config = model.config.get_text_config()
        self._heads = {
            "attn_q": config.num_attention_heads,
            "attn_k": config.num_key_value_heads or config.num_attention_heads,
        }
        factors = tensors.get(_ROPE_FACTORS)
        self.rope_factors = None if factors is None else torch.tensor(np.array(factors.data))
        names = _model_names(model, architecture)
        named = (
            (names.get(name) or names.get(name.removesuffix(".weight")), each)
            for name, each in tensors.items()
        )
        self._stacks = dict(expert_weights(model))
        self._experts = _experts_of(tensors, self._stacks, architecture, config.num_hidden_layers)
        self._tensors = {
            name: each for name, each in named if name is not None and name not in self._experts
        }

    @classmethod
    def of_file(cls, path: Path, model: "PreTrainedModel") -> "GgufSource | None":
        """Return the weights of a file opened by ``open_gguf``; None if they need other changes."""
        reader = gguf.GGUFReader(str(path))
        from transformers import modeling_gguf_pytorch_utils

        architecture = architecture_of(reader)
        is_simple = architecture in {_WITH_TURNED_HEADS, *_WITH_ADDED_ONE, *_WITH_EXPERTS}
        if architecture in modeling_gguf_pytorch_utils.TENSOR_PROCESSORS and not is_simple:
            return None
        return cls({tensor.name: tensor for tensor in reader.tensors}, model, architecture)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        for name, parts in self._experts.items():
            num_experts, _, *width = _shape(parts[0])
            own = [sum(_shape(part)[1] for part in parts), *width]
            is_transposed = self._stack(name).is_transposed
            shapes[name] = (num_experts, *(reversed(own) if is_transposed else own))
        return shapes

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        experts = [part for parts in self._experts.values() for part in parts]
        return sum(tensor.data.nbytes for tensor in (*self._tensors.values(), *experts))

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Formats of the quantized matrices by name."""
        kinds = {
            name: tensor.tensor_type.name
            for name, tensor in self._tensors.items()
            if len(tensor.shape) == 2
        }
        for name, parts in self._experts.items():
            formats = {part.tensor_type.name for part in parts}
            kinds[name] = min(formats) if len(formats) == 1 else "F32"
        return {name: kind for name, kind in kinds.items() if kind not in PLAIN_KINDS}

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows; of experts, as many whole ones."""
        if name in self._experts:
            return self._plain_experts(name, dtype, num_rows)
        tensor = self._tensors[name]
        numbers = dequantized(self._rows(tensor, num_rows), tensor.tensor_type, torch.float32)
        if len(tensor.shape) == 1:
            numbers = numbers[0, :num_rows]
        if self._architecture in _WITH_ADDED_ONE and tensor.name.endswith("norm.weight"):
            numbers = numbers - 1
        return numbers.to(dtype)

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        if any(name in self._experts for name in names):
            return False
        tensors = [self._tensors[name] for name in names]
        kinds = {(tensor.tensor_type, _shape(tensor)) for tensor in tensors}
        return len(kinds) == 1 and equal_ranges([_range(tensor) for tensor in tensors])

    def codes(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> BlockRows:
        """Return a weight of ``kinds``, or its first rows; they are read when they are packed."""
        tensor = self._tensors[name]
        order = self._order(tensor)
        return BlockRows(
            tensor.tensor_type.name,
            len(tensor.data) if num_rows is None else num_rows,
            _shape(tensor)[1],
            partial(self._blocks, tensor),
            None if order is None else torch.from_numpy(order),
        )

    def experts(self, name: str) -> list[BlockRows]:
        """Return a weight of experts of ``kinds``: the parts of each, one after the other."""
        parts = self._experts[name]
        num_experts = _shape(parts[0])[0]
        return [
            BlockRows(
                part.tensor_type.name,
                _shape(part)[1],
                _shape(part)[2],
                partial(self._expert_blocks, part, expert),
            )
            for expert in range(num_experts)
            for part in parts
        ]

    def _expert_blocks(self, tensor: Any, expert: int, first: int, last: int) -> Any:
        """Read rows of an expert as bytes."""
        row_bytes = _row_bytes(tensor)
        begin = (expert * _shape(tensor)[1] + first) * row_bytes
        rows = _range(tensor).read(begin, (last - first) * row_bytes)
        self.on_read(rows.nbytes)
        return rows.reshape(-1, row_bytes)

    def _plain_experts(self, name: str, dtype: torch.dtype, num_experts: int | None) -> Tensor:
        shape, stack = self.shapes[name], self._stack(name)
        numbers = torch.empty((num_experts or shape[0], *shape[1:]), dtype=dtype)
        for expert in range(len(numbers)):
            parts = [
                dequantized(
                    self._expert_blocks(part, expert, 0, _shape(part)[1]), part.tensor_type, dtype
                )
                for part in self._experts[name]
            ]
            rows = torch.stack(parts, 1).flatten(0, 1) if stack.is_interleaved else torch.cat(parts)
            numbers[expert] = (rows.T if stack.is_transposed else rows).view(shape[1:])
        return numbers

    def _stack(self, name: str) -> ExpertStack:
        """Return how experts of a weight, or of a bias, are laid out in the model."""
        return self._stacks[name.removesuffix("_bias")]

    def embedding(self, name: str, dtype: torch.dtype) -> BlockEmbedding | None:
        """Return an embedding of the file's blocks; None if they are plain numbers."""
        if name not in self.kinds:
            return None
        tensor = self._tensors[name]
        return BlockEmbedding(self._rows(tensor, None), tensor.tensor_type.name, dtype)

    def _blocks(self, tensor: Any, first: int, last: int) -> Any:
        """Read rows as bytes, in the order of the file; a vector is one row."""
        data = tensor.data
        row_bytes = data.nbytes // (len(data) if data.ndim > 1 else 1)
        rows = _range(tensor).read(first * row_bytes, (last - first) * row_bytes)
        self.on_read(rows.nbytes)
        return rows.reshape(-1, row_bytes)

    def _rows(self, tensor: Any, num_rows: int | None) -> Any:
        """Read rows as bytes, in the order of the model; a vector is one row."""
        count = len(tensor.data) if tensor.data.ndim > 1 else 1
        order = self._order(tensor)
        last = count if num_rows is None or order is not None else min(num_rows, count)
        rows = self._blocks(tensor, 0, last)
        if order is not None and count == 1:
            rows = rows.reshape(len(order), -1)[order].reshape(1, -1)
        elif order is not None:
            rows = rows[order]
        return rows if num_rows is None else rows[:num_rows]

    def _order(self, tensor: Any) -> Any:
        """Return the order of a tensor's rows in the model; None if it is the file's."""
        if self._architecture != _WITH_TURNED_HEADS:
            return None
        heads = next(
            (self._heads[part] for part in self._heads if f".{part}." in tensor.name), None
        )
        if heads is None:
            return None
        return np.arange(_shape(tensor)[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _model_names(model: "PreTrainedModel", architecture: str) -> dict[str, str]:
    """Return the names of a model's weights by their names in a file."""
    from transformers import modeling_gguf_pytorch_utils

    processor = modeling_gguf_pytorch_utils.TENSOR_PROCESSORS.get(
        architecture, modeling_gguf_pytorch_utils.TensorProcessor
    )
    names: dict[str, str] = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map(
        model, processor(config={})
    )
    return names


def _experts_of(
    tensors: Mapping[str, Any], stacks: Iterable[str], architecture: str, num_layers: int
) -> dict[str, list[Any]]:
    """Return the tensors of all experts of a layer by the name of the model's weight or bias."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    experts: dict[str, list[Any]] = {}
    if architecture not in known:
        return experts
    names = gguf.get_tensor_name_map(known[architecture], num_layers)
    for stack in stacks:
        path, _, own = stack.rpartition(".")
        stems = [names.get_name(f"{path}.{part}") for part in _EXPERT_PARTS[own]]
        for name, suffix in ((stack, "weight"), (f"{stack}_bias", "bias")):
            parts = [tensors.get(f"{stem}.{suffix}") for stem in stems]
            if all(part is not None for part in parts):
                experts[name] = parts
    return experts


def _row_bytes(tensor: Any) -> int:
    """Return the bytes of a row of experts."""
    num_experts, num_rows, *_ = _shape(tensor)
    return int(tensor.data.nbytes) // (num_experts * num_rows)


def _range(tensor: Any) -> FileRange:
    return FileRange(tensor.path, tensor.data_offset, tensor.data.nbytes)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))


def codes_of_file(path: Path, model: "PreTrainedModel") -> Quantization | None:
    """Return how to pack the linear layers of a model that ``transformers`` has read from a file.

    The file's codes are used if they give exactly the numbers that were read; else the nearest
    codes of 8 bits are.

    Args:
        path: The file, opened by ``open_gguf``.
        model: Its model.
    """
    reader = gguf.GGUFReader(str(path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = {
        model_name: name
        for name, model_name in _model_names(model, architecture_of(reader)).items()
    }
    config = model.config.get_text_config()
    heads = {config.num_attention_heads, config.num_key_value_heads}
    stored: dict[int, LaterCodes] = {}
    kinds: set[str] = set()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        tied = "token_embd.weight" if module is head else ""
        tensor = tensors.get(names.get(f"{name}.weight", ""), tensors.get(tied))
        if not is_plain_linear(module) or tensor is None or tensor.tensor_type.name in PLAIN_KINDS:
            continue
        kinds.add(tensor.tensor_type.name)
        codes = equal_codes(tensor, module.weight, heads)
        codes = encode(module.weight, NEAREST) if codes is None else codes
        stored[id(module.weight)] = LaterCodes.of(codes)
    return Quantization(f"GGUF {', '.join(sorted(kinds))}", stored) if stored else None


def equal_codes(tensor: Any, weight: Tensor, heads: Iterable[int]) -> Codes | None:
    """Return the codes of a tensor if they give a weight exactly, in any order of its rows."""
    data, kind = np.asarray(tensor.data), tensor.tensor_type
    if data.ndim != 2 or _shape(tensor) != tuple(weight.shape):
        return None
    rows = BlockRows(
        kind.name, len(weight), weight.shape[1], lambda first, last: data[first:last].copy()
    )
    codes = QuantizedWeight.of_rows([rows], weight.dtype).codes()
    for order in (torch.arange(len(data)), *_orders(len(data), heads)):
        minima = None if codes.minima is None else codes.minima[order]
        turned = Codes(codes.format, codes.codes[order], codes.scales[order], minima)
        if torch.equal(turned.plain(weight.dtype), weight):
            return turned
    return None


def _orders(num_rows: int, heads: Iterable[int]) -> Iterator[Tensor]:
    """Yield possible orders of the rows of queries and keys."""
    for count in heads:
        if num_rows % (2 * count) == 0:
            yield torch.arange(num_rows).view(count, -1, 2).transpose(1, 2).reshape(-1)

"""The weights of a GGUF file, read one by one under the names of the model.

Names come from ``transformers``, which reads no weights. Files differ from its models in three
ways: llama.cpp's RoPE pairs neighbours, so that rows of queries and keys are in another order; some
norms have one added; and the RoPE of Llama 3.1 and later is scaled by a tensor of factors.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.checkpoints.gguf_file import architecture_of
from ostinato.runner.experts.mixture import expert_weights
from ostinato.runner.forward.codes import Codes, LaterCodes, encode
from ostinato.runner.forward.gguf_codes import NEAREST, PLAIN_KINDS, BlockRows, dequantized
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization, QuantizedWeight
from ostinato.runner.loading.merged_experts import MergedExperts
from ostinato.runner.loading.weight_source import CheckpointWeight, FileRange, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WITH_TURNED_HEADS = "llama"
_WITH_ADDED_ONE = frozenset({"gemma2", "gemma3", "nemotron"})
_WITH_EXPERTS = frozenset({"qwen3moe"})
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufWeight(CheckpointWeight):
    """A tensor of a file, whose last dimension is a row; a vector is one."""

    def __init__(
        self,
        where: FileRange,
        type_: gguf.GGMLQuantizationType,
        shape: tuple[int, ...],
        order: Tensor | None = None,
        offset: float = 0.0,
    ) -> None:
        """Read nothing.

        Args:
            where: Its bytes.
            type_: Their format.
            shape: As the model has it.
            order: The place of each output in the file; None if they are in order.
            offset: Added to all numbers.
        """
        super().__init__(shape, (where,))
        self.format = self._type = type_
        self._order, self._offset = order, offset
        self._num_rows = math.prod(self.shape[:-1])
        self._row_bytes = where.num_bytes // self._num_rows
        if len(self.shape) == 2 and self._type.name not in PLAIN_KINDS:
            self.kind = self._type.name

    def blocks(self, first: int, last: int) -> Any:
        """Read rows as bytes, in the order of the file."""
        size = self._row_bytes
        return self.ranges[0].read(first * size, (last - first) * size).reshape(-1, size)

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or its first rows."""
        numbers = dequantized(self._rows(num_rows), self._type, torch.float32)
        if len(self.shape) == 1:
            numbers = numbers[0, :num_rows]
        return (numbers + self._offset if self._offset else numbers).to(dtype)

    def codes(self, num_rows: int | None = None) -> list[BlockRows]:
        """Return the weight, or its first rows, to be read when it is packed."""
        count = self._num_rows if num_rows is None else num_rows
        return [BlockRows(self.kind, count, self.shape[1], self.blocks, self._order)]

    def embedding(self, dtype: torch.dtype) -> BlockEmbedding | None:
        """Return an embedding of the file's blocks; None if they are plain numbers."""
        return BlockEmbedding(self._rows(None), self._type.name, dtype) if self.kind else None

    def _rows(self, num_rows: int | None) -> Any:
        """Read rows as bytes, in the order of the model."""
        count, order = self._num_rows, self._order
        last = count if num_rows is None or order is not None else min(num_rows, count)
        rows = self.blocks(0, last)
        if order is not None and count == 1:
            rows = rows.reshape(len(order), -1)[order.numpy()].reshape(1, -1)
        elif order is not None:
            rows = rows[order.numpy()]
        return rows if num_rows is None else rows[:num_rows]


def gguf_source(path: Path, model: "PreTrainedModel") -> WeightSource | None:
    """Return the weights of a file under the names of a model, which may be without storage.

    None if the model needs other changes of them. The file was opened by ``open_gguf``.
    """
    reader = gguf.GGUFReader(str(path))
    from transformers import modeling_gguf_pytorch_utils

    architecture = architecture_of(reader)
    is_simple = architecture in {_WITH_TURNED_HEADS, *_WITH_ADDED_ONE, *_WITH_EXPERTS}
    if architecture in modeling_gguf_pytorch_utils.TENSOR_PROCESSORS and not is_simple:
        return None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config, stacks = model.config.get_text_config(), dict(expert_weights(model))
    weights: dict[str, CheckpointWeight] = {}
    for own, tensor in _named_tensors(reader, model).items():
        has_one = architecture in _WITH_ADDED_ONE and tensor.name.endswith("norm.weight")
        order = _order_of_heads(tensor, config) if architecture == _WITH_TURNED_HEADS else None
        own_type, offset = tensor.tensor_type, -1.0 if has_one else 0.0
        weights[own] = GgufWeight(_range(tensor), own_type, _shape(tensor), order, offset)
    experts = _experts_of(tensors, stacks, architecture, config.num_hidden_layers)
    for own, parts in experts.items():
        by_expert = list(zip(*map(_experts_in, parts), strict=True))
        stack = stacks[own.removesuffix("_bias")]
        weights[own] = MergedExperts(by_expert, stack.is_transposed, stack.is_interleaved)
    factors = tensors.get(_ROPE_FACTORS)
    return WeightSource(weights, None if factors is None else torch.tensor(np.array(factors.data)))


def _experts_in(tensor: Any) -> list[GgufWeight]:
    """Return the weight, or the bias, of each expert in a tensor."""
    num_experts, *shape = _shape(tensor)
    ranges = _range(tensor).split(num_experts)
    return [GgufWeight(where, tensor.tensor_type, tuple(shape)) for where in ranges]


def _range(tensor: Any) -> FileRange:
    return FileRange(tensor.path, tensor.data_offset, int(tensor.data.nbytes))


def _order_of_heads(tensor: Any, config: Any) -> Tensor | None:
    """Return the order of the rows of queries or keys in the model; None for other tensors."""
    num_heads = config.num_attention_heads
    heads = {"attn_q": num_heads, "attn_k": config.num_key_value_heads or num_heads}
    count = next((heads[part] for part in heads if f".{part}." in tensor.name), None)
    return None if count is None else _turned(_shape(tensor)[0], count)


def _turned(num_rows: int, num_heads: int) -> Tensor:
    """Return the order in which rows of heads are in halves, where they are in pairs."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _named_tensors(reader: Any, model: "PreTrainedModel") -> dict[str, Any]:
    """Return the tensors of a file by the names of a model's weights."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    processors, default = gguf_utils.TENSOR_PROCESSORS, gguf_utils.TensorProcessor
    processor = processors.get(architecture_of(reader), default)(config={})
    names: dict[str, str] = gguf_utils.get_gguf_hf_weights_map(model, processor)
    return {
        own: tensor
        for tensor in reader.tensors
        if (own := names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight")))
    }


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
    tensors = _named_tensors(reader, model)
    tied = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    config = model.config.get_text_config()
    heads = {config.num_attention_heads, config.num_key_value_heads}
    stored: dict[int, list[LaterCodes]] = {}
    kinds: set[str] = set()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        tensor = tensors.get(f"{name}.weight", tied if module is head else None)
        if not is_plain_linear(module) or tensor is None or tensor.tensor_type.name in PLAIN_KINDS:
            continue
        kinds.add(tensor.tensor_type.name)
        codes = equal_codes(tensor, module.weight, heads)
        codes = encode(module.weight, NEAREST) if codes is None else codes
        stored[id(module.weight)] = [LaterCodes.of(codes)]
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
            yield _turned(num_rows, count)

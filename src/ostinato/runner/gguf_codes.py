"""The codes of a GGUF file for a model's linear layers.

A block of a GGUF file has codes of some bits with a scale, and often a minimum, for 32 inputs. So
most formats become codes of ours without any loss::

    Q4_0, Q4_1, Q4_K                4 bits; with minima but for Q4_0
    Q5_0, Q5_1, Q5_K, Q8_0          8 bits; with minima where the file has them
    Q2_K, Q3_K, Q6_K and others     8 bits in groups of 32 inputs, the nearest: their groups have
                                    16 inputs, or their codes are entries of a table

``transformers`` has read the weights and named them; each is found by its name, and its codes are
used only if they give exactly the numbers that were loaded.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.runner.forward.codes import CodeFormat, Codes, codes_of, encode
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PLAIN = {"F32", "F16", "BF16", "F64"}
_GROUP = 32
_NEAREST = CodeFormat(bits=8, group_size=_GROUP)

Blocks = NDArray[np.uint8]
"""Shape (num_blocks, bytes of a block)."""
Numbers = NDArray[Any]
"""Of groups, shape (num_blocks, groups of a block), float16 or float32."""


def codes_of_file(path: Path, model: "PreTrainedModel") -> Quantization | None:
    """Return how to pack a model's linear layers with the codes of its file; None without any.

    Args:
        path: The file, opened by ``open_gguf``.
        model: Its model, loaded by ``transformers``.
    """
    reader = gguf.GGUFReader(str(path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = model.config.get_text_config()
    heads = {config.num_attention_heads, config.num_key_value_heads}
    stored: dict[int, Codes] = {}
    kinds: set[str] = set()
    field = reader.get_field("general.architecture")
    assert field is not None, "transformers has read it"
    for weight, name in _weights(model, field.contents()):
        tensor = tensors.get(f"{name}.weight", tensors.get("token_embd.weight"))
        if tensor is None or tensor.tensor_type.name in _PLAIN:
            continue
        kinds.add(tensor.tensor_type.name)
        exact = exact_codes(tensor, weight, heads)
        stored[id(weight)] = encode(weight, _NEAREST) if exact is None else exact
    return Quantization(f"GGUF {', '.join(sorted(kinds))}", stored) if stored else None


def _weights(model: "PreTrainedModel", architecture: str) -> Iterator[tuple[Tensor, str]]:
    """Yield the weights of linear layers and their names in a file."""
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = model.config.get_text_config().num_hidden_layers
    names: Any = gguf.get_tensor_name_map(architectures[architecture], layers)
    for name, module in model.named_modules():
        if is_plain_linear(module) and (found := names.get_name(name)) is not None:
            yield module.weight, found


def exact_codes(tensor: Any, weight: Tensor, heads: Iterable[int]) -> Codes | None:
    """Return the codes of a tensor if they give a weight exactly, in any order of its rows."""
    kind, data = tensor.tensor_type, np.asarray(tensor.data)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    scaled = _scales(kind.name, data.reshape(-1, block_bytes)) if data.ndim == 2 else None
    if scaled is None or tuple(reversed(tensor.shape.tolist())) != tuple(weight.shape):
        return None
    scales, minima = (None if part is None else _by_rows(part, len(data)) for part in scaled)
    assert scales is not None
    format = CodeFormat(4 if kind.name.startswith("Q4") else 8, _GROUP, minima is not None)
    numbers = torch.from_numpy(gguf.dequantize(data, kind))
    exact = codes_of(numbers, format, scales, minima)
    for order in (torch.arange(len(data)), *_orders(len(data), heads)):
        part = None if minima is None else minima[order]
        found = Codes(format, exact[order], scales[order], part)
        if torch.equal(found.plain(weight.dtype), weight):
            return found
    return None


def _scales(kind: str, blocks: Blocks) -> tuple[Numbers, Numbers | None] | None:
    """Return scales and minima of blocks; None if they are not for 32 inputs."""
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        return blocks[:, :2].copy().view(np.float16), None
    if kind in ("Q4_1", "Q5_1"):
        both = blocks[:, :4].copy().view(np.float16)
        return both[:, :1], both[:, 1:]
    if kind in ("Q4_K", "Q5_K"):
        both = blocks[:, :4].copy().view(np.float16).astype(np.float32)
        of_groups = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].copy())
        scales, minima = (part.astype(np.float32) for part in of_groups)
        return both[:, :1] * scales, -(both[:, 1:] * minima)
    return None


def _by_rows(of_blocks: Numbers, num_rows: int) -> Tensor:
    return torch.from_numpy(of_blocks.reshape(num_rows, -1))


def _orders(num_rows: int, heads: Iterable[int]) -> Iterator[Tensor]:
    """Yield possible orders of the rows of queries and keys: llama.cpp's RoPE pairs neighbours."""
    for count in heads:
        if num_rows % (2 * count) == 0:
            yield torch.arange(num_rows).view(count, -1, 2).transpose(1, 2).reshape(-1)

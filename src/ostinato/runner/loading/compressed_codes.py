"""The codes of a compressed-tensors checkpoint for a model's linear layers.

Supported are weights in 8 or 4 bits without zero points, per output or in groups of a multiple of
32 inputs, with plain activations (W8A16, W4A16) or activations in 8 bits with a dynamic scale per
token (W8A8, W4A8). The layers become plain ones with the weights that compressed-tensors
decompresses, and are then packed with the same codes. If any layer is of another kind (activations
with static scales, groups in another order), none is replaced, and compressed-tensors computes
them.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ostinato.runner.forward.codes import BY_TOKEN, PLAIN, CodeFormat, Codes, codes_of
from ostinato.runner.forward.plain_layers import plain_linear
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.settings import GROUP_STEP

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def codes_of_layers(model: "PreTrainedModel") -> Quantization | None:
    """Return how to pack linear layers with their own codes; None if they have none that fit.

    Effects: replaces the layers by plain ones, and removes the model's decompression hook.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    compressor = getattr(quantizer, "compressor", None)
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "quantization_scheme")
    ]
    if compressor is None or not layers or not all(_fits(layer) for _, _, layer in layers):
        return None
    activations = {bits for _, _, layer in layers if (bits := _activation_bits(layer)) is not None}
    if len(activations) > 1:
        return None
    [bits] = activations
    plain, stored, kinds = [], {}, set()
    with torch.no_grad():
        for parent, name, layer in layers:
            codes, linear = _decoded(layer)
            if codes is None:
                return None
            plain.append((parent, name, linear))
            stored[id(linear.weight)] = codes
            kinds.add(f"W{codes.format.bits}A{bits or 16}")
    for parent, name, linear in plain:
        setattr(parent, name, linear)
    compressor.remove_decompression_hook(model)
    name = f"compressed-tensors {', '.join(sorted(kinds))}"
    return Quantization(name, stored, BY_TOKEN if bits else PLAIN)


def _fits(layer: nn.Module) -> bool:
    """Return whether our codes can represent a layer's quantization."""
    scheme: Any = layer.quantization_scheme
    weights = scheme.weights
    if type(layer) is not nn.Linear or weights is None:
        return False
    return (
        _activation_bits(layer) is not None
        and scheme.output_activations is None
        and weights.type == "int"
        and weights.num_bits in (4, 8)
        and weights.symmetric
        and weights.actorder in (None, "static", "weight")
        and (
            weights.strategy == "channel"
            or (weights.strategy == "group" and weights.group_size % GROUP_STEP == 0)
        )
    )


def _activation_bits(layer: nn.Module) -> int | None:
    """Return 8 if activations have dynamic scales per token, 0 if they are plain; else None."""
    scheme: Any = layer.quantization_scheme
    rows = scheme.input_activations
    if rows is None:
        return 0
    is_ours = rows.type == "int" and rows.num_bits == 8 and rows.symmetric
    return 8 if is_ours and rows.strategy == "token" and rows.dynamic is True else None


def _decoded(layer: nn.Module) -> tuple[Codes | None, nn.Linear]:
    """Return a layer's codes, None if they are not exact, and a plain layer of its weight."""
    from compressed_tensors.compressors.base import BaseCompressor, get_direct_state_dict

    scheme: Any = layer.quantization_scheme
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    state = compressor.decompress(get_direct_state_dict(layer), scheme)
    weight, scales, args = state["weight"], state["weight_scale"], scheme.weights
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
    linear = plain_linear(weight.contiguous(), bias)
    size = args.group_size or -(-weight.shape[1] // GROUP_STEP) * GROUP_STEP
    format = CodeFormat(args.num_bits, size)
    codes = Codes(format, codes_of(weight, format, scales), scales)
    return codes if torch.equal(codes.plain(weight.dtype), weight) else None, linear

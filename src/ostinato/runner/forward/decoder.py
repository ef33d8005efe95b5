"""Recognizes decoders that the fused forward supports.

They are recognized by structure, not by name: Llama, Mistral, Qwen2, Qwen3, and similar ones::

    embed_tokens ─► n × layer ─► norm ─► lm_head

    layer     input_layernorm ─► q_proj, k_proj, v_proj ─► [q_norm, k_norm] ─► RoPE ─► attention
              ─► o_proj ─► + ─► post_attention_layernorm ─► gate_proj, up_proj ─► silu(gate) * up
              ─► down_proj ─► +

Modules do not reveal the operations between them, such as a scale. So this only selects candidates;
``select_forward`` compares their results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
import transformers
from torch import Tensor, nn

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.forward.embedding_and_rope import Embedding
from ostinato.runner.forward.ops import HeadShape, Norm
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import Pack, pack_plain, stack
from ostinato.runner.forward.plain_layers import is_plain_linear, is_unaltered
from ostinato.runner.native.packed import PackedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NORMS = frozenset({"q_norm", "k_norm"})
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")

PRODUCTS: dict[str, tuple[str, ...]] = {
    "project": tuple(f"self_attn.{name}" for name in _PROJECTIONS),
    "combine": ("self_attn.o_proj",),
    "gate_up": tuple(f"mlp.{name}" for name in _GATE_UP),
    "down": ("mlp.down_proj",),
}
"""A layer's products, in order, and the linear layers that each of them joins."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A product: one packed weight, and the biases of the layers in it.

    Attributes:
        weight: Shape (num_outputs, num_inputs).
        biases: One per layer in it; empty for none.
        widths: Outputs of each layer in it.
    """

    weight: PackedWeight
    biases: tuple[Tensor, ...] = ()
    widths: tuple[int, ...] = ()

    def bias(self) -> Tensor | None:
        """Return the biases as one; concatenated each time, since they may be replaced in place."""
        if len(self.biases) <= 1:
            return self.biases[0] if self.biases else None
        return torch.cat(self.biases)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer.

    Attributes:
        input_norm: Before attention.
        project: Queries, keys and values.
        shape: How they are split into heads.
        style: Parameters of attention.
        combine: The output projection of attention.
        output_norm: Before the feed-forward part.
        gate_up: Gate and up.
        down: The output projection of the feed-forward part.
        name: The module's name in the model.
    """

    input_norm: Norm
    project: Projection
    shape: HeadShape
    style: AttentionStyle
    combine: Projection
    output_norm: Norm
    gate_up: Projection
    down: Projection
    name: str

    def joined(self, product: str) -> list[tuple[str, int]]:
        """Return the linear layers that a product joins, each with its first output."""
        widths: tuple[int, ...] = getattr(self, product).widths
        names = (f"{self.name}.{name}" for name in PRODUCTS[product])
        return list(zip(names, accumulate(widths[:-1], initial=0), strict=True))


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a model.

    Attributes:
        embedding: Ids to the residual stream, the model's own module.
        rotary: Positions to angles, the model's own module.
        layers: First to last.
        norm: After the last layer.
        head: The residual stream to logits.
    """

    embedding: Embedding
    rotary: nn.Module
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Projection

    def norm_after(self, index: int) -> Norm:
        """Return the norm that follows a layer."""
        last = index + 1 == len(self.layers)
        return self.norm if last else self.layers[index + 1].input_norm


def unsupported_reason(model: "PreTrainedModel") -> str | None:
    """Return why a model is not such a decoder; None if it is."""
    inner = _inner(model)
    if inner is None or _children(model) != {model.base_model_prefix, "lm_head"}:
        return "more or less than a decoder and a head"
    if "mrope_section" in (getattr(model.config.get_text_config(), "rope_parameters", None) or ()):
        return "its RoPE has several positions per token"
    if _children(inner) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return f"{type(inner).__name__} has other parts"
    if type(inner.embed_tokens) not in (nn.Embedding, BlockEmbedding) or not is_plain_linear(
        model.lm_head
    ):
        return "another kind of embedding or head"
    altered = (name for name, module in model.named_modules() if not is_unaltered(module))
    if (name := next(altered, None)) is not None:
        return f"{name or type(model).__name__} has hooks or a forward of its own"
    if not _is_norm(inner.norm):
        return f"{type(inner.norm).__name__} is not an RMSNorm"
    return next(
        (reason for layer in cast(nn.ModuleList, inner.layers) if (reason := _unlike_layer(layer))),
        None,
    )


def parse_decoder(
    model: "PreTrainedModel", styles: Sequence[AttentionStyle], pack: Pack = pack_plain
) -> Decoder:
    """Pack a model's weights as the fused forward reads them.

    Args:
        model: One for which ``unsupported_reason`` returns None.
        styles: Each layer's parameters of attention, as the layer passed them.
        pack: Packs weights.

    Effects: replaces its linear layers by packed ones; the model itself keeps working.
    """
    inner = cast(nn.Module, _inner(model))
    head, embedding = cast(nn.Linear, model.lm_head), cast(Embedding, inner.embed_tokens)
    names = {id(module): name for name, module in model.named_modules()}
    layers = tuple(
        _layer(layer, style, pack, names[id(layer)])
        for layer, style in zip(cast(nn.ModuleList, inner.layers), styles, strict=True)
    )
    weight = cast(nn.Parameter, head.weight)
    tied = weight if isinstance(embedding, nn.Embedding) and weight is embedding.weight else None
    packed = pack([head], True)
    model.lm_head = PackedLinear(head, packed, 0, tied)
    return Decoder(
        embedding=embedding,
        rotary=cast(nn.Module, inner.rotary_emb),
        layers=layers,
        norm=_norm(inner.norm),
        head=Projection(packed, () if head.bias is None else (head.bias.detach(),)),
    )


def _inner(model: "PreTrainedModel") -> nn.Module | None:
    """Return the decoder in a model; one for images has it beside their encoder."""
    inner = getattr(model, model.base_model_prefix, None)
    inner = getattr(inner, "language_model", inner)
    return inner if isinstance(inner, nn.Module) else None


def _layer(layer: nn.Module, style: AttentionStyle, pack: Pack, name: str) -> DecoderLayer:
    attention, mlp = cast(nn.Module, layer.self_attn), cast(nn.Module, layer.mlp)
    return DecoderLayer(
        input_norm=_norm(layer.input_layernorm),
        project=_projection(attention, _PROJECTIONS, pack),
        shape=_head_shape(attention),
        style=style,
        combine=_projection(attention, ("o_proj",), pack),
        output_norm=_norm(layer.post_attention_layernorm),
        gate_up=_projection(mlp, _GATE_UP, pack),
        down=_projection(mlp, ("down_proj",), pack),
        name=name,
    )


def _projection(parent: nn.Module, names: tuple[str, ...], pack: Pack) -> Projection:
    packed = stack(parent, names, pack)
    biases = [parent.get_submodule(name).bias for name in names]
    widths = tuple(cast(int, parent.get_submodule(name).out_features) for name in names)
    return Projection(packed, tuple(b.detach() for b in biases if isinstance(b, Tensor)), widths)


def _head_shape(attention: nn.Module) -> HeadShape:
    dim = cast(int, attention.head_dim)
    queries, keys = cast(nn.Linear, attention.q_proj), cast(nn.Linear, attention.k_proj)
    normed = "q_norm" in _children(attention)
    return HeadShape(
        num_heads=queries.out_features // dim,
        num_kv_heads=keys.out_features // dim,
        dim=dim,
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
    )


def _norm(module: object) -> Norm:
    assert isinstance(module, nn.Module)
    weight = cast(nn.Parameter, module.weight)
    return Norm(weight.detach(), float(cast(float, module.variance_epsilon)))


def _unlike_layer(layer: nn.Module) -> str | None:
    """Return how a layer differs from the one above."""
    if _children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return f"{type(layer).__name__} has other parts"
    attention, mlp = cast(nn.Module, layer.self_attn), cast(nn.Module, layer.mlp)
    norms = _children(attention) & _NORMS
    if _children(attention) - norms != {*_PROJECTIONS, "o_proj"} or len(norms) == 1:
        return f"{type(attention).__name__} has other parts"
    if _children(mlp) != {*_GATE_UP, "down_proj", "act_fn"}:
        return f"{type(mlp).__name__} has other parts"
    if type(mlp.act_fn) not in (nn.SiLU, transformers.activations.SiLUActivation):
        return f"its activation is {type(mlp.act_fn).__name__}, not SiLU"
    inner = [attention.get_submodule(name) for name in norms]
    if not all(map(_is_norm, (layer.input_layernorm, layer.post_attention_layernorm, *inner))):
        return "it has norms that are not RMSNorm"
    return _unlike_products(attention, mlp)


def _unlike_products(attention: nn.Module, mlp: nn.Module) -> str | None:
    """Return what is unsupported in a layer's linear parts."""
    linears = [attention.get_submodule(name) for name in (*_PROJECTIONS, "o_proj")]
    linears += [mlp.get_submodule(name) for name in (*_GATE_UP, "down_proj")]
    if not all(map(is_plain_linear, linears)):
        return "it has projections that are not plain linear layers"
    for names in (linears[:3], linears[4:6]):
        if len({getattr(linear, "bias", None) is None for linear in names}) > 1:
            return "of projections that read one input, some have a bias and some have none"
    dim = getattr(attention, "head_dim", None)
    widths = [cast(nn.Linear, linear).out_features for linear in linears[:3]]
    if not isinstance(dim, int) or dim % 2 or any(width % dim for width in widths):
        return f"its heads are not of one even size (head_dim={dim!r})"
    if widths[1] != widths[2] or cast(nn.Linear, linears[3]).in_features != widths[0]:
        return "its keys and values are of different sizes"
    if attention.k_proj.weight is attention.v_proj.weight:  # type: ignore[union-attr]
        return "its keys and values are one"
    return None


def _is_norm(module: object) -> bool:
    """Say whether a module looks like an RMSNorm over one weight."""
    if not isinstance(module, nn.Module) or not type(module).__name__.endswith("RMSNorm"):
        return False
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return names == ["weight"] and isinstance(getattr(module, "variance_epsilon", None), float)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}

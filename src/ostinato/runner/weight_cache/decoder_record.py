"""Keeps what the fused forward computes, so that a second start needs no modules.

A fused decoder consists of plain records, packed weights, vectors, an embedding and angles. All of
them are written down by the names that their weights have in the entry. To import the modules of
``transformers``, and to find out anew what they compute, takes half of a second start.
What this cannot write down, such as modules that are called or RoPE that depends on the length, is
left to the modules, as is everything that asks for ``LoadedModel.model``.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.experts.families import Gating, RouterFamily
from ostinato.runner.experts.mixture import (
    PackedExperts,
    PackedPart,
    empty_weight,
)
from ostinato.runner.experts.routers import PackedRouter, Routing
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    FeedForward,
    Mixture,
    Projection,
    ResidualBranch,
    StateMixer,
)
from ostinato.runner.forward.embedding_and_rope import STATIC_ROPE, AngleKind, AngleLayout, Angles
from ostinato.runner.forward.mixer_records import MixerShape, MixerWeights, RowGating
from ostinato.runner.forward.ops import Activation, HeadShape, Norm, Rope, RopeKind
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.plain_layers import plain_linear
from ostinato.runner.kv.kv_store import KVSpec, LayerKV
from ostinato.runner.native.packed import PackedWeight
from ostinato.runner.states.store import StateShape
from ostinato.runner.weight_cache.entry import EntrySource, Record

_RECORDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Decoder, DecoderLayer, ResidualBranch, Attention, FeedForward, Norm, HeadShape, Rope),
        *(AngleKind, AttentionStyle, Activation, RopeKind, AngleLayout),
        *(Routing, RouterFamily, Gating, KVSpec, LayerKV, StateShape),
        *(StateMixer, MixerShape, MixerWeights, RowGating),
    )
}
_KIND = "="  # no name of a field

_COMPARED_POSITIONS = 2**14
"""Positions at which angles are compared before they are computed without the model's module."""


class Unkept(Exception):
    """A decoder has a part that is not written down."""


class StaticAngles(nn.Module):
    """Computes cosines and sines as the modules of ``transformers`` do whose RoPE is static."""

    def __init__(self, kinds: Mapping[str, tuple[Sequence[float], float]]) -> None:
        """Take frequencies and a factor for each kind of layer; ``""`` is the only kind."""
        super().__init__()
        self.kinds = kinds
        self.rope_type = {kind or None: "default" for kind in kinds}
        self._kinds = {
            kind: (torch.tensor(frequencies, dtype=torch.float32), factor)
            for kind, (frequencies, factor) in kinds.items()
        }

    def forward(
        self, like: Tensor, positions: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, shape (1, num_tokens, dim)."""
        frequencies, factor = self._kinds[layer_type or ""]
        pairs = positions[..., None].float() * frequencies
        angles = torch.cat((pairs, pairs), dim=-1)
        return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)


def decoder_record(decoder: Decoder, model: nn.Module, packed: Mapping[int, str]) -> Record | None:
    """Return a record of a decoder, for ``RecordReader``; None if a part cannot be written down.

    Args:
        decoder: Describes a model.
        model: The model, which names its weights.
        packed: Names of packed weights in the entry, by their ids.
    """
    try:
        return RecordWriter(model, packed).decoder(decoder)
    except Unkept:
        return None


class RecordWriter:
    """Writes records of one model.

    Raises:
        Unkept: By any method: a part cannot be written down.
    """

    def __init__(self, model: nn.Module, packed: Mapping[int, str]) -> None:
        self._packed = packed
        self._names = {part.data_ptr(): name for name, part in model.named_parameters()}
        self._modules = {id(module): name for name, module in model.named_modules()}

    def decoder(self, decoder: Decoder) -> Record:
        """Write a decoder."""
        embedding = decoder.embedding
        is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
        if not is_plain and not isinstance(embedding, BlockEmbedding):
            raise Unkept(type(embedding).__name__)
        if decoder.calls or decoder.edit_logits is not None:
            raise Unkept("modules are called")
        record: Record = self.value(replace(decoder, rotary=self._angles(decoder)))
        return record

    def value(self, value: object) -> Any:
        """Write a value: a plain one, a weight, or a record of these."""
        if isinstance(value, enum.Enum):
            return {_KIND: type(value).__name__, "name": value.name}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (tuple, list)):
            return [self.value(each) for each in value]
        if isinstance(value, Mapping):
            return self._record("mapping", **value)
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "name": _known(self._names, value.data_ptr())}
        if isinstance(value, PackedWeight):
            return {_KIND: "packed", "name": _known(self._packed, id(value))}
        if isinstance(value, torch.dtype):
            return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, (nn.Embedding, BlockEmbedding)):
            return {_KIND: "embedding", "name": f"{self._modules[id(value)]}.weight"}
        if isinstance(value, StaticAngles):
            return self._record("StaticAngles", kinds=value.kinds)
        if isinstance(value, Projection):
            return self._projection(value)
        if isinstance(value, PackedPart):
            own = value.stack
            layout = own.num_parts, own.is_transposed, own.is_interleaved
            shape = tuple(own.weight.shape)
            return self._record("part", weight=value.packed, shape=shape, layout=layout)
        if isinstance(value, Mixture):
            return self._mixture(value)
        if is_dataclass(value) and type(value).__name__ in _RECORDS:
            own_fields = {each.name: getattr(value, each.name) for each in fields(value)}
            return self._record(type(value).__name__, **own_fields)
        raise Unkept(type(value).__name__)

    def _record(self, kind: str, /, **parts: object) -> Record:
        return {_KIND: kind, **{name: self.value(part) for name, part in parts.items()}}

    def _mixture(self, mixture: Mixture) -> Record:
        router, experts = mixture.packed_router, mixture.packed_experts
        weights = dict(router.named_parameters())
        is_cast = any(own.dtype != experts.parts["down_proj"].dtype for own in weights.values())
        if list(router.buffers()) or mixture.correction or is_cast:
            raise Unkept("a router that is corrected, or of another dtype")
        return self._record(
            "mixture",
            names=(mixture.path, mixture.router, mixture.experts),
            routing=router.routing,
            router=weights,
            gating=experts.gating,
            experts=experts.parts,
            biases={name: experts._parameters[f"{name}_bias"] for name in experts.parts},
            shared=(mixture.shared, mixture.shared_gate),
            scales=(mixture.scale, mixture.shared_scale),
        )

    def _projection(self, projection: Projection) -> Record:
        linears = projection.linears()
        return self._record(
            "projection",
            prefix=projection.prefix,
            names=projection.names,
            weight=projection.weight,
            outputs=[linear.out_features for linear in linears],
            biases=[linear.bias for linear in linears],
        )

    def _angles(self, decoder: Decoder) -> StaticAngles | None:
        """Return what computes angles from frequencies, if they are the module's, bit by bit."""
        rotary: Any = decoder.rotary
        if rotary is None:
            return None
        attentions = [part for part in decoder.parts() if isinstance(part, Attention)]
        kinds = {each.angles for each in attentions} - {None}
        angles = StaticAngles({k.layer_type or "": _frequencies(rotary, k) for k in kinds if k})
        dtype, positions = decoder.head.weight.dtype, np.arange(_COMPARED_POSITIONS)
        for kind in kinds:
            ours, own = (
                Angles(module, torch.empty(0, dtype=dtype), kind).own(positions)
                for module in (angles, rotary)
            )
            if not all(map(torch.equal, ours, own)):
                raise Unkept("other angles")
        return angles


def _known(names: Mapping[int, str], address: int) -> str:
    if address not in names:
        raise Unkept("a weight that is not in the entry")
    return names[address]


def _frequencies(rotary: Any, kind: AngleKind) -> tuple[list[float], float]:
    """Return the frequencies of a kind of layer, and the factor on cosines and sines."""
    prefix = "" if kind.layer_type is None else f"{kind.layer_type}_"
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    factor = getattr(rotary, f"{prefix}attention_scaling", None)
    types = getattr(rotary, "rope_type", None)
    own = types.get(kind.layer_type) if isinstance(types, dict) else types
    if own not in STATIC_ROPE or not isinstance(frequencies, Tensor) or factor is None:
        raise Unkept(f"RoPE of type {own}")
    return frequencies.tolist(), float(factor)


class RecordReader:
    """Reads records."""

    def __init__(self, weights: EntrySource, dtype: torch.dtype) -> None:
        """Take an entry's weights, and the dtype that their model computes in."""
        self._weights, self._dtype = weights, dtype
        self._makers: dict[str, Callable[..., Any]] = {
            **_RECORDS,
            "mapping": dict,
            "tensor": lambda name: weights.plain(name, dtype),
            "embedding": self._embedding,
            "StaticAngles": StaticAngles,
            "packed": lambda name: weights.packed(name, dtype),
            "dtype": lambda name: getattr(torch, name),
            "projection": _projection_of,
            "part": self._part,
            "mixture": _mixture_of,
        }

    def value(self, value: Any) -> Any:
        """Return the value that was written."""
        if isinstance(value, list):
            return tuple(map(self.value, value))
        if not isinstance(value, dict):
            return value
        parts = {name: self.value(part) for name, part in value.items() if name != _KIND}
        kind = self._makers[value[_KIND]]
        return kind[parts["name"]] if isinstance(kind, enum.EnumType) else kind(**parts)

    def _embedding(self, name: str) -> nn.Module:
        embedding = self._weights.embedding(name, self._dtype)
        if embedding is None:
            embedding = nn.Embedding.from_pretrained(self._weights.plain(name, self._dtype))
        return embedding

    def _part(self, **own: Any) -> PackedPart:
        weight = empty_weight(own["shape"], self._dtype)
        return PackedPart(ExpertStack(weight, *own["layout"]), own["weight"])


def _parameter(numbers: Tensor | None) -> nn.Parameter | None:
    return None if numbers is None else nn.Parameter(numbers, requires_grad=False)


def _mixture_of(**own: Any) -> Mixture:
    router, block = nn.Module(), nn.Module()
    for name, numbers in own["router"].items():
        path, _, last = name.rpartition(".")
        if path:
            router.add_module(path, nn.Module())
        router.get_submodule(path).register_parameter(last, _parameter(numbers))
    path, router_name, experts_name = own["names"]
    biases = {name: _parameter(bias) for name, bias in own["biases"].items()}
    block.add_module(router_name, PackedRouter(router, own["routing"]))
    block.add_module(experts_name, PackedExperts(own["experts"], biases, own["gating"]))
    (shared, gate), scales = own["shared"], own["scales"]
    return Mixture(block, path, router_name, experts_name, "", shared, gate, None, *scales)


def _projection_of(**own: Any) -> Projection:
    parent, weight, first = nn.Module(), own["weight"], 0
    for name, num_outputs, bias in zip(own["names"], own["outputs"], own["biases"], strict=True):
        shape = torch.empty(num_outputs, weight.num_columns, device="meta")
        linear = plain_linear(shape, _parameter(bias))
        setattr(parent, name, PackedLinear(linear, weight, first))
        first += num_outputs
    projection = Projection(parent, own["prefix"], own["names"])
    projection.weight = weight
    return projection

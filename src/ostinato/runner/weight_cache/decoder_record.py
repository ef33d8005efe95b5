"""Keeps what the fused forward computes, so that a second start needs no modules.

A fused decoder consists of plain records, packed weights, vectors, an embedding and angles. All of
them are written down by the names that their weights have in the entry. To import the modules of
``transformers``, and to find out anew what they compute, takes half of a second start.
What this cannot write down, such as modules that are called or RoPE that depends on the length, is
left to the modules, as is everything that asks for ``LoadedModel.model``.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.experts.families import RouterFamily
from ostinato.runner.experts.mixture import (
    Gating,
    PackedExperts,
    PackedPart,
    empty_weight,
)
from ostinato.runner.experts.routers import PackedRouter, Routing
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.decoder import (
    Attention,
    Branch,
    Decoder,
    DecoderLayer,
    FeedForward,
    Mixture,
    Projection,
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
from ostinato.runner.weight_cache.entry import Record

_RECORDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Attention, FeedForward, Branch, DecoderLayer, Norm, HeadShape, Rope),
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


class KeptWeights(Protocol):
    """The weights of an entry, each the same object whenever it is asked for."""

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight that was not packed."""

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding of a file's blocks; None if it is plain."""

    def packed(self, joined: str, dtype: torch.dtype) -> PackedWeight:
        """Return a packed weight."""


class StaticAngles(nn.Module):
    """Computes cosines and sines as the modules of ``transformers`` do whose RoPE is static."""

    def __init__(self, kinds: Mapping[str, tuple[Sequence[float], float]]) -> None:
        """Take frequencies and a factor for each kind of layer; ``""`` is the only kind."""
        super().__init__()
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
    """Return what ``decoder_of`` needs; None if a part cannot be written down.

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
        return {
            "embedding": f"{self._modules[id(embedding)]}.weight",
            "embedding_scale": decoder.embedding_scale,
            "angles": self._angles(decoder),
            "layers": [self.value(layer) for layer in decoder.layers],
            "norm": self.value(decoder.norm),
            "head": self.value(decoder.head),
        }

    def value(self, value: object) -> Any:
        """Write a value: a plain one, a weight, or a record of these."""
        if isinstance(value, enum.Enum):
            return {_KIND: type(value).__name__, "name": value.name}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, tuple):
            return [self.value(each) for each in value]
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "name": self._name(value)}
        if isinstance(value, torch.dtype):
            return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, Projection):
            return self._projection(value)
        if isinstance(value, Mixture):
            return self._mixture(value)
        if is_dataclass(value) and type(value).__name__ in _RECORDS:
            own = {each.name: self.value(getattr(value, each.name)) for each in fields(value)}
            return {_KIND: type(value).__name__, **own}
        raise Unkept(type(value).__name__)

    def _name(self, tensor: Tensor) -> str:
        name = self._names.get(tensor.data_ptr())
        if name is None:
            raise Unkept("a vector that is no weight")
        return name

    def _packed_name(self, weight: PackedWeight) -> str:
        name = self._packed.get(id(weight))
        if name is None:
            raise Unkept("a weight that is not in the entry")
        return name

    def _mixture(self, mixture: Mixture) -> Record:
        router, experts = mixture.packed_router, mixture.packed_experts
        weights = dict(router.named_parameters())
        is_cast = any(own.dtype != experts.parts["down_proj"].dtype for own in weights.values())
        if list(router.buffers()) or mixture.correction or is_cast:
            raise Unkept("a router that is corrected, or of another dtype")
        return {
            "shared": [self.value(mixture.shared), self.value(mixture.shared_gate)],
            "scales": [mixture.scale, mixture.shared_scale],
            _KIND: "mixture",
            "names": [mixture.path, mixture.router, mixture.experts],
            "routing": self.value(router.routing),
            "router": {name: self._name(own) for name, own in weights.items()},
            "gating": self.value(experts.gating),
            "experts": {name: self._part(part) for name, part in experts.parts.items()},
            "biases": {
                name: None if bias is None else self._name(bias)
                for name, bias in ((n, experts._parameters[f"{n}_bias"]) for n in experts.parts)
            },
        }

    def _part(self, part: PackedPart) -> Record:
        stack = part.stack
        return {
            "packed": self._packed_name(part.packed),
            "shape": list(stack.weight.shape),
            "layout": [stack.num_parts, stack.is_transposed, stack.is_interleaved],
        }

    def _projection(self, projection: Projection) -> Record:
        linears, packed = projection.linears(), self._packed_name(projection.weight)
        return {
            _KIND: "projection",
            "prefix": projection.prefix,
            "names": list(projection.names),
            "packed": packed,
            "outputs": [linear.out_features for linear in linears],
            "biases": [None if n.bias is None else self._name(n.bias) for n in linears],
        }

    def _angles(self, decoder: Decoder) -> Record | None:
        """Write frequencies down, if angles computed from them are the module's, bit by bit."""
        rotary: Any = decoder.rotary
        if rotary is None:
            return None
        attentions = [part for part in decoder.parts() if isinstance(part, Attention)]
        kinds = {each.angles for each in attentions} - {None}
        record = {kind.layer_type or "": _frequencies(rotary, kind) for kind in kinds if kind}
        dtype = decoder.head.weight.dtype
        for kind in kinds:
            ours, own = (
                Angles(module, torch.empty(0, dtype=dtype), kind).own(np.arange(first, last))
                for module in (StaticAngles(record), rotary)
                for first, last in ((0, _COMPARED_POSITIONS),)
            )
            if not all(map(torch.equal, ours, own)):
                raise Unkept("other angles")
        return record


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


def decoder_of(record: Record, weights: KeptWeights, dtype: torch.dtype) -> Decoder:
    """Return the decoder of a record.

    Args:
        record: As ``decoder_record`` returned it.
        weights: The entry's.
        dtype: Compute dtype.
    """
    reading, name = RecordReader(weights, dtype), record["embedding"]
    embedding = weights.embedding(name, dtype)
    if embedding is None:
        embedding = nn.Embedding.from_pretrained(weights.plain(name, dtype))
    return Decoder(
        embedding=cast("nn.Embedding | BlockEmbedding", embedding),
        embedding_scale=record["embedding_scale"],
        rotary=None if record["angles"] is None else StaticAngles(record["angles"]),
        layers=tuple(reading.value(layer) for layer in record["layers"]),
        norm=reading.value(record["norm"]),
        head=reading.value(record["head"]),
    )


class RecordReader:
    """Reads records."""

    def __init__(self, weights: KeptWeights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def value(self, value: Any) -> Any:
        """Return the value that was written."""
        if isinstance(value, list):
            return tuple(map(self.value, value))
        if not isinstance(value, dict):
            return value
        if value[_KIND] == "tensor":
            return self._weights.plain(value["name"], self._dtype)
        if value[_KIND] == "dtype":
            return getattr(torch, value["name"])
        if value[_KIND] == "projection":
            return self._projection(value)
        if value[_KIND] == "mixture":
            return self._mixture(value)
        kind = _RECORDS[value[_KIND]]
        if issubclass(kind, enum.Enum):
            return kind[value["name"]]
        return kind(**{name: self.value(own) for name, own in value.items() if name != _KIND})

    def _parameter(self, name: str | None) -> nn.Parameter | None:
        if name is None:
            return None
        return nn.Parameter(self._weights.plain(name, self._dtype), requires_grad=False)

    def _mixture(self, record: Record) -> Mixture:
        router, block = nn.Module(), nn.Module()
        for name, own in record["router"].items():
            path, _, last = name.rpartition(".")
            if path:
                router.add_module(path, nn.Module())
            router.get_submodule(path).register_parameter(last, self._parameter(own))
        path, router_name, experts_name = record["names"]
        block.add_module(router_name, PackedRouter(router, self.value(record["routing"])))
        parts = {name: self._part(part) for name, part in record["experts"].items()}
        biases = {name: self._parameter(bias) for name, bias in record["biases"].items()}
        experts = PackedExperts(parts, biases, self.value(record["gating"]))
        block.add_module(experts_name, experts)
        shared, gate = map(self.value, record["shared"])
        names = path, router_name, experts_name
        return Mixture(block, *names, "", shared, gate, None, *record["scales"])

    def _part(self, record: Record) -> PackedPart:
        stack = ExpertStack(empty_weight(record["shape"], self._dtype), *record["layout"])
        return PackedPart(stack, self._weights.packed(record["packed"], self._dtype))

    def _projection(self, record: Record) -> Projection:
        parent, first = nn.Module(), 0
        packed = self._weights.packed(record["packed"], self._dtype)
        rows = zip(record["names"], record["outputs"], record["biases"], strict=True)
        for name, num_outputs, bias in rows:
            shape = torch.empty(num_outputs, packed.num_columns, device="meta")
            linear = plain_linear(shape, self._parameter(bias))
            setattr(parent, name, PackedLinear(linear, packed, first))
            first += num_outputs
        projection = Projection(parent, record["prefix"], tuple(record["names"]))
        projection.weight = packed
        return projection

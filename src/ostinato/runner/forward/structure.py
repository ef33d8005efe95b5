"""Describes a model as operations.

What a layer's modules are for follows from their names, which is data: ``_WIRINGS`` lists which
norms are before and after which part. What a module computes is found out by ``stand_ins``. A part
that the library has no operation for is called as it is. Modules do not reveal everything, so
``select_forward`` compares results.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.experts.mixture import is_experts, why_unpacked_experts
from ostinato.runner.experts.routers import family_of
from ostinato.runner.forward.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    FeedForward,
    Mixture,
    ModuleCall,
    Part,
    Projection,
    ResidualBranch,
    StateMixer,
)
from ostinato.runner.forward.embedding_and_rope import AngleKind, Angles
from ostinato.runner.forward.head_stand_ins import heads_of, layout_of
from ostinato.runner.forward.mixer_records import RowGating
from ostinato.runner.forward.mixer_stand_ins import mixer_of
from ostinato.runner.forward.ops import HeadShape, Norm, RopeKind
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import Pack, pack_linears
from ostinato.runner.forward.plain_layers import is_plain_linear, is_unaltered
from ostinato.runner.forward.stand_ins import (
    MixtureNames,
    Unknown,
    activation_of,
    check_mixture,
    norm_of,
)
from ostinato.runner.native.angles import settle_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Wiring(NamedTuple):
    """The names of a layer's norms by where they are; None where there is none."""

    before_mixer: str | None
    before_feed: str | None = None
    after_mixer: str | None = None
    after_feed: str | None = None


_INPUT_NORM = "input_layernorm"
_ATTENTION_NORM, _FEED_NORM = "post_attention_layernorm", "post_feedforward_layernorm"
_WIRINGS = {
    frozenset(filter(None, wiring)): wiring
    for wiring in (
        _Wiring(_INPUT_NORM, _ATTENTION_NORM),
        _Wiring(_INPUT_NORM, "pre_feedforward_layernorm", _ATTENTION_NORM, _FEED_NORM),
        _Wiring(None, None, _ATTENTION_NORM, _FEED_NORM),
        _Wiring(_INPUT_NORM, _ATTENTION_NORM, "post_self_attn_layernorm", "post_mlp_layernorm"),
        _Wiring(_INPUT_NORM, "pre_mlp_layernorm", _ATTENTION_NORM, "post_mlp_layernorm"),
        _Wiring(_INPUT_NORM, "pre_ff_layernorm"),
        _Wiring("attention_layernorm", "feedforward_layernorm"),
        _Wiring("operator_norm", "ffn_norm"),
        _Wiring(_INPUT_NORM),  # one norm for both: they are parallel
        _Wiring("norm"),  # a mixer or a feed-forward part alone
    )
}
_MIXERS = ("self_attn", "attention", "linear_attn", "conv", "mamba", "mixer")
_FEEDS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",))
_COMBINE = (("o_proj",), ("dense",), ("out_proj",))
_HEAD_NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
)
_GATE_UP = (
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("input_linear",),
    ("w1", "w3"),
    ("up_proj",),
    ("fc1",),
    ("c_fc",),
    ("dense_h_to_4h",),
)
_DOWN = (("down_proj",), ("output_linear",), ("w2",), ("fc2",), ("c_proj",), ("dense_4h_to_h",))
_FINAL_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f", "final_layer_norm")
_ROTARIES = ("rotary_emb", "pos_emb")
_NOTHING = (nn.Dropout, nn.Identity)


def describe_decoder(
    model: "PreTrainedModel",
    styles: Mapping[int, AttentionStyle] | None = None,
    for_device: bool = False,
) -> Decoder:
    """Describe a model; changes nothing.

    Args:
        model: The model.
        styles: Parameters of attention by layer, as the layers passed them; None takes those that
            its modules have.
        for_device: Whether a device computes it, which has not all of the library's operations.

    Raises:
        Unknown: It is not built as is known, or all of it would be called.
    """
    decoder = _Description(model, styles, not for_device).decoder()
    if not any(True for _ in decoder.projections()):
        raise Unknown("; ".join(sorted({call.reason for call in decoder.calls})))
    return decoder


def pack_model(model: "PreTrainedModel", decoder: Decoder, pack: Pack) -> None:
    """Pack the weights of a model as the fused forward reads them.

    Effects: replaces its linear layers by packed ones; the model itself keeps working.
    """
    settle_frequencies(decoder.rotary)
    pack_decoder(model, decoder, pack)
    pack_linears(model, pack)  # those of modules that are called


def pack_decoder(model: "PreTrainedModel", decoder: Decoder, pack: Pack) -> None:
    """Pack the weights of a decoder's products.

    Effects: replaces the linear layers by packed ones; the model itself keeps working.
    """
    for projection in decoder.projections():
        projection.pack(pack)
    head, embedding = cast(nn.Linear, model.get_output_embeddings()), decoder.embedding
    weight = cast(nn.Parameter, head.weight)
    tied = weight if isinstance(embedding, nn.Embedding) and weight is embedding.weight else None
    packed = pack([head], True)
    model.lm_head = PackedLinear(head, packed, 0, tied)
    decoder.head.weight = packed


class _Description:
    """A model's parts; see ``describe_decoder``."""

    def __init__(
        self,
        model: "PreTrainedModel",
        styles: Mapping[int, AttentionStyle] | None,
        has_library: bool,
    ) -> None:
        self._model, self._styles = model, styles
        self._has_library = has_library and model.device.type != "cuda"
        self._config = model.config.get_text_config()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inner = _inner(model)

    def decoder(self) -> Decoder:
        """Describe all of it."""
        model, inner = self._model, self._inner
        children = dict(inner.named_children())
        layers, embedding = children.pop("layers", None), model.get_input_embeddings()
        norm = next((children[name] for name in _FINAL_NORMS if name in children), None)
        known = {id(embedding), id(norm), id(self._rotary)}
        others = [m for m in children.values() if id(m) not in known]
        if not isinstance(layers, nn.ModuleList) or norm is None:
            raise Unknown(f"{type(inner).__name__} is no list of layers with a norm after it")
        if (part := next((m for m in others if type(m) not in _NOTHING), None)) is not None:
            raise Unknown(f"{type(inner).__name__} has a {type(part).__name__}")
        if not isinstance(embedding, (nn.Embedding, BlockEmbedding)):
            raise Unknown(f"its embedding is a {type(embedding).__name__}")
        if not is_plain_linear(model.get_output_embeddings()):
            raise Unknown("its head is not a plain linear layer")
        self._check_unaltered()
        mup = self._config.hidden_size**0.5 if getattr(self._config, "mup_enabled", False) else 1.0
        return Decoder(
            embedding=embedding,
            embedding_scale=float(getattr(inner, "embedding_multiplier", mup)),
            rotary=self._rotary,
            layers=tuple(self._layer(i, layer) for i, layer in enumerate(layers)),
            norm=norm_of(norm),
            head=Projection(model, "", ("lm_head",)),
            edit_logits=logit_edits(model),
        )

    def _layer(self, index: int, layer: nn.Module) -> DecoderLayer:
        children = dict(layer.named_children())
        mixers = tuple(name for name in _MIXERS if name in children)
        feeds = tuple(name for name in _FEEDS if name in children)
        norms = {n for n, child in children.items() if _is_norm(n, child)}
        wiring = _WIRINGS.get(frozenset(norms))
        others = children.keys() - {*mixers, *feeds, *norms}
        name = type(layer).__name__
        if any(type(children[other]) not in _NOTHING for other in others):
            raise Unknown(f"{name} has other parts ({', '.join(sorted(others))})")
        if layer._parameters or layer._buffers:
            raise Unknown(f"{name} has weights of its own ({', '.join(layer._buffers)})")
        if wiring is None or len(mixers) != 1:
            raise Unknown(f"{name} has {_listed(mixers, 'mixers')} and {_listed(norms, 'norms')}")
        scale = float(getattr(layer, "residual_multiplier", 1.0))
        is_parallel = bool(feeds) and (
            bool(getattr(layer, "use_parallel_residual", False)) or len(norms) == 1
        )

        def norm(name: str | None) -> Norm | None:
            return None if name is None else norm_of(children[name])

        mixer = self._mixer(index, layer, mixers[0])
        before = norm(wiring.before_mixer)
        branches = [ResidualBranch(before, mixer, norm(wiring.after_mixer), scale)]
        if feeds:
            own = before if len(norms) == 1 else norm(wiring.before_feed)
            part = self._feed_forward(layer, feeds)
            branches.append(ResidualBranch(own, part, norm(wiring.after_feed), scale))
        return DecoderLayer(index, tuple(branches), is_parallel)

    def _mixer(self, index: int, layer: nn.Module, name: str) -> Part:
        """Describe what mixes rows, or what stands in its place in a layer of one part."""
        module = layer.get_submodule(name)
        layer_type = self._layer_type(index)
        if self._attends(index, module):
            try:
                return self._attention(index, module, layer_type)
            except Unknown as unknown:
                return ModuleCall(layer, (name,), True, AngleKind(layer_type), str(unknown))
        if getattr(module, "layer_idx", None) is None:
            return self._feed_forward(layer, (name,))
        try:
            return self._state_mixer(module)
        except Unknown as unknown:
            angles = None if self._rotary is None else AngleKind(layer_type)
            reason = f"{type(module).__name__} carries a state, and {unknown}"
            return ModuleCall(layer, (name,), True, angles, reason)

    def _state_mixer(self, module: nn.Module) -> StateMixer:
        if not self._has_library:
            raise Unknown("its operations are those of a CPU")
        mixer = mixer_of(module, self._names[id(module)], self._model.dtype)
        for part in filter(None, (mixer.project, mixer.steps)):
            self._check_linears(module, (*part.names, *mixer.combine.names))
        return mixer

    def _attends(self, index: int, module: nn.Module) -> bool:
        if self._styles is not None:
            return index in self._styles
        return _known_children(module, _QKV) is not None

    def _attention(self, index: int, module: nn.Module, layer_type: str | None) -> Attention:
        project, combine = (_known_children(module, names) for names in (_QKV, _COMBINE))
        norms = _known_children(module, _HEAD_NORMS)
        if project is None or combine is None:
            raise Unknown(f"no operation for {type(module).__name__}")
        self._check_linears(module, (*project, *combine))
        numbers = None if self._rotary is None else self._angles(layer_type)
        shape, style = heads_of(module, project, combine[0], norms, numbers, self._model.dtype)
        angles = None
        if numbers is not None and shape.rope.kind != RopeKind.NONE:
            angles = AngleKind(layer_type, layout_of(numbers[0]))
        path = self._names[id(module)]
        return Attention(
            Projection(module, path, project),
            shape,
            angles,
            style if self._styles is None else self._styles[index],
            Projection(module, path, combine),
            self._gating(shape) if shape.is_gated else None,
        )

    def _gating(self, shape: HeadShape) -> RowGating:
        """Return how what was attended is gated, by what is beside the queries."""
        if not self._has_library:
            raise Unknown("what was attended is gated")
        stride, dim = shape.places()[0], shape.dim
        return RowGating(tuple(h * stride + dim for h in range(shape.num_heads)), dim, True)

    def _feed_forward(self, layer: nn.Module, names: tuple[str, ...]) -> Part:
        modules = [layer.get_submodule(name) for name in names]
        try:
            if any(map(is_experts, modules[0].children())) and len(modules) <= 2:
                return self._mixture(*modules)
            if len(modules) > 1:
                raise Unknown(f"no operation for {type(modules[0]).__name__}")
            return self._dense(modules[0])
        except Unknown as unknown:
            return ModuleCall(layer, names, False, None, str(unknown))

    def _dense(self, module: nn.Module) -> FeedForward:
        """Describe a feed-forward part that computes every row."""
        path = self._names[id(module)]
        gate_up, down = (_known_children(module, names) for names in (_GATE_UP, _DOWN))
        if gate_up is None or down is None or len(list(module.children())) > 4:
            raise Unknown(f"no operation for {type(module).__name__}")
        self._check_linears(module, (*gate_up, *down))
        activation, has_up = activation_of(module, gate_up, down[0], self._model.dtype)
        parts = Projection(module, path, gate_up), Projection(module, path, down)
        return FeedForward(parts[0], activation, has_up, parts[1])

    def _mixture(self, block: nn.Module, beside: nn.Module | None = None) -> Mixture:
        """Describe a router and its experts, and shared ones in the block or beside it."""
        children = {n: c for n, c in block.named_children() if type(c) not in _NOTHING}
        experts = next(name for name, child in children.items() if is_experts(child))
        router = next((n for n, child in children.items() if family_of(child) is not None), None)
        if (unpacked := why_unpacked_experts(children.pop(experts))) is not None:
            raise Unknown(unpacked)
        if router is None:
            raise Unknown(f"{type(block).__name__} has a router that is not known")
        del children[router]
        linears = {name: child for name, child in children.items() if is_plain_linear(child)}
        gate = next((name for name, own in linears.items() if own.out_features == 1), "")
        shared = next((name for name in children if name != gate), "")
        if len(children) > 2 or (gate and not shared) or (shared and beside is not None):
            raise Unknown(f"{type(block).__name__} has other parts ({', '.join(children)})")
        names = MixtureNames(router, experts, shared, gate)
        dense = block.get_submodule(shared) if shared else beside
        correction, *scales = check_mixture(block, names, self._model.dtype)
        return Mixture(
            block,
            self._names[id(block)],
            router,
            experts,
            correction,
            None if dense is None else self._dense(dense),
            Projection(block, self._names[id(block)], (gate,)) if gate else None,
            beside,
            *scales,
        )

    def _check_linears(self, module: nn.Module, names: tuple[str, ...]) -> None:
        linears = [module.get_submodule(name) for name in names]
        if not all(map(is_plain_linear, linears)):
            raise Unknown("it has projections that are not plain linear layers")
        if len({getattr(linear, "bias", None) is None for linear in linears[:-1]}) > 1:
            raise Unknown("of projections that read one input, some have a bias and some have none")
        if len({id(linear.weight) for linear in linears}) < len(linears):
            raise Unknown("two of its projections are one")

    def _check_unaltered(self) -> None:
        for name, module in self._model.named_modules():
            is_bound = isinstance(getattr(module, "layer_idx", None), int)
            if not is_unaltered(module, is_bound):
                raise Unknown(f"{name or type(module).__name__} has hooks or a forward of its own")

    def _layer_type(self, index: int) -> str | None:
        """Return what the model's RoPE is asked for in a layer, if it has several kinds."""
        rotary = self._rotary
        if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
            return None
        return str(self._config.layer_types[index])

    @cached_property
    def _rotary(self) -> nn.Module | None:
        children = dict(self._inner.named_children())
        return next((children[name] for name in _ROTARIES if name in children), None)

    def _angles(self, layer_type: str | None) -> tuple[Tensor, Tensor]:
        """Return the model's cosines and sines of two positions."""
        like = torch.empty(0, dtype=self._model.dtype)
        angles = Angles(cast(nn.Module, self._rotary), like, AngleKind(layer_type))
        cosines, sines = angles.own(np.arange(3))
        if cosines.ndim != 3:
            raise Unknown("its RoPE has several angles per token")
        return cosines, sines


def _inner(model: "PreTrainedModel") -> nn.Module:
    """Return the decoder in a model; one for images has it beside their encoder."""
    children = {name for name, _ in model.named_children()}
    inner = getattr(model, model.base_model_prefix, None)
    inner = getattr(inner, "language_model", inner)
    if not isinstance(inner, nn.Module) or children != {model.base_model_prefix, "lm_head"}:
        raise Unknown("more or less than a decoder and a head")
    return inner


def _known_children(
    module: nn.Module, known: tuple[tuple[str, ...], ...]
) -> tuple[str, ...] | None:
    """Return the first names in a table that are all names of a module's children."""
    children = {name for name, _ in module.named_children()}
    return next((names for names in known if children.issuperset(names)), None)


def _is_norm(name: str, module: nn.Module) -> bool:
    return "norm" in name and name not in (*_MIXERS, *_FEEDS) and type(module) not in _NOTHING


def logit_edits(model: "PreTrainedModel") -> Callable[[Tensor], Tensor] | None:
    """Return what a model does with its logits, as its code does it."""
    config: Any = model.config.get_text_config()
    factor = getattr(model, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)
    if all(number in (None, 1.0) for number in (factor, divisor)) and cap is None:
        return None

    def edited(logits: Tensor) -> Tensor:
        logits = logits if factor in (None, 1.0) else logits.mul_(factor)
        logits = logits if divisor in (None, 1.0) else logits.div_(divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    return edited


def _listed(names: Any, kind: str) -> str:
    return ", ".join(sorted(names)) or f"no known {kind}"

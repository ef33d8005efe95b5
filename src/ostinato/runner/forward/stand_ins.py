"""Finds out what a module computes by calling it between stand-ins.

Modules do not reveal the operations between their linear layers: whether heads are turned in halves
or in neighbours or not at all in this layer, normed before or after that, what opens a gate. So a
copy of the module is called whose linear layers give random rows, and what it makes of them is
compared with each operation that the library has::

    random rows ─► [module: norms, RoPE, ...] ─► queries, keys, values      seen by the attention
    random rows ─► [module] ─► input of the output projection               attended rows alone?

The module's weights do not matter, so this works on a model without storage too. Cost: a few
milliseconds for each kind of module.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.registration import STEP_KEYWORD
from ostinato.runner.experts.stack import stacks_of
from ostinato.runner.forward.embedding_and_rope import AngleLayout
from ostinato.runner.forward.ops import Activation, HeadShape, Norm, Rope, RopeKind

_NUM_ROWS = 5
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
}
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}


class Unknown(Exception):
    """A module computes something that the library has no operation for."""


def norm_of(module: nn.Module) -> Norm:
    """Return what a norm computes.

    Raises:
        Unknown: It is none that the library has.
    """
    name = type(module).__name__
    parts = {**module._parameters, **module._buffers}
    if parts.keys() - {"weight", "bias"} or list(module.children()):
        raise Unknown(f"{name} has other parts than a norm")
    epsilon = next(
        (e for n in ("variance_epsilon", "eps") if (e := getattr(module, n, None))), 1e-5
    )
    shape = _norm_shape(module)
    weight, bias = (module._parameters.get(n) for n in ("weight", "bias"))
    norm = Norm(_data(weight), float(epsilon), _data(bias))
    twin, rows, own = _norm_twin(module, norm, shape, torch.float32)
    for is_centered, offset in product((False, True), (0.0, 1.0)):
        kind = replace(own, is_centered=is_centered, offset=offset, is_rounded=False)
        if _is_close(apply_norm(kind, rows), twin(rows), torch.float32):
            break
    else:
        raise Unknown(f"{name} is neither an RMSNorm nor a LayerNorm")
    twin, rows, own = _norm_twin(module, norm, shape, torch.bfloat16)
    known = replace(norm, is_centered=is_centered, offset=offset)
    rounded, late = (
        replace(own, is_centered=is_centered, offset=offset, is_rounded=r) for r in (True, False)
    )
    misses = [int((apply_norm(kind, rows) != twin(rows)).sum()) for kind in (rounded, late)]
    return replace(known, is_rounded=misses[0] <= misses[1])


def apply_norm(norm: Norm, rows: Tensor) -> Tensor:
    """Return normed rows, computed by torch."""
    wide = rows.float()
    if norm.is_centered:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.is_rounded:
        normed = normed.to(rows.dtype).float()
    if norm.weight is not None:
        normed = normed * (norm.weight.float() + norm.offset)
    return (normed if norm.bias is None else normed + norm.bias.float()).to(rows.dtype)


def heads_of(
    attention: nn.Module,
    projections: tuple[str, ...],
    output: str,
    norms: tuple[str, str] | None,
    angles: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> tuple[HeadShape, AttentionStyle]:
    """Return what an attention module makes of its projected rows, and how it attends.

    Args:
        attention: The module, with our attention.
        projections: Names of the linear layers that give queries, keys and values.
        output: Name of the output projection.
        norms: Names of the norms of queries and keys; None if there are none.
        angles: The model's cosines and sines of some positions, of which layout and dtype count.
        dtype: The model's.

    Raises:
        Unknown: It computes something else.
    """
    linears = [cast(nn.Linear, attention.get_submodule(name)) for name in (*projections, output)]
    dim = next((d for n in ("head_dim", "head_size") if (d := getattr(attention, n, None))), None)
    if not isinstance(dim, int) or linears[-1].in_features % dim:
        raise Unknown(f"heads of {type(attention).__name__} are not of one size")
    num_heads = linears[-1].in_features // dim
    num_projected = sum(linear.out_features for linear in linears[:-1]) // dim
    num_kv_heads = (num_projected - num_heads) // 2
    shape = HeadShape(num_heads, num_kv_heads, dim)
    if num_kv_heads < 1 or shape.num_projected != sum(n.out_features for n in linears[:-1]):
        raise Unknown(f"{type(attention).__name__} projects other than queries, keys and values")
    random = torch.Generator().manual_seed(0)
    fixed = [_Fixed(_random((1, _NUM_ROWS, n.out_features), dtype, random)) for n in linears[:-1]]
    last = _Fixed(_random((1, _NUM_ROWS, linears[-1].out_features), dtype, random))
    children = dict(zip((*projections, output), (*fixed, last), strict=True))
    numbers = None if angles is None else tuple(_angles_like(each, random) for each in angles)
    seen = _Attending(_random((_NUM_ROWS, num_heads, dim), dtype, random))
    rows = _random((1, _NUM_ROWS, linears[0].in_features), dtype, random)
    _call_twin(attention, children, rows, call_keywords(attention, seen, numbers, None))
    projected = torch.cat([each.output[0] for each in fixed], dim=-1)
    shape, queries, keys = _split(shape, projected, seen)
    if last.input is None or not torch.equal(last.input.flatten(), seen.attended.flatten()):
        raise Unknown(f"{type(attention).__name__} changes what was attended")
    if norms is not None:
        query_norm, key_norm = (norm_of(attention.get_submodule(name)) for name in norms)
        is_of_all = query_norm.weight is not None and query_norm.weight.shape == (num_heads * dim,)
        shape = replace(
            shape,
            query_norm=query_norm,
            key_norm=key_norm,
            is_norm_of_all=is_of_all and num_heads > 1,
        )
    turned = _turned(shape, queries, keys, numbers, seen)
    return turned, cast(AttentionStyle, seen.style)


def activation_of(
    mlp: nn.Module, projections: tuple[str, ...], down: str, dtype: torch.dtype
) -> tuple[Activation, bool]:
    """Return what opens the gates of a feed-forward module, and whether it has ups.

    Args:
        mlp: The module.
        projections: Names of the linear layers that give gates and ups.
        down: Name of the output projection.
        dtype: The model's.

    Raises:
        Unknown: It computes something else.
    """
    linears = [cast(nn.Linear, mlp.get_submodule(name)) for name in (*projections, down)]
    random = torch.Generator().manual_seed(0)
    fixed = [_Fixed(_random((1, _NUM_ROWS, n.out_features), dtype, random)) for n in linears]
    children = dict(zip((*projections, down), fixed, strict=True))
    _call_twin(mlp, children, _random((1, _NUM_ROWS, linears[0].in_features), dtype, random), {})
    projected = torch.cat([each.output[0] for each in fixed[:-1]], dim=-1)
    width, gated = linears[-1].in_features, fixed[-1].input
    has_up = projected.shape[1] == 2 * width
    if gated is None or not (has_up or projected.shape[1] == width):
        raise Unknown(f"{type(mlp).__name__} is not built of gates and ups")
    gate, up = projected[:, :width], projected[:, width:]
    for activation, function in ACTIVATIONS.items():
        opened = function(gate) * up if has_up else function(gate)
        if _is_close(opened, gated[0], dtype):
            return activation, has_up
    raise Unknown(f"its activation is {_activation_name(mlp)}")


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Names in a block: router, experts, shared experts and their gate; empty for none."""

    router: str
    experts: str
    shared: str = ""
    gate: str = ""


def check_mixture(block: nn.Module, names: MixtureNames, dtype: torch.dtype) -> str:
    """Check that a block adds what its experts make of its router's choice to its shared experts.

    Args:
        block: The module that has them.
        names: Their names in it.
        dtype: The model's.

    Returns:
        Name of the block's vector that the router gets beside rows; empty if it gets none.

    Raises:
        Unknown: It computes something else.
    """
    random = torch.Generator().manual_seed(0)
    width = stacks_of(block.get_submodule(names.experts))[0].in_features
    num_chosen = int(cast(Any, block.get_submodule(names.router)).top_k)
    rows, sums = (_random((_NUM_ROWS, width), dtype, random) for _ in range(2))
    weights = _random((_NUM_ROWS, num_chosen), torch.float32, random)
    chosen = torch.arange(num_chosen).repeat(_NUM_ROWS, 1)
    choosing = _Answering((torch.zeros(_NUM_ROWS, num_chosen), weights, chosen))
    computing, children = _Answering(sums), dict[str, nn.Module]()
    shared, gate = (_Fixed(_random((_NUM_ROWS, n), dtype, random)) for n in (width, 1))
    if names.shared:
        children[names.shared], addend = shared, shared.output
        if names.gate:
            children[names.gate], addend = gate, gate.output.sigmoid() * addend
        sums = sums + addend
    children |= {names.router: choosing, names.experts: computing}
    result = _call_twin(block, children, rows[None], {})
    given = result[0] if isinstance(result, tuple) else result
    name, (routed, *others) = type(block).__name__, choosing.inputs or (rows[:0],)
    vectors = [n for n, own in block._buffers.items() if any(own is each for each in others)]
    if not _are_equal((routed,), (rows,)) or len(others) != len(vectors[:1]):
        raise Unknown(f"{name} gives its router more than rows")
    if not _are_equal((given,), (sums,)):
        raise Unknown(f"{name} computes more than its experts do")
    if not _are_equal(computing.inputs, (rows, chosen, weights)):
        raise Unknown(f"{name} changes what its router chose")
    inputs = [own.input for own in children.values() if isinstance(own, _Fixed)]
    if not all(own is not None and _are_equal((own,), (rows,)) for own in inputs):
        raise Unknown(f"{name} gives its shared experts other rows")
    return "".join(vectors)


def call_keywords(
    module: nn.Module,
    step: object,
    angles: tuple[Tensor, ...] | None,
    positions: Tensor | None,
) -> dict[str, Any]:
    """Return the keywords with which a layer calls a module that mixes rows."""
    names = inspect.signature(module.forward).parameters
    given = {
        "position_embeddings": angles,
        "position_ids": positions,
        "attention_mask": None,
        "past_key_values": None,
        "layer_past": None,
        "cache_params": None,
        "use_cache": False,
    }
    keywords: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    if any(each.kind is each.VAR_KEYWORD for each in names.values()):
        keywords[STEP_KEYWORD] = step
    return keywords


class _Fixed(nn.Module):
    """In place of a linear layer: the same output for any input, which is kept."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output, self.input = output, cast(Tensor | None, None)

    def forward(self, rows: Tensor) -> Tensor:
        self.input = rows
        return self.output


class _Answering(nn.Module):
    """In place of a router or of experts: one answer, and the inputs are kept."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer, self.inputs = answer, cast(tuple[Tensor, ...], ())

    def forward(self, *inputs: Tensor) -> Any:
        self.inputs = inputs
        return self.answer


class _Attending:
    """In place of a step's attention: keeps queries, keys and values, and gives random rows."""

    states = None

    def __init__(self, attended: Tensor) -> None:
        self.attended = attended
        self.style: AttentionStyle | None = None

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        self.queries, self.keys, self.values, self.style = queries, keys, values, style
        return self.attended


def _split(
    shape: HeadShape, projected: Tensor, seen: _Attending
) -> tuple[HeadShape, Tensor, Tensor]:
    """Return where queries, keys and values are in projected rows, and the first two of them."""
    if seen.style is None:
        raise Unknown("it does not attend through the interface")
    choices = [shape]
    if shape.num_heads == shape.num_kv_heads:
        choices.append(replace(shape, is_interleaved=True))
    for choice in choices:
        stride, kv_stride, first_key, first_value = choice.places()
        parts = [
            torch.stack([projected[:, first + h * s :][:, : shape.dim] for h in range(n)], dim=1)
            for first, s, n in (
                (0, stride, shape.num_heads),
                (first_key, kv_stride, shape.num_kv_heads),
                (first_value, kv_stride, shape.num_kv_heads),
            )
        ]
        if seen.values.shape == parts[2].shape and torch.equal(seen.values, parts[2]):
            return choice, parts[0], parts[1]
    raise Unknown("its values are not rows of a projection")


def _turned(
    shape: HeadShape,
    queries: Tensor,
    keys: Tensor,
    angles: tuple[Tensor, ...] | None,
    seen: _Attending,
) -> HeadShape:
    """Return how queries and keys are normed and turned; the closest where several are close."""
    best: tuple[int, HeadShape] | None = None
    for rope, is_last in product(_ropes(shape, angles), (False, True)):
        choice = replace(shape, rope=rope, is_norm_last=is_last)
        misses = 0
        for raw, norm, turned in (
            (queries, shape.query_norm, seen.queries),
            (keys, shape.key_norm, seen.keys),
        ):
            expected = _normed_and_turned(choice, norm, raw, angles)
            if not _is_close(expected, turned, raw.dtype):
                break
            misses += int((expected != turned).sum())
        else:
            if best is None or misses < best[0]:
                best = misses, choice
    if best is None:
        raise Unknown("its queries and keys are normed or turned in another way")
    return best[1]


def _ropes(shape: HeadShape, angles: tuple[Tensor, ...] | None) -> Iterator[Rope]:
    yield Rope()
    if angles is None:
        return
    dim = angles[0].shape[-1] * (2 if layout_of(angles[0]) is AngleLayout.SINGLE else 1)
    if dim <= shape.dim:
        for rounded in (True, False):
            for kind in (RopeKind.HALVES, RopeKind.NEIGHBOURS):
                yield Rope(kind, dim, rounded)


def layout_of(angles: Tensor) -> AngleLayout:
    """Return where the angles of pairs are in a row that the model's module gives."""
    if angles.shape[-1] % 2:
        return AngleLayout.SINGLE
    if torch.equal(*angles.chunk(2, dim=-1)):
        return AngleLayout.HALVES
    if torch.equal(angles[..., ::2], angles[..., 1::2]):
        return AngleLayout.REPEATED
    return AngleLayout.SINGLE


def _angles_like(angles: Tensor, random: torch.Generator) -> Tensor:
    """Return random numbers in the layout of some angles, shape (1, num_rows, dim)."""
    layout = layout_of(angles)
    width = angles.shape[-1] // (1 if layout is AngleLayout.SINGLE else 2)
    pairs = _random((1, _NUM_ROWS, width), angles.dtype, random)
    if layout is AngleLayout.REPEATED:
        return pairs.repeat_interleave(2, dim=-1)
    return pairs if layout is AngleLayout.SINGLE else torch.cat((pairs, pairs), dim=-1)


def _normed_and_turned(
    shape: HeadShape, norm: Norm | None, heads: Tensor, angles: tuple[Tensor, ...] | None
) -> Tensor:
    def normed(rows: Tensor) -> Tensor:
        if norm is None:
            return rows
        flat = rows.flatten(1) if shape.is_norm_of_all else rows
        return apply_norm(norm, flat).view(rows.shape)

    heads = heads if shape.is_norm_last else normed(heads)
    if angles is not None and shape.rope.kind != RopeKind.NONE:
        heads = turn(heads, shape.rope, angles)
    return normed(heads) if shape.is_norm_last else heads


def turn(heads: Tensor, rope: Rope, angles: tuple[Tensor, ...]) -> Tensor:
    """Turn heads, shape (num_rows, num_heads, dim)."""
    dtype = heads.dtype
    cosines, sines = (layout_of(a).of_pairs(a[0]).float()[:, None] for a in angles)
    turned, rest = heads[..., : rope.dim].float(), heads[..., rope.dim :]
    is_halves = rope.kind == RopeKind.HALVES
    first, second = turned.chunk(2, -1) if is_halves else (turned[..., ::2], turned[..., 1::2])

    def times(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).to(dtype).float() if rope.are_rounded else a * b

    pairs = (
        (times(first, cosines) - times(second, sines)).to(dtype),
        (times(second, cosines) + times(first, sines)).to(dtype),
    )
    joined = torch.cat(pairs, dim=-1) if is_halves else torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat((joined, rest), dim=-1)


def _norm_shape(module: nn.Module) -> torch.Size:
    weight = module._parameters.get("weight")
    if weight is not None:
        return weight.shape
    shape = getattr(module, "normalized_shape", None)
    if shape is None:
        raise Unknown(f"{type(module).__name__} has no weight")
    return torch.Size(shape)


def _norm_twin(
    module: nn.Module, norm: Norm, shape: torch.Size, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, Norm]:
    """Return a copy with random weights, rows for it, and those weights."""
    random = torch.Generator().manual_seed(0)
    parameters = {
        name: None if part is None else nn.Parameter(_random(part.shape, dtype, random), False)
        for name, part in module._parameters.items()
    }
    twin = _stand_in(module, {})
    twin.__dict__["_parameters"] = parameters
    sizes = torch.tensor([1.0, 1e-3, 0.1, 30.0]).view(4, *(1 for _ in shape))
    rows = ((_random((4, *shape), torch.float32, random) + 0.3) * sizes).to(dtype)
    weight, bias = (_data(parameters.get(name)) for name in ("weight", "bias"))
    return twin, rows, replace(norm, weight=weight, bias=bias)


def _stand_in(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module without its hooks, with some children replaced."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs"):
        twin.__dict__[hooks] = OrderedDict()
    return twin


def _call_twin(
    module: nn.Module, children: Mapping[str, nn.Module], rows: Tensor, keywords: dict[str, Any]
) -> Any:
    """Call a copy of a module with some children replaced, its missing weights random.

    A product of rows and a weight without storage (``meta``) raises no error in ``torch``: it
    returns memory as it is, often zeros.
    """
    twin = _stand_in(module, children)
    random = torch.Generator().manual_seed(1)
    weights = {
        name: _random(tuple(weight.shape), weight.dtype, random)
        for name, weight in twin.named_parameters()
        if weight.is_meta
    }
    try:
        with torch.no_grad():
            return functional_call(twin, weights, (rows,), keywords)
    except Exception as error:  # code of any model
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unknown(f"{type(module).__name__} has operations of its own ({reason})") from error


def _random(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random).to(dtype)


def _data(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


def _are_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same dtypes and numbers, in any shape."""
    return len(actual) == len(expected) and all(
        one.dtype == other.dtype and torch.equal(one.flatten(), other.flatten())
        for one, other in zip(actual, expected, strict=True)
    )


def _is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    if actual.shape != expected.shape:
        return False
    size = expected.float().abs().amax(-1, keepdim=True)
    return bool(((actual.float() - expected.float()).abs() <= _TOLERANCE[dtype] * size).all())


def _activation_name(mlp: nn.Module) -> str:
    named = ((name, child) for name, child in mlp.named_children() if "act" in name)
    return next((type(child).__name__ for _, child in named), f"that of {type(mlp).__name__}")

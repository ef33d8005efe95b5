"""Finds out what a module computes by calling it between stand-ins.

Modules do not reveal the operations between their linear layers: whether heads are turned in halves
or in adjacent or not at all in this layer, normed before or after that, what opens a gate. So a
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ostinato.runner.attention.registration import STEP_KEYWORD
from ostinato.runner.experts.stack import stacks_of
from ostinato.runner.forward.ops import Activation, Norm

NUM_ROWS = 5
"""Rows of each call."""

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
        if is_close(apply_norm(kind, rows), twin(rows), torch.float32):
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
    num_inputs, width = (
        cast(nn.Linear, mlp.get_submodule(name)).in_features for name in (projections[0], down)
    )
    random = torch.Generator().manual_seed(0)
    children = answering_linears(mlp, (*projections, down), dtype, random)
    call_twin(mlp, children, random_rows((1, NUM_ROWS, num_inputs), dtype, random), {})
    projected = torch.cat([children[name].answer[0] for name in projections], dim=-1)
    has_up = projected.shape[1] == 2 * width
    if not children[down].inputs or not (has_up or projected.shape[1] == width):
        raise Unknown(f"{type(mlp).__name__} is not built of gates and ups")
    gate, up = projected[:, :width], projected[:, width:]
    for activation, function in ACTIVATIONS.items():
        opened = function(gate) * up if has_up else function(gate)
        if is_close(opened, children[down].inputs[0][0], dtype):
            return activation, has_up
    raise Unknown(f"its activation is {_activation_name(mlp)}")


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Names in a block: router, experts, shared experts and their gate; empty for none."""

    router: str
    experts: str
    shared: str = ""
    gate: str = ""


def check_mixture(
    block: nn.Module, names: MixtureNames, dtype: torch.dtype
) -> tuple[str, float, float]:
    """Check that a block adds what its experts make of its router's choice to its shared experts.

    Args:
        block: The module that has them.
        names: Their names in it.
        dtype: The model's.

    Returns:
        Name of the block's vector that the router gets beside rows, empty if it gets none; and the
        factors on the experts' sum and on the shared experts.

    Raises:
        Unknown: It computes something else.
    """
    random = torch.Generator().manual_seed(0)
    width = next(iter(stacks_of(block.get_submodule(names.experts)).values())).in_features
    num_chosen = int(cast(Any, block.get_submodule(names.router)).top_k)
    rows, sums, own = (random_rows((NUM_ROWS, width), dtype, random) for _ in range(3))
    gates = random_rows((NUM_ROWS, 1), dtype, random)
    weights = random_rows((NUM_ROWS, num_chosen), torch.float32, random)
    chosen = torch.arange(num_chosen).repeat(NUM_ROWS, 1)
    choosing = Answering((torch.zeros(NUM_ROWS, num_chosen), weights, chosen))

    def result(sums: Tensor, own: Tensor, gates: Tensor) -> tuple[Tensor, list[Answering]]:
        answers = {names.experts: sums, names.shared: own, names.gate: gates}
        fixed = {name: Answering(output) for name, output in answers.items() if name}
        given = call_twin(block, {**fixed, names.router: choosing}, rows[None], {})
        return given[0] if isinstance(given, tuple) else given, list(fixed.values())

    ones, zeros = torch.ones_like(rows), torch.zeros_like(rows)
    opened = torch.full_like(gates, 100.0)
    scale = float(result(ones, zeros, opened)[0].flatten()[0])
    shared_scale = float(result(zeros, ones, opened)[0].flatten()[0]) if names.shared else 1.0
    given, (computing, *fixed) = result(sums, own, gates)
    expected = sums if scale == 1.0 else sums * scale
    if names.shared:
        addend = gates.sigmoid() * own if names.gate else own
        expected = expected + (addend if shared_scale == 1.0 else addend * shared_scale)
    name, (routed, *others) = type(block).__name__, choosing.inputs or (rows[:0],)
    held = {**block._buffers, **block._parameters}
    vectors = [n for n, vector in held.items() if any(vector is each for each in others)]
    if not _are_equal((routed,), (rows,)) or len(others) != len(vectors[:1]):
        raise Unknown(f"{name} gives its router more than rows")
    if not _are_equal((given,), (expected,)):
        raise Unknown(f"{name} computes more than its experts do")
    if not _are_equal(computing.inputs, (rows, chosen, weights)):
        raise Unknown(f"{name} changes what its router chose")
    if not all(_are_equal(each.inputs, (rows,)) for each in fixed):
        raise Unknown(f"{name} gives its shared experts other rows")
    return "".join(vectors), scale, shared_scale


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


class Answering(nn.Module):
    """In place of a module: one answer whatever the inputs, which are kept; none before a call."""

    def __init__(self, answer: Any) -> None:
        """Return this answer."""
        super().__init__()
        self.answer, self.inputs = answer, cast(tuple[Tensor, ...], ())

    def forward(self, *inputs: Tensor | None) -> Any:
        """Return the answer."""
        self.inputs = tuple(each for each in inputs if each is not None)
        return self.answer


def answering_linears(
    module: nn.Module, names: Sequence[str], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Answering]:
    """Return what stands in for linear layers of a module: each answers with random rows."""
    widths = {name: cast(nn.Linear, module.get_submodule(name)).out_features for name in names}
    return {n: Answering(random_rows((1, NUM_ROWS, w), dtype, random)) for n, w in widths.items()}


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
        name: None if part is None else nn.Parameter(random_rows(part.shape, dtype, random), False)
        for name, part in module._parameters.items()
    }
    twin = stand_in(module, {})
    twin.__dict__["_parameters"] = parameters
    sizes = torch.tensor([1.0, 1e-3, 0.1, 30.0]).view(4, *(1 for _ in shape))
    rows = ((random_rows((4, *shape), torch.float32, random) + 0.3) * sizes).to(dtype)
    weight, bias = (_data(parameters.get(name)) for name in ("weight", "bias"))
    return twin, rows, replace(norm, weight=weight, bias=bias)


def stand_in(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module without its hooks, with some children replaced."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs"):
        twin.__dict__[hooks] = OrderedDict()
    return twin


def call_twin(
    module: nn.Module, children: Mapping[str, nn.Module], rows: Tensor, keywords: dict[str, Any]
) -> Any:
    """Call a copy of a module with some children replaced, its missing weights random.

    A product of rows and a weight without storage (``meta``) raises no error in ``torch``: it
    returns memory as it is, often zeros.
    """
    twin = stand_in(module, children)
    random = torch.Generator().manual_seed(1)
    weights = {
        name: random_rows(tuple(weight.shape), weight.dtype, random)
        for name, weight in twin.named_parameters()
        if weight.is_meta
    }
    try:
        with torch.no_grad():
            return functional_call(twin, weights, (rows,), keywords)
    except Exception as error:  # code of any model
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unknown(f"{type(module).__name__} has operations of its own ({reason})") from error


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Return numbers of a normal distribution."""
    return torch.randn(shape, generator=random).to(dtype)


def _data(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


def _are_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same dtypes and numbers, in any shape."""
    return len(actual) == len(expected) and all(
        one.dtype == other.dtype and torch.equal(one.flatten(), other.flatten())
        for one, other in zip(actual, expected, strict=True)
    )


def is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether each number is as close as rounding explains, by the largest of its row."""
    if actual.shape != expected.shape:
        return False
    size = expected.float().abs().amax(-1, keepdim=True)
    return bool(((actual.float() - expected.float()).abs() <= _TOLERANCE[dtype] * size).all())


def _activation_name(mlp: nn.Module) -> str:
    named = ((name, child) for name, child in mlp.named_children() if "act" in name)
    return next((type(child).__name__ for _, child in named), f"that of {type(mlp).__name__}")

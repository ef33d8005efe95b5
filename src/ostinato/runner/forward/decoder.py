"""A decoder as a list of operations.

::

    embedding ─► n × layer ─► norm ─► head

    layer    branch, then branch; or both of the same rows (parallel)
    branch   stream ─► norm ─► part ─► norm ─► * scale ─► + stream      (either norm may be missing)
    part     attention      project ─► heads: norms, RoPE ─► attend ─► combine
             feed-forward   gate, up ─► activation(gate) * up ─► down   (or without ups)
             state mixer    project ─► convolution ─► scan of each head ─► gated norm ─► combine
             mixture        router ─► few of many experts for each row; + shared experts, whose
                            factor may be the sigmoid of a gate
             call           a module of ``transformers``, called as one operation

``structure`` describes a model so, ``select_forward`` compares the results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate
from operator import add
from typing import Any, cast

import torch
from torch import Tensor, nn

from ostinato.runner.adapters.lora_updates import Groups, add_product
from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.experts.mixture import (
    PackedExperts,
    adapted_products,
    stacks_by_name,
)
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.forward.embedding_and_rope import AngleKind, Embedding
from ostinato.runner.forward.mixer_records import MixerShape, MixerWeights, RowGating
from ostinato.runner.forward.ops import Activation, HeadShape, Norm
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import Pack, stack
from ostinato.runner.native.packed import PackedWeight


class Projection:
    """A product: linear layers with the same input, packed into one weight.

    Attributes:
        prefix: Name of the module that has the layers.
        names: Their names in it.
        weight: Shape (num_outputs, num_inputs); there after ``pack``.
    """

    weight: PackedWeight

    def __init__(self, parent: nn.Module, prefix: str, names: tuple[str, ...]) -> None:
        """Describe the product; nothing is packed yet."""
        self._parent, self.prefix, self.names = parent, prefix, names

    def pack(self, pack: Pack) -> None:
        """Pack the layers, and replace them."""
        self.weight = stack(self._parent, self.names, pack)

    def linears(self) -> list[nn.Linear | PackedLinear]:
        """Return the layers, first to last."""
        return [cast(nn.Linear, self._parent.get_submodule(name)) for name in self.names]

    def bias(self) -> Tensor | None:
        """Return the biases as one; concatenated each time, since they may be replaced in place."""
        biases = [each.bias.detach() for each in self.linears() if each.bias is not None]
        if len(biases) <= 1:
            return biases[0] if biases else None
        return torch.cat(biases)

    def joined(self) -> list[tuple[str, int]]:
        """Return the names of the layers in the model, each with its first output."""
        widths = [each.out_features for each in self.linears()]
        firsts = accumulate(widths[:-1], initial=0)
        return [(f"{self.prefix}.{n}", first) for n, first in zip(self.names, firsts, strict=True)]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer.

    Attributes:
        project: Queries, keys and values, and gates if there are any.
        shape: How they are split into heads.
        angles: Which angles turn them; None if nothing does.
        style: Parameters of attention.
        combine: The output projection.
        gating: How what was attended is gated; None if it is not.
    """

    project: Projection
    shape: HeadShape
    angles: AngleKind | None
    style: AttentionStyle
    combine: Projection
    gating: RowGating | None = None


@dataclass(frozen=True, slots=True)
class StateMixer:
    """A layer's linear attention: it carries a state from token to token.

    Attributes:
        project: What the convolution reads, and gates.
        steps: What decays and betas are made of; None if ``project`` gives that too.
        shape: How a scan reads both.
        weights: Of the convolution and the scan.
        gating: How the scan's output is gated and normed.
        combine: The output projection.
    """

    project: Projection
    steps: Projection | None
    shape: MixerShape
    weights: MixerWeights
    gating: RowGating
    combine: Projection


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward part.

    Attributes:
        gate_up: Gates and ups; only gates if there are no ups.
        activation: What gates open by.
        has_up: Whether there are ups.
        down: The output projection.
    """

    gate_up: Projection
    activation: Activation
    has_up: bool
    down: Projection


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Modules of ``transformers`` that are called with the same rows; their outputs are added.

    Attributes:
        parent: The layer that has them.
        names: Their names in it; looked up at each call, since they may be replaced.
        mixes: Whether rows see other rows, so that all rows of a step are needed.
        angles: The angles that they get; None for none.
        reason: Why they are not described by operations.
    """

    parent: nn.Module
    names: tuple[str, ...]
    mixes: bool
    angles: AngleKind | None
    reason: str

    @property
    def modules(self) -> list[nn.Module]:
        """The modules, as they are now."""
        return [self.parent.get_submodule(name) for name in self.names]

    def __str__(self) -> str:
        """Say what is called, and why."""
        return f"{'/'.join(self.names)} is called ({self.reason})"


def sum_of(
    modules: Sequence[nn.Module],
    rows: Tensor,
    keywords: Callable[[nn.Module], dict[str, Any]] = lambda _: {},
) -> Tensor:
    """Call modules with the same rows, shape (num_rows, width), and add their outputs.

    Args:
        modules: The modules; of what returns a tuple, the first counts.
        rows: What they read.
        keywords: Returns further arguments of a module.
    """
    results = (module(rows[None], **keywords(module)) for module in modules)
    outputs = (result[0] if isinstance(result, tuple) else result for result in results)
    total: Tensor = reduce(add, outputs)
    return total.reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of which a router chooses a few for each row.

    Attributes:
        block: The module that has both; they are there packed when a step is computed.
        path: Its name in the model.
        router: The router's name in it.
        experts: That of the experts.
        correction: Name of the block's vector that the router gets; empty if it gets none.
        shared: Experts that compute every row; None if there are none.
        shared_gate: One number for each row, whose sigmoid is a factor on theirs; None is none.
        beside: The module of the shared experts, if it is not in the block.
        scale: Factor on the sum of the chosen experts.
        shared_scale: Factor on the shared experts.
    """

    block: nn.Module
    path: str
    router: str
    experts: str
    correction: str = ""
    shared: FeedForward | None = None
    shared_gate: Projection | None = None
    beside: nn.Module | None = None
    scale: float = 1.0
    shared_scale: float = 1.0

    @property
    def packed_router(self) -> PackedRouter:
        """Chooses experts."""
        return cast(PackedRouter, self.block.get_submodule(self.router))

    @property
    def packed_experts(self) -> PackedExperts:
        """Computes rows."""
        return cast(PackedExperts, self.block.get_submodule(self.experts))

    def compute(self, rows: Tensor, step: Groups | None = None, place: int = 0) -> Tensor:
        """Return the weighted sums of the chosen experts of rows, of the same shape.

        Args:
            rows: Shape (num_rows, width).
            step: Rows that adapters compute; None is none.
            place: Which product is the first of ``joined``.
        """
        correction = getattr(self.block, self.correction) if self.correction else None
        experts, edit = self.packed_experts, None
        if step is not None:
            router = place + 2 * experts.num_experts
            edit = partial(add_product, step=step, layer=router)
        _, weights, chosen = self.packed_router(rows, correction, edit)
        sums = experts.compute(rows, chosen, weights, None if step is None else (step, place))
        return sums if self.scale == 1.0 else sums.mul_(self.scale)

    def joined(self) -> list[list[tuple[str, int]]]:
        """Return what adapters may change: the experts' products, and the router."""
        experts = f"{self.path}.{self.experts}"
        products = adapted_products(experts, stacks_by_name(self.packed_experts))
        return [*products, [(f"{self.path}.{self.router}{self.packed_router.suffix}", 0)]]


Part = Attention | StateMixer | FeedForward | Mixture | ModuleCall


@dataclass(frozen=True, slots=True)
class ResidualBranch:
    """What is added to the residual stream.

    Attributes:
        norm: Of the rows that the part reads; None if it reads the stream itself.
        part: Computes the addend.
        norm_after: Of the addend; None is none.
        scale: Factor on the addend.
    """

    norm: Norm | None
    part: Part
    norm_after: Norm | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer.

    Attributes:
        index: Its place among all layers, which its keys and values have as well.
        branches: In order.
        is_parallel: Whether all branches read the stream as it was before the layer.
    """

    index: int
    branches: tuple[ResidualBranch, ...]
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a model.

    Attributes:
        embedding: Ids to the residual stream, the model's own module.
        embedding_scale: Factor on its output.
        rotary: Positions to angles, the model's own module; None if there is none.
        layers: First to last.
        norm: After the last layer.
        head: The residual stream to logits.
        edit_logits: Scales or caps logits, in place where it can; None leaves them.
    """

    embedding: Embedding
    embedding_scale: float
    rotary: nn.Module | None
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Projection
    edit_logits: Callable[[Tensor], Tensor] | None = field(default=None)

    def parts(self) -> Iterator[Part]:
        """Yield the parts of all layers, in order."""
        for layer in self.layers:
            for branch in layer.branches:
                yield branch.part

    def projections(self) -> Iterator[Projection]:
        """Yield the products of all layers, in order."""
        for part in self.parts():
            if isinstance(part, Attention | StateMixer):
                yield from (part.project, part.combine)
            if isinstance(part, StateMixer):
                yield from () if part.steps is None else (part.steps,)
            elif isinstance(part, FeedForward):
                yield from (part.gate_up, part.down)
            elif isinstance(part, Mixture) and part.shared is not None:
                yield from (part.shared.gate_up, part.shared.down)
                yield from () if part.shared_gate is None else (part.shared_gate,)

    def adapted(self) -> Iterator[tuple[object, list[list[tuple[str, int]]]]]:
        """Yield what adapters may change, each with the linear layers of its products."""
        for projection in self.projections():
            yield projection, [projection.joined()]
        for part in self.parts():
            if isinstance(part, Mixture):
                yield part, part.joined()

    @property
    def has_states(self) -> bool:
        """Whether operations carry states."""
        return any(isinstance(part, StateMixer) for part in self.parts())

    @property
    def calls(self) -> tuple[ModuleCall, ...]:
        """Modules that are called."""
        return tuple(part for part in self.parts() if isinstance(part, ModuleCall))

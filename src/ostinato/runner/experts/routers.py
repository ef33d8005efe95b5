"""Chooses the experts of each row, as the routers of ``transformers`` do, each row by itself."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ostinato.runner.experts.families import (
    ROUTERS,
    SCORES,
    SOFTMAX_OF_CHOSEN,
    RouterFamily,
)
from ostinato.runner.native.ctypes_api import DTYPES, floats, int32s, pointers
from ostinato.runner.native.packed import Matrix, PackedWeight, required_library


class RoutingRecord(ctypes.Structure):
    """``ost_routing``."""

    _fields_ = (
        ("logits", Matrix),
        *pointers("correction", "experts", "weights"),
        *int32s("num_rows", "num_experts", "top_k", "dtype", "weight_dtype", "scores"),
        *int32s("num_groups", "kept_groups", "group_best", "divides"),
        *floats("epsilon", "floor", "scale", "cap", "jitter"),
        *int32s("num_threads"),
    )


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's settings.

    Attributes:
        family: How it chooses.
        scores: How logits become scores.
        top_k: Experts of a row.
        divides: Whether weights are divided by their sum.
        num_groups: Groups of experts; 1 is none.
        kept_groups: Groups that are chosen from.
        floor: Least sum of weights.
        scale: Factor of weights.
        cap: Logits are at most so large; 0 is no limit.
        jitter: How far below the best logit another one counts, in the sparse mixer.
    """

    family: RouterFamily
    scores: int
    top_k: int
    divides: bool
    num_groups: int = 1
    kept_groups: int = 1
    floor: float = 0.0
    scale: float = 1.0
    cap: float = 0.0
    jitter: float = 0.0

    @classmethod
    def of(cls, router: Any, family: RouterFamily) -> "Routing":
        """Read the settings of a router of ``transformers``."""

        def number(default: float, *names: str) -> float:
            return float(next((getattr(router, n) for n in names if hasattr(router, n)), default))

        divides, scores = family.divides, family.scores
        if family.scores_of:
            scores = SCORES[getattr(router, family.scores_of)]
        has_groups = family.group_best and getattr(router, "topk_method", "") != "greedy"
        if isinstance(divides, str):
            divides = bool(getattr(router, divides)) and scores != SOFTMAX_OF_CHOSEN
        return cls(
            family,
            scores,
            router.top_k,
            divides,
            router.num_group if has_groups else 1,
            router.topk_group if has_groups else 1,
            number(0.0, "norm_min"),
            number(1.0, "routed_scaling_factor", "router_scaling_factor", "route_scale"),
            number(0.0, "router_logit_softcapping"),
            number(0.0, "router_jitter_noise"),
        )

    def choose(
        self, logits: Tensor, correction: Tensor | None, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of each row, best first, and their weights in float32.

        Args:
            logits: Shape (num_rows, num_experts), contiguous rows.
            correction: Shape (num_experts,), float32; None adds nothing.
            weight_dtype: What weights are rounded to.

        Returns:
            Ids and weights, each of shape (num_rows, top_k).
        """
        num_rows, num_experts = logits.shape
        assert 0 < self.top_k <= num_experts and num_experts % self.num_groups == 0, num_experts
        assert logits.stride(1) == 1, "contiguous rows"
        experts = torch.empty(num_rows, self.top_k, dtype=torch.int64)
        weights = torch.empty(num_rows, self.top_k)
        if correction is not None:
            assert correction.shape == (num_experts,) and correction.is_contiguous()
            assert correction.dtype == torch.float32, correction.dtype
        record = RoutingRecord(
            Matrix.of(logits),
            None if correction is None else correction.data_ptr(),
            *(experts.data_ptr(), weights.data_ptr()),
            *(num_rows, num_experts, self.top_k, DTYPES[logits.dtype], DTYPES[weight_dtype]),
            *(self.scores, self.num_groups, self.kept_groups),
            *(self.family.group_best, self.divides, self.family.epsilon),
            *(self.floor, self.scale, self.cap, self.jitter),
            torch.get_num_threads(),
        )
        required_library().ost_route(ctypes.byref(record))
        return experts, weights


class PackedRouter(nn.Module):
    """Takes the place of a router of ``transformers``.

    Attributes:
        origin: The module whose parameters and buffers it shares, in a tuple.
        routing: How it chooses.
    """

    def __init__(self, router: nn.Module, routing: Routing) -> None:
        """Pack the weight of a router, or of a module that has its parameters; it stays plain."""
        super().__init__()
        self._parameters = router._parameters
        self._buffers = router._buffers
        self._modules = router._modules
        self.origin = (router,)
        self.routing = routing
        weight = self._linear.weight.detach()
        self._packed = PackedWeight([weight.float() if routing.family.is_float32 else weight])
        self.eval()

    def sync(self) -> None:
        """Pack the weight again, after it was replaced."""
        self._packed.replace(0, self._linear.weight.detach().to(self.dtype))

    def unpacked(self) -> nn.Module:
        """Return the router of ``transformers``."""
        return self.origin[0]

    @property
    def suffix(self) -> str:
        """What the name of its weight has more than its own; adapters name it so."""
        return f".{self.routing.family.linear}" if self.routing.family.linear else ""

    @property
    def _linear(self) -> nn.Linear:
        """What has the weight: a linear layer, or the router itself."""
        return cast(nn.Linear, self.get_submodule(self.routing.family.linear))

    @property
    def dtype(self) -> torch.dtype:
        """What logits are computed in."""
        return self._packed.dtype

    def forward(
        self,
        hidden_states: Tensor,
        correction: Tensor | None = None,
        edit: Callable[[Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights in float32, and experts, as the router does.

        ``edit`` gets the rows in ``dtype`` and their logits, and changes these before the choice.
        """
        family = self.routing.family
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        read, bias = rows.to(self.dtype), self._linear._parameters.get("bias")
        logits = self._packed.multiply(read, bias)
        if edit is not None:
            edit(read, logits)
        if family.correction:
            path, _, name = family.correction.rpartition(".")
            correction = cast(Tensor, getattr(self.get_submodule(path), name))
        if correction is not None:
            correction = correction.detach().flatten().float()
        weight_dtype = rows.dtype if family.is_float32 else self.dtype
        weight_dtype = weight_dtype if family.rounds else torch.float32
        experts, weights = self.routing.choose(logits, correction, weight_dtype)
        return logits, weights, experts

    def _load_from_state_dict(self, tensors: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(tensors, prefix, *arguments)
        if self.suffix:
            path = f"{prefix}{self.routing.family.linear}."
            self._linear._load_from_state_dict(tensors, path, *arguments)
        self.sync()


def family_of(module: nn.Module) -> RouterFamily | None:
    """Return what is known of a router; None if it is none, or not known."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    family = ROUTERS.get(kind.__name__.lower())
    if family is None:
        return None
    weight = cast(nn.Linear, module.get_submodule(family.linear)).weight
    return family if weight.dtype in DTYPES else None


def router_linears(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers of known routers, which are packed with them."""
    families = ((module, family_of(module)) for module in model.modules())
    known = ((module, family.linear) for module, family in families if family is not None)
    return {module.get_submodule(name) for module, name in known if name}

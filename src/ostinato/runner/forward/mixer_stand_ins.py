"""Finds out what a module with a state computes between its products.

A copy of the module is called whose linear layers give random rows, whose functions with a state
keep what they get, and whose norm does so too. Every number has a place in a projected row, so
where queries, keys, values, gates, decays and betas come from is looked up, and needs no names::

    random rows ─► [module] ─► convolution, scan and norm      seen, answered by random rows
                            ─► input of the output projection  the norm's answer?
"""

from itertools import pairwise, product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ostinato.runner.forward.decoder import Projection, StateMixer
from ostinato.runner.forward.mixer_records import (
    MAX_CHANNELS,
    MixerShape,
    MixerWeights,
    RowGating,
)
from ostinato.runner.forward.ops import Norm
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.stand_ins import (
    NUM_ROWS,
    Unknown,
    answering_linears,
    apply_norm,
    call_keywords,
    is_close,
    random_rows,
    stand_in,
)
from ostinato.runner.native.scan import MAX_TAPS
from ostinato.runner.states.mixers import bind_mixers
from ostinato.runner.states.recurrence import MixerCall, Recurrence
from ostinato.runner.states.recurrences import GatedDeltaRule, Mamba2Scan, ShortConvolution

_LOG_RATES, _SHIFTS = "A_log", "dt_bias"
Columns = np.ndarray[Any, np.dtype[np.int64]]


def mixer_of(module: nn.Module, path: str, dtype: torch.dtype) -> StateMixer:
    """Return what a module computes that carries a state.

    Args:
        module: The module.
        path: Its name in the model.
        dtype: The model's.

    Raises:
        Unknown: It computes something that the library has no operation for.
    """
    return _Seen(module, path, dtype).mixer()


class _Norming(nn.Module):
    """In place of a gated norm: random answers, and the inputs are kept."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        self._random, self.answer = random, torch.empty(0)
        self.inputs: tuple[Tensor, ...] = ()

    def forward(self, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        self.inputs = (*inputs, *keywords.values())
        self.answer = random_rows(tuple(inputs[0].shape), inputs[0].dtype, self._random)
        return self.answer


class _Carrying:
    """In place of a step's states: random answers, and the calls are kept."""

    def __init__(self, random: torch.Generator) -> None:
        self._random = random
        self.calls: list[tuple[Recurrence, MixerCall, Tensor]] = []

    def carry(self, layer: int, recurrence: Recurrence, call: MixerCall) -> Tensor:
        like = call["value"] if isinstance(recurrence, GatedDeltaRule) else call["hidden_states"]
        dtype = torch.float32 if isinstance(recurrence, Mamba2Scan) else like.dtype
        answer = random_rows(tuple(like.shape), dtype, self._random)
        self.calls.append((recurrence, call, answer))
        return answer


class _Seen:
    """What a module passes to what stands in for its parts."""

    def __init__(self, module: nn.Module, path: str, dtype: torch.dtype) -> None:
        """Call a copy of the module."""
        self._module, self._path, self._dtype = module, path, dtype
        random = torch.Generator().manual_seed(0)
        linears = {n: c for n, c in module.named_children() if is_plain_linear(c)}
        parts = {n: c for n, c in module.named_children() if n not in linears and c._parameters}
        norms = [name for name, child in parts.items() if not isinstance(child, nn.Conv1d)]
        _require(len(linears) > 1 and len(norms) == 1, f"no operation for {type(module).__name__}")
        (self._norm,), self._norming, carrying = norms, _Norming(random), _Carrying(random)
        fixed = answering_linears(module, list(linears), dtype, random)
        twin = stand_in(module, {**fixed, self._norm: self._norming})
        bind_mixers(twin, lambda: carrying)
        self._weights = {
            name: random_rows(tuple(own.shape), own.dtype, random)
            for name, own in twin.named_parameters()
        }
        rows = random_rows((1, NUM_ROWS, next(iter(linears.values())).in_features), dtype, random)
        try:
            with torch.no_grad():
                keywords = call_keywords(module, None, None, None)
                functional_call(twin, self._weights, (rows,), keywords)
        except Exception as error:  # code of any model
            raise Unknown(f"it has operations of its own ({type(error).__name__})") from error
        kinds = [type(recurrence) for recurrence, _, _ in carrying.calls]
        is_known = kinds in ([ShortConvolution, GatedDeltaRule], [ShortConvolution, Mamba2Scan])
        _require(is_known, f"it calls {', '.join(kind.name for kind in kinds)}")
        (_, self._convolution, convolved), (_, self._scan, scanned) = carrying.calls
        self._is_delta, self._convolved, self._scanned = (
            kinds[1] is GatedDeltaRule,
            convolved,
            scanned,
        )
        last = [name for name, own in fixed.items() if not any(r is rows for r in own.inputs)]
        _require(len(last) == 1, f"it has {len(last)} output projections")
        (self._combine,), self._last = last, fixed.pop(last[0]).inputs
        self._fixed = {name: own.answer[0] for name, own in fixed.items()}

    def mixer(self) -> StateMixer:
        """Return what it computes."""
        names = ("query", "key", "value") if self._is_delta else ("C", "B", "hidden_states")
        heads = [self._scan[name][0] for name in names]
        num_heads, call = heads[2].shape[1], self._convolution
        steps = tuple(n for n, own in self._fixed.items() if own.shape[1] <= 2 * num_heads)
        wide = tuple(name for name in self._fixed if name not in steps)
        projected, stepped = (
            torch.cat([self._fixed[name] for name in group], dim=-1)
            for group in (wide, steps or wide)
        )
        is_known = call["activation"] in (None, "silu", "swish")
        _require(is_known and 1 < call["weight"].shape[-1] <= MAX_TAPS, "another convolution")
        places = [_places(self._convolved[0].T, each.flatten(1)) for each in heads]
        _require(all((np.diff(each) == 1).all() for each in places), "heads that are apart")
        decays, betas, factor, limits = self._gates(stepped, num_heads)
        shape = MixerShape(
            is_delta=self._is_delta,
            num_heads=num_heads,
            num_key_heads=heads[1].shape[1],
            key_dim=heads[1].shape[2],
            value_dim=heads[2].shape[2],
            channels=_runs(_places(projected, call["hidden_states"][0].T)),
            places=(int(places[0][0]), int(places[1][0]), int(places[2][0])),
            decay_columns=tuple(decays.tolist()),
            beta_columns=tuple(betas.tolist()),
            beta_factor=factor,
            has_norms=self._is_delta,
            has_silu=call["activation"] is not None,
            step_limits=limits,
        )
        taps, bias, skips = map(self._own, (call["weight"], call["bias"], self._scan["D"]))
        rates, shifts = (self._weight(name) for name in (_LOG_RATES, _SHIFTS))
        return StateMixer(
            Projection(self._module, self._path, wide),
            Projection(self._module, self._path, steps) if steps else None,
            shape,
            MixerWeights(cast(Tensor, taps), rates, shifts, bias, skips),
            self._gating(projected),
            Projection(self._module, self._path, (self._combine,)),
        )

    def _gates(
        self, rows: Tensor, num_heads: int
    ) -> tuple[Columns, Columns, float, tuple[float, float]]:
        """Return columns of decays and betas, the factor on these, and the limits of steps."""
        call, limits = self._scan, (0.0, float("inf"))
        logs, shifts = (self._weights.get(name) for name in (_LOG_RATES, _SHIFTS))
        _require(logs is not None and shifts is not None, "decays of other weights")
        logs, shifts = cast(Tensor, logs), cast(Tensor, shifts)
        _require(logs.shape == shifts.shape == (num_heads,), "decays that heads share")
        rates = -logs.float().exp()
        if not self._is_delta:
            given = torch.tensor(call["dt_limit"] or limits, dtype=rows.dtype)  # as steps are
            is_known = call["dt_softplus"] and call["z"] is None and call["dt_bias"] is not None
            _require(is_known and torch.equal(call["A"], rates), "steps of another kind")
            low, high = given.tolist()
            return _places(rows, call["dt"][0]), np.empty(0, np.int64), 1.0, (low, high)
        _require(call["use_qk_l2norm_in_kernel"], "queries and keys of other lengths")
        decays = _nearest(
            rates * functional.softplus(rows.float()[:, :, None] + shifts.float()), call["g"][0]
        )
        opened, betas = rows.sigmoid()[:, :, None].expand(-1, -1, num_heads), call["beta"][0]
        factor = 2.0 if betas.max() > 1 else 1.0
        return decays, _nearest(opened * factor, betas), factor, limits

    def _gating(self, projected: Tensor) -> RowGating:
        """Return how the module's norm norms and gates, found out with its own code."""
        norm: Any = self._module.get_submodule(self._norm)
        inputs, answer, last = self._norming.inputs, self._norming.answer, self._last
        is_of_scan = len(inputs) == 2 and torch.equal(inputs[0].flatten(), self._scanned.flatten())
        _require(is_of_scan, "no norm of what its scan gives")
        is_last = bool(last) and torch.equal(last[0].flatten(), answer.flatten().to(last[0].dtype))
        _require(is_last, "a change of what its norm gives")
        size = inputs[0].shape[-1]
        width, epsilon = getattr(norm, "group_size", size), getattr(norm, "variance_epsilon", None)
        weight = norm._parameters.get("weight")
        is_known = epsilon is not None and weight is not None and weight.shape == (size,)
        _require(is_known and len(norm._parameters) == 1, "another norm")
        weight = cast(Tensor, weight).detach()
        _require(weight.dtype == self._dtype and not norm._modules, "another norm")
        gates = _places(projected, inputs[1].reshape(NUM_ROWS, -1)).reshape(-1, width)
        _require((np.diff(gates) == 1).all(), "gates that are apart")
        columns, plain = tuple(gates[:, 0].tolist()), Norm(None, float(cast(float, epsilon)))
        random = torch.Generator().manual_seed(0)
        drawn, opening = (random_rows(s, self._dtype, random) for s in ((size,), (NUM_ROWS, size)))
        rows = random_rows((NUM_ROWS, size), inputs[0].dtype, random)
        with torch.no_grad():
            given = functional_call(norm, {"weight": drawn}, (rows, opening)).to(self._dtype)
        for is_first, is_sigmoid in product((False, True), repeat=2):
            opened = (torch.sigmoid if is_sigmoid else functional.silu)(opening.float())
            groups = (rows * opened if is_first else rows).unflatten(-1, (-1, width))
            normed = apply_norm(plain, groups).flatten(-2) * drawn
            gated = (normed if is_first else normed * opened).to(self._dtype)
            if is_close(gated, given, self._dtype):
                own = Norm(weight, plain.epsilon)
                return RowGating(columns, width, is_sigmoid, is_first, own)
        raise Unknown("its norm gates in another way")

    def _own(self, drawn: Tensor | None) -> Tensor | None:
        """Return the module's weight in whose place another one was drawn."""
        names = {own.data_ptr(): name for name, own in self._weights.items()}
        return None if drawn is None else self._weight(names[drawn.data_ptr()])

    def _weight(self, name: str) -> Tensor:
        return self._module.get_parameter(name).detach()


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise Unknown(reason)


def _places(rows: Tensor, parts: Tensor) -> Columns:
    """Return which column of rows each column of parts is."""
    _require(rows.dtype == parts.dtype, "rows of another precision")
    own, sought = _keys(rows), _keys(parts)
    order = own.argsort()
    places = order[np.searchsorted(own[order], sought).clip(max=len(own) - 1)]
    is_equal = torch.equal(rows[:, torch.from_numpy(places)], parts)
    _require(is_equal, "it changes projected rows before it mixes them")
    return cast(Columns, places)


def _keys(rows: Tensor) -> Columns:
    """Return a number for each column, made of the first numbers in it."""
    few = rows[: 8 // rows.element_size()].T.contiguous()
    return cast(Columns, few.view(torch.int64)[:, 0].numpy())


def _nearest(candidates: Tensor, parts: Tensor) -> Columns:
    """Return for each column of parts of which column the candidate is nearest.

    Args:
        candidates: What would be made of each column for each head, shape (num_rows, num_columns,
            num_heads).
        parts: Shape (num_rows, num_heads).
    """
    nearest = (candidates.float() - parts.float()[:, None]).abs().sum(0).argmin(0)
    best = candidates.gather(1, nearest.expand(len(candidates), 1, -1))[:, 0]
    _require(is_close(best.to(parts.dtype), parts, torch.float32), "decays of another kind")
    return cast(Columns, nearest.numpy())


def _runs(places: Columns) -> tuple[tuple[int, int, int], ...]:
    """Return runs of channels whose columns are side by side: column, channel and width."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple(
        (int(places[first]), first, min(MAX_CHANNELS, end - first))
        for begin, end in pairwise([0, *breaks.tolist(), len(places)])
        for first in range(begin, end, MAX_CHANNELS)
    )

"""Finds out what a module with a state computes between its products.

A copy of the module is called whose linear layers give random rows, whose functions with a state
keep what they get, and whose norm does so too. Every number has a place in a projected row, so
where queries, keys, values, gates, decays and betas come from is looked up, and needs no names::

    random rows ─► [module] ─► convolution, scan and norm     seen, answered by random rows
                            ─► input of the output projection  the norm's answer?
"""

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ostinato.runner.forward.mixers.records import MAX_CHANNELS, MixerShape, MixerWeights, RowGating
from ostinato.runner.forward.ops import Norm
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.stand_ins import (
    NUM_ROWS,
    Fixed,
    Unknown,
    apply_norm,
    call_keywords,
    is_close,
    random_rows,
    stand_in,
)
from ostinato.runner.native.scan import MAX_TAPS
from ostinato.runner.states.mixers import bind_mixers
from ostinato.runner.states.recurrence import Call, Recurrence
from ostinato.runner.states.recurrences import GatedDeltaRule, Mamba2Scan, ShortConvolution

_LOG_RATES, _SHIFTS = "A_log", "dt_bias"
Columns = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class KnownMixer:
    """What a module computes.

    Attributes:
        project: Names of the linear layers whose rows are convolved, or have gates.
        steps: Names of those that decays and betas are made of; empty if ``project`` has them.
        combine: Name of the output projection.
        shape: Between them.
        weights: The module's own.
        gating: Of what the scan gives.
    """

    project: tuple[str, ...]
    steps: tuple[str, ...]
    combine: str
    shape: MixerShape
    weights: MixerWeights
    gating: RowGating


def mixer_of(module: nn.Module, dtype: torch.dtype) -> KnownMixer:
    """Return what a module computes that carries a state.

    Raises:
        Unknown: It computes something that the library has no operation for.
    """
    seen = _Seen(module, dtype)
    first_use = np.concatenate([seen.channels, *seen.gates])
    used = {seen.owner(column) for column in first_use.tolist()}
    groups = [n for n in seen.fixed if n in used], [n for n in seen.fixed if n not in used]
    places, total = np.empty(seen.rows.shape[1], dtype=np.int64), [0, 0]
    for name, columns in seen.columns.items():
        group = int(name not in used)
        places[columns] = np.arange(total[group], total[group] + len(columns))
        total[group] += len(columns)
    decays, betas = seen.decays, seen.betas
    owners = {seen.owner(column) in used for column in (*decays.tolist(), *betas.tolist())}
    if len(owners) != 1:
        raise Unknown("decays and betas are of different projections")
    shape = MixerShape(
        is_delta=seen.is_delta,
        num_heads=seen.values.shape[1],
        num_key_heads=seen.keys.shape[1],
        key_dim=seen.keys.shape[2],
        value_dim=seen.values.shape[2],
        channels=_runs(places[seen.channels]),
        places=seen.places,
        decay_columns=tuple(places[decays].tolist()),
        beta_columns=tuple(places[betas].tolist()),
        beta_factor=seen.beta_factor,
        has_norms=seen.is_delta,
        has_silu=seen.convolution["activation"] is not None,
        step_limits=seen.step_limits,
    )
    first = tuple(int(places[columns[0]]) for columns in seen.gates)
    gating = _gating_of(seen, first, dtype)
    names = tuple(groups[0]), () if owners == {True} else tuple(groups[1])
    return KnownMixer(*names, seen.combine, shape, seen.weights(), gating)


class _Norming(nn.Module):
    """In place of a gated norm: one answer for each number, and the inputs are kept."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        self._random, self.answer = random, torch.empty(0)
        self.inputs: tuple[Tensor, ...] = ()

    def forward(self, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        self.inputs = (*inputs, *keywords.values())
        self.answer = random_rows(tuple(inputs[0].shape), inputs[0].dtype, self._random)
        return self.answer


class _Carrying:
    """In place of a step's states: keeps each call, and answers it with random numbers."""

    def __init__(self, random: torch.Generator) -> None:
        self._random = random
        self.calls: list[tuple[Recurrence, Call, Tensor]] = []

    def carry(self, layer: int, recurrence: Recurrence, call: Call) -> Tensor:
        like = call["value"] if isinstance(recurrence, GatedDeltaRule) else call["hidden_states"]
        dtype = torch.float32 if isinstance(recurrence, Mamba2Scan) else like.dtype
        answer = random_rows(tuple(like.shape), dtype, self._random)
        self.calls.append((recurrence, call, answer))
        return answer


class _Seen:
    """What a module passes to what stands in for its parts.

    Attributes:
        fixed: Its linear layers that get its input, by name.
        columns: The places of their outputs in a projected row.
        rows: What they gave, joined: shape (num_rows, num_columns).
        combine: Name of the output projection.
        norm: Name of the gated norm.
        convolution: The convolution's call.
        channels: Places of its channels.
        places: First channels of queries, keys and values.
        keys: Shape (num_rows, num_key_heads, key_dim).
        values: Shape (num_rows, num_heads, value_dim).
        gates: Places of the gates that the norm gets, by rows of it.
        decays: Places of what decays are made of.
        betas: Likewise; empty for Mamba 2.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, random = module, torch.Generator().manual_seed(0)
        self._call(module, dtype, random)
        carried, names = self._carrying.calls, [type(each[0]) for each in self._carrying.calls]
        if names not in ([ShortConvolution, GatedDeltaRule], [ShortConvolution, Mamba2Scan]):
            raise Unknown(f"it calls {', '.join(each.name for each in names) or 'no function'}")
        self.convolution, self.is_delta = carried[0][1], names[1] is GatedDeltaRule
        if self.convolution["activation"] not in (None, "silu", "swish"):
            raise Unknown("its convolution has another activation than SiLU")
        if not 1 < self.convolution["weight"].shape[-1] <= MAX_TAPS:
            raise Unknown(f"its convolution has more than {MAX_TAPS} inputs")
        self.channels = _places(self.rows, self.convolution["hidden_states"][0].T)
        self._see_scan(carried[1][1], carried[0][2][0].T)
        self._see_norm(carried[1][2], dtype)

    def _call(self, module: nn.Module, dtype: torch.dtype, random: torch.Generator) -> None:
        linears = {n: c for n, c in module.named_children() if is_plain_linear(c)}
        normed = [
            name
            for name, child in module.named_children()
            if name not in linears and not isinstance(child, nn.Conv1d) and child._parameters
        ]
        if len(linears) < 2 or len(normed) != 1:
            raise Unknown(f"no operation for {type(module).__name__}")
        (self.norm,), self.norming = normed, _Norming(random)
        fixed = {
            name: Fixed(random_rows((1, NUM_ROWS, own.out_features), dtype, random))
            for name, own in linears.items()
        }
        twin, self._carrying = (
            stand_in(module, {**fixed, self.norm: self.norming}),
            _Carrying(random),
        )
        bind_mixers(twin, lambda: self._carrying)
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
        self.fixed = {n: own for n, own in fixed.items() if own.input is rows}
        others = [name for name in fixed if name not in self.fixed]
        if len(others) != 1 or not self.fixed:
            raise Unknown(f"{type(module).__name__} has {len(others)} output projections")
        (self.combine,), self._last = others, fixed[others[0]]
        self.rows = torch.cat([own.output[0] for own in self.fixed.values()], dim=-1)
        self.columns, first = dict[str, Columns](), 0
        for name, own in self.fixed.items():
            self.columns[name] = np.arange(first, first := first + own.output.shape[-1])

    def _see_scan(self, call: Call, convolved: Tensor) -> None:
        names = ("query", "key", "value") if self.is_delta else ("C", "B", "hidden_states")
        queries, self.keys, self.values = (call[name][0] for name in names)
        first = []
        for heads in (queries, self.keys, self.values):
            places = _places(convolved, heads.flatten(1))
            if (np.diff(places) != 1).any():
                raise Unknown("its queries, keys or values are not side by side")
            first.append(int(places[0]))
        self.places = first[0], first[1], first[2]
        rates, shifts = (self._weights.get(name) for name in (_LOG_RATES, _SHIFTS))
        own = self.values.shape[1:2]
        if rates is None or shifts is None or not rates.shape == shifts.shape == own:
            raise Unknown("its decays are made of other weights")
        self.step_limits, self.beta_factor = (0.0, float("inf")), 1.0
        rates, raw = -rates.float().exp(), self.rows.float()[:, :, None]
        if not self.is_delta:
            self._skips = call["D"]
            self.decays, self.betas = _places(self.rows, call["dt"][0]), np.empty(0, np.int64)
            self.step_limits = call["dt_limit"] or self.step_limits
            limits = torch.tensor(self.step_limits, dtype=self.rows.dtype)
            self.step_limits = cast(tuple[float, float], tuple(limits.tolist()))
            is_known = call["dt_softplus"] and call["z"] is None and call["dt_bias"] is not None
            if not is_known or not torch.equal(call["A"], rates):
                raise Unknown("its steps are made in another way")
            return
        self._skips = None
        if not call["use_qk_l2norm_in_kernel"]:
            raise Unknown("its queries and keys are not of length 1")
        taken = np.unique(self.channels)
        rest = np.setdiff1d(np.arange(self.rows.shape[1]), taken)
        logs = rates * functional.softplus(raw[:, rest] + shifts.float())
        self.decays = _nearest(rest, logs, call["g"][0])
        opened = self.rows[:, rest, None].sigmoid()
        for self.beta_factor in (1.0, 2.0):
            betas = (opened * self.beta_factor).expand(-1, -1, self.values.shape[1])
            try:
                self.betas = _nearest(rest, betas, call["beta"][0])
                return
            except Unknown:
                continue
        raise Unknown("its betas are no sigmoids")

    def _see_norm(self, scanned: Tensor, dtype: torch.dtype) -> None:
        inputs, answer, last = self.norming.inputs, self.norming.answer, self._last.input
        if len(inputs) != 2 or not torch.equal(inputs[0].flatten(), scanned.flatten()):
            raise Unknown("what its scan gives is not normed with gates")
        if last is None or not torch.equal(last.flatten(), answer.flatten().to(dtype)):
            raise Unknown("what its norm gives is changed")
        self.width = inputs[0].shape[-1]
        gates = _places(self.rows, inputs[1].reshape(NUM_ROWS, -1))
        weight = self._module.get_submodule(self.norm)._parameters.get("weight")
        groups = int(getattr(self._module.get_submodule(self.norm), "group_size", self.width))
        if weight is None or len(gates) % groups or weight.shape != (self.width,):
            raise Unknown("its norm has other groups")
        self.gates = gates.reshape(-1, groups)
        if (np.diff(self.gates) != 1).any():
            raise Unknown("its gates are not side by side")

    def owner(self, column: int) -> str:
        """Return the linear layer that gives a column."""
        return next(name for name, own in self.columns.items() if own[0] <= column <= own[-1])

    def weights(self) -> MixerWeights:
        """Return the module's weights."""
        names = {own.data_ptr(): name for name, own in self._weights.items()}
        call = self.convolution

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else self.weight(names[tensor.data_ptr()])

        taps, bias, skips = (own(each) for each in (call["weight"], call["bias"], self._skips))
        assert taps is not None, "a convolution"
        return MixerWeights(taps, self.weight(_LOG_RATES), self.weight(_SHIFTS), bias, skips)

    def weight(self, name: str) -> Tensor:
        """Return a weight of the module."""
        return self._module.get_parameter(name).detach()


def _gating_of(seen: _Seen, columns: tuple[int, ...], dtype: torch.dtype) -> RowGating:
    """Return how the module's norm norms and gates; found out with its own code."""
    module, width = seen._module.get_submodule(seen.norm), seen.gates.shape[1]
    random = torch.Generator().manual_seed(0)
    weight, epsilon = seen.weight(f"{seen.norm}.weight"), getattr(module, "variance_epsilon", None)
    if epsilon is None or module._buffers or module._modules or len(module._parameters) > 1:
        raise Unknown("its norm has other parts")
    if weight.dtype != dtype:
        raise Unknown("its norm has weights of another dtype")
    drawn = random_rows(tuple(weight.shape), dtype, random)
    rows, gates = (
        random_rows((NUM_ROWS, seen.width), each, random)
        for each in (seen.norming.inputs[0].dtype, dtype)
    )
    with torch.no_grad():
        given = functional_call(module, {"weight": drawn}, (rows, gates)).to(dtype)
    wide = gates.float()
    for is_first, is_sigmoid in product((False, True), repeat=2):
        opened = wide.sigmoid() if is_sigmoid else functional.silu(wide)
        inputs = (rows * opened if is_first else rows).unflatten(-1, (-1, width))
        normed = apply_norm(Norm(None, float(epsilon)), inputs).flatten(-2) * drawn
        if is_close((normed if is_first else normed * opened).to(dtype), given, dtype):
            return RowGating(columns, width, is_sigmoid, is_first, Norm(weight, float(epsilon)))
    raise Unknown("its norm gates in another way")


def _places(rows: Tensor, parts: Tensor) -> Columns:
    """Return which column of rows each column of parts is.

    Raises:
        Unknown: One of them is none.
    """
    if rows.dtype == parts.dtype:
        own, sought = _keys(rows), _keys(parts)
        order = own.argsort()
        places = order[np.searchsorted(own[order], sought).clip(max=len(own) - 1)]
        if torch.equal(rows[:, torch.from_numpy(places)], parts):
            return cast(Columns, places)
    raise Unknown("it changes projected rows before it mixes them")


def _keys(rows: Tensor) -> Columns:
    """Return a number for each column, made of the first numbers in it."""
    few = rows[: 8 // rows.element_size()].T.contiguous()
    return cast(Columns, few.view(torch.int64)[:, 0].numpy())


def _nearest(places: Columns, made: Tensor, parts: Tensor) -> Columns:
    """Return for each column of parts of which place what is made of it is nearest.

    Args:
        places: Of columns.
        made: What would be made of each for each head, shape (num_rows, num_places, num_heads).
        parts: Shape (num_rows, num_heads).
    """
    nearest = (made.float() - parts.float()[:, None]).abs().sum(0).argmin(0)
    found = made.gather(1, nearest.expand(len(made), 1, -1))[:, 0]
    if not is_close(found.to(parts.dtype), parts, torch.float32):
        raise Unknown("its decays are made in another way")
    return cast(Columns, places[nearest.numpy()])


def _runs(places: Columns) -> tuple[tuple[int, int, int], ...]:
    """Return runs of channels whose columns are side by side: column, channel and width."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *breaks.tolist(), len(places)]
    return tuple(
        (int(places[first]), first, min(MAX_CHANNELS, end - first))
        for begin, end in pairwise(bounds)
        for first in range(begin, end, MAX_CHANNELS)
    )

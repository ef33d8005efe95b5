"""The functions of ``transformers`` that carry a state, and how they are called.

A recurrent layer (a mixer) projects its row of tokens, mixes tokens with one or two functions that
carry a state, and projects again. Only those functions must see one sequence at a time, so only
they are replaced, by name::

    causal_conv1d_fn               last inputs of a convolution     all but MiniMax
    torch_chunk_gated_delta_rule   gated delta rule (2412.06464)    Qwen3-Next, Qwen3.5, OLMo
    chunk_kimi_delta_attention     Kimi delta attention (2510.26692)  Kimi Linear
    mamba2_chunk_scan              Mamba 2 (2405.21060)             Granite 4, Bamba, Nemotron-H
    mamba_selective_scan           Mamba (2312.00752)               Jamba, Mamba, Falcon Mamba
    lightning attention            a decayed sum (2401.04658)       MiniMax-01

Each has a form for many tokens (``chunk``), and most scans have one for a single token (``step``):
``generate`` uses the same two in prefill and decode.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.runner.native.scan import MAX_TAPS, Scan, convolve, native_for
from ostinato.runner.states.recurrence import MixerCall, Recurrence, State


class ShortConvolution(Recurrence):
    """A causal convolution; its state is the earlier inputs that the next token needs."""

    name = "causal_conv1d_fn"
    axes: ClassVar = {"hidden_states": 2}
    output_axis = 2

    def chunk(self, call: MixerCall, state: State | None) -> tuple[Tensor, State]:
        """Convolve with the earlier inputs; see ``Recurrence``."""
        inputs = call["hidden_states"]  # (num_sequences, num_channels, num_tokens)
        num_kept, num_tokens = call["weight"].shape[-1] - 1, inputs.shape[-1]
        if state is None:
            state = inputs.new_zeros(*inputs.shape[:2], num_kept)
        native = native_for(inputs, state) if 0 < num_kept < MAX_TAPS else None
        if native is not None and call["activation"] in (None, "silu", "swish"):
            tokens, earlier = inputs.transpose(1, 2), state.transpose(1, 2)
            has_silu, weights = call["activation"] is not None, (call["weight"], call["bias"])
            output = convolve(native, tokens, earlier, *weights, has_silu)
            last = inputs[..., max(0, num_tokens - num_kept) :]
            return output.transpose(1, 2), torch.cat([state, last], dim=-1)[..., -num_kept:]
        seen = torch.cat([state, inputs], dim=-1)
        convolved = call.changed(lambda name, value: seen if name == "hidden_states" else value)
        return convolved.run()[..., -num_tokens:], seen[..., num_tokens:]


class GatedDeltaRule(Recurrence):
    """The gated delta rule; its state is a matrix per head that maps keys to values."""

    name = "torch_chunk_gated_delta_rule"
    axes: ClassVar = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
    gives_state = True
    recurrent: ClassVar = "torch_recurrent_gated_delta_rule"

    def chunk(self, call: MixerCall, state: State | None) -> tuple[Tensor, State]:
        """Compute in chunks of 64 tokens, natively if the inputs' format allows.

        See ``Recurrence``.
        """
        queries, keys, values, gates, betas = (call[name] for name in self.axes)
        native = native_for(queries, keys, values) if gates.ndim == 3 else None
        if native is not None:
            scan = Scan(
                is_delta=True,
                has_norms=bool(call["use_qk_l2norm_in_kernel"]),
                query_scale=queries.shape[-1] ** -0.5,
                output_dtype=values.dtype,
            )
            return scan.run(native, state, (queries, keys, values), (gates, betas))
        output, after = call.run(initial_state=state, output_final_state=True)
        return output, after

    def step(self, call: MixerCall, states: State) -> tuple[Tensor, State]:
        """Decay, update and read each matrix; see ``Recurrence``."""
        recurrent = replace(call, function=call.siblings[self.recurrent])
        output, after = recurrent.run(initial_state=states, output_final_state=True)
        return output, after


class KimiDeltaAttention(GatedDeltaRule):
    """The delta rule with a gate per channel."""

    name = "chunk_kimi_delta_attention"
    recurrent: ClassVar = "recurrent_kimi_delta_attention"


class Mamba2Scan(Recurrence):
    """The state space of Mamba 2, with one decay per head."""

    name = "mamba2_chunk_scan"
    axes: ClassVar = dict.fromkeys(("hidden_states", "dt", "B", "C"), 1)

    def chunk(self, call: MixerCall, state: State | None) -> tuple[Tensor, State]:
        """Compute in chunks of 64 tokens, natively if the inputs' format allows.

        See ``Recurrence``.
        """
        scanned = self._scanned(call, state)
        return scanned or call.run(initial_states=state, return_final_states=True)

    def step(self, call: MixerCall, states: State) -> tuple[Tensor, State]:
        """Decay each state, add to it and read it; see ``Recurrence``.

        Time steps are limited here too, as in the model's forward without a cache. ``generate``
        limits them in prompts only, so a state would depend on how it was computed.
        """
        if (scanned := self._scanned(call, states, True)) is not None:
            return scanned
        inputs, dt, keys, queries = (call[name][:, 0] for name in ("hidden_states", "dt", "B", "C"))
        head_dim, state_size = inputs.shape[-1], keys.shape[-1]
        dt = functional.softplus(dt + call["dt_bias"].to(dt.dtype)).clamp(*call["dt_limit"])
        output = call.siblings["mamba2_selective_state_update"](
            states,  # changed in place
            inputs,
            dt[..., None].expand(-1, -1, head_dim),
            call["A"][:, None, None].expand(-1, head_dim, state_size),
            keys,
            queries,
            call["D"][:, None].expand(-1, head_dim),
        )
        return _as_scanned(output)[:, None], states

    def _scanned(
        self, call: MixerCall, state: State | None, in_place: bool = False
    ) -> tuple[Tensor, State] | None:
        """Compute natively; None if the inputs' format does not allow it."""
        inputs, dt, keys, queries = (call[name] for name in self.axes)
        native = native_for(queries, keys, inputs, dt) if call["dt_softplus"] else None
        if native is None:
            return None
        if call["dt_bias"] is not None:
            dt = dt + call["dt_bias"].to(dt.dtype)
        limits = torch.tensor(call["dt_limit"] or (0.0, float("inf")), dtype=dt.dtype)
        low, high = limits.tolist()  # rounded as steps are
        scan = Scan(has_values_first=True, skips=call["D"], step_limits=(low, high))
        return scan.run(native, state, (queries, keys, inputs), (call["A"], dt), in_place)


class MambaScan(Recurrence):
    """The state space of Mamba, with one decay per channel and state.

    The function takes no initial state. Since the result is linear in the state, the contribution
    of an earlier state is added afterwards.
    """

    name = "mamba_selective_scan"
    axes: ClassVar = dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2)
    output_axis = 2

    def chunk(self, call: MixerCall, state: State | None) -> tuple[Tensor, State]:
        """Scan token by token; see ``Recurrence``."""
        output, after = call.run(return_last_state=True)
        if state is None:
            return _as_scanned(output), after
        dt = call["dt"]
        if call["delta_bias"] is not None:
            dt = dt + call["delta_bias"].to(dt.dtype)[:, None]
        if call["delta_softplus"]:
            dt = functional.softplus(dt)
        steps = dt.to(after.dtype).cumsum(dim=2)  # (1, num_channels, num_tokens)
        carried = (call["A"][:, None] * steps[..., None]).exp() * state[:, :, None]
        read = torch.einsum("bdtn,bnt->bdt", carried, call["C"].to(carried.dtype))
        if call["z"] is not None:
            read = read * functional.silu(call["z"])
        return _as_scanned(output + read), after + carried[:, :, -1]

    def step(self, call: MixerCall, states: State) -> tuple[Tensor, State]:
        """Decay each state, add to it and read it; see ``Recurrence``."""
        inputs, dt, keys, queries = (call[n][..., 0] for n in ("hidden_states", "dt", "B", "C"))
        gate = call["z"]
        output = call.siblings["mamba_selective_state_update"](
            states,  # changed in place
            inputs,
            dt,
            call["A"],
            keys,
            queries,
            call["D"],
            z=None if gate is None else gate[..., 0],
            dt_bias=call["delta_bias"],
            dt_softplus=call["delta_softplus"],
        )
        return _as_scanned(output)[..., None], states


class LightningAttention(Recurrence):
    """A decayed sum per head: MiniMax's whole layer, since it has no separate function for it."""

    name = "get_linear_cache"
    axes: ClassVar = {"hidden_states": 1}
    gives_state = True

    def chunk(self, call: MixerCall, state: State | None) -> tuple[Tensor, State]:
        """Compute by blocks at the beginning of a sequence, later token by token."""
        cache = _LinearCache(state)
        output, after = call.run(past_key_values=cache)
        return output, after


class _LinearCache:
    """The cache that the layer expects."""

    def __init__(self, state: State | None) -> None:
        self._state = state

    def get_linear_cache(self, _layer: int) -> State | None:
        return self._state

    def set_linear_cache(self, _layer: int, state: State) -> None:
        self._state = state


RECURRENCES: Mapping[str, Recurrence] = {
    each.name: each
    for each in (
        ShortConvolution(),
        GatedDeltaRule(),
        KimiDeltaAttention(),
        Mamba2Scan(),
        MambaScan(),
    )
}
"""All that are functions of a module, by name."""


def _as_scanned(output: Tensor) -> Tensor:
    """Return an output in the precision of a scan, float32 or wider."""
    return output.to(torch.promote_types(output.dtype, torch.float32))

"""Which forward does a model get?

::

    auto     fused, if the model is a decoder that we know and it comes out the same; else packed
    packed   the modules of transformers, their linear layers with packed weights
    plain    the modules of transformers as they are

Whatever is chosen has answered the probe's prompt in chunks, in scattered blocks, as the plain
modules did.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.core.config import ForwardName
from ostinato.runner.forward.decoder import take_apart, unlike
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.ops import NativeOps
from ostinato.runner.forward.packing import pack_linears, unpack_linears, why_unpacked
from ostinato.runner.forward.records import DTYPES
from ostinato.runner.model_call import ModelCall
from ostinato.runner.native.library import library
from ostinato.runner.probe import Probed, StepCall, through_blocks

_MOST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 0.02}
_MOST_DIFFERENCE_ROUGH = 0.05
"""Largest difference of logits, relative to their spread, that another order of sums explains; the
rest is bfloat16. The median of the prompt's rows is compared: experts may change over a tie."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenForward:
    """How the steps of a model are computed.

    Attributes:
        name: ``fused``, ``packed`` or ``plain``.
        reason: Why it is not ``fused``; empty if it is.
        fused: Computes steps in place of the model; None where the model does so itself.
    """

    name: str
    reason: str = ""
    fused: FusedForward | None = None


def choose_forward(model: PreTrainedModel, probed: Probed, wanted: ForwardName) -> ChosenForward:
    """Make a model as fast as it can be made without computing anything else.

    Args:
        model: In evaluation mode, with our attention.
        probed: What the probe found when it was plain.
        wanted: What the user allows.

    Effects: may replace linear layers of the model.
    """
    if wanted == "plain":
        return ChosenForward("plain", "forward='plain' is set")
    if (unpacked := why_unpacked(model.dtype, model.device)) is not None:
        return ChosenForward("plain", unpacked)
    reason = "forward='packed' is set"
    if wanted == "auto":
        fused = _try_fused(model, probed)
        if isinstance(fused, FusedForward):
            return ChosenForward("fused", fused=fused)
        reason = fused
    return _try_packed(model, probed, reason)


def _try_fused(model: PreTrainedModel, probed: Probed) -> FusedForward | str:
    """Return the fused forward; why there is none for this model, which stays plain then."""
    native, dtype = library(), str(model.dtype).removeprefix("torch.")
    assert native is not None, "weights can be packed"
    if model.dtype not in DTYPES:
        return f"there are no fused operations in {dtype}"
    if (difference := unlike(model)) is not None:
        return f"{type(model).__name__} is not built like Llama: {difference}"
    with torch.no_grad():
        fused = FusedForward(take_apart(model, probed.styles), NativeOps(native))
    different = _difference(model, probed, fused)
    if different is None:
        return fused
    unpack_linears(model)
    return f"fused, {different}"


def _try_packed(model: PreTrainedModel, probed: Probed, reason: str) -> ChosenForward:
    """Pack the linear layers, if the model comes out the same."""
    with torch.no_grad():
        pack_linears(model)
    different = _difference(model, probed, ModelCall(model))
    if different is None:
        return ChosenForward("packed", reason)
    unpack_linears(model)
    return ChosenForward("plain", f"{reason}; packed, {different}")


def _difference(model: PreTrainedModel, probed: Probed, call: StepCall) -> str | None:
    """Say by how much logits differ from the plain modules'; None if rounding explains it."""
    with torch.inference_mode():
        found: Tensor = through_blocks(probed.spec, call, model, probed.attention).double()
    spread = probed.logits.std(dim=1)
    away = float(((found - probed.logits).square().mean(dim=1).sqrt() / spread).median())
    if away <= _MOST_DIFFERENCE.get(model.dtype, _MOST_DIFFERENCE_ROUGH):
        return None
    return f"its logits differ by {away:.2g} of their spread"

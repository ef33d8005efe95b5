"""Which forward does a model get?

::

    auto     fused, if the model is a decoder that we know and it comes out the same; else packed
    packed   the modules of transformers, their linear layers with packed weights
    plain    the modules of transformers as they are

Whatever is chosen has answered the probe's prompt in chunks, in scattered blocks, as the plain
modules did.
"""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.core.config import ForwardName
from ostinato.runner.forward.decoder import take_apart, unlike
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.ops import NativeOps
from ostinato.runner.forward.packing import can_pack, pack_linears, unpack_linears
from ostinato.runner.forward.records import DTYPES
from ostinato.runner.model_call import ModelCall
from ostinato.runner.native.library import library
from ostinato.runner.probe import Probed, StepCall, through_blocks

logger = logging.getLogger(__name__)

_MOST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 0.02}
_MOST_DIFFERENCE_ROUGH = 0.05
"""Largest difference of logits, relative to their spread, that another order of sums explains; the
rest is bfloat16. The median of the prompt's rows is compared: experts may change over a tie."""


def choose_forward(
    model: PreTrainedModel, probed: Probed, wanted: ForwardName
) -> FusedForward | None:
    """Make a model as fast as it can be made without computing anything else.

    Args:
        model: In evaluation mode, with our attention.
        probed: What the probe found when it was plain.
        wanted: What the user allows.

    Returns:
        What to call in place of the model; None if that is the model itself.

    Effects: may replace linear layers by packed ones; says at info level what was chosen.
    """
    if wanted == "plain" or not can_pack(model.dtype, model.device):
        return None
    fused = _try_fused(model, probed) if wanted == "auto" else None
    if fused is None:
        _try_packed(model, probed)
    return fused


def _try_fused(model: PreTrainedModel, probed: Probed) -> FusedForward | None:
    """Return the fused forward, if there is one for this model; else leave the model plain."""
    native = library()
    reason = unlike(model) if model.dtype in DTYPES else f"no fused operations for {model.dtype}"
    if native is None or reason is not None:
        logger.info("%s runs its own modules: %s", type(model).__name__, reason)
        return None
    with torch.no_grad():
        fused = FusedForward(take_apart(model, probed.styles), NativeOps(native))
    found = _difference(model, probed, fused)
    if found <= _limit(model.dtype):
        logger.info("%s runs fused", type(model).__name__)
        return fused
    unpack_linears(model)
    logger.info(
        "%s runs its own modules: fused, its logits differ by %.2g of their spread",
        type(model).__name__,
        found,
    )
    return None


def _try_packed(model: PreTrainedModel, probed: Probed) -> None:
    """Pack the linear layers, if the model comes out the same."""
    with torch.no_grad():
        num_packed = pack_linears(model)
    found = _difference(model, probed, ModelCall(model))
    if found <= _limit(model.dtype):
        logger.info("%s has %d packed linear layers", type(model).__name__, num_packed)
        return
    unpack_linears(model)
    logger.info(
        "%s keeps plain weights: packed, its logits differ by %.2g of their spread",
        type(model).__name__,
        found,
    )


def _difference(model: PreTrainedModel, probed: Probed, call: StepCall) -> float:
    """Return by how much of their spread logits differ from the plain modules'."""
    with torch.inference_mode():
        found: Tensor = through_blocks(probed.spec, call, model, probed.attention).double()
    spread = probed.logits.std(dim=1)
    return float(((found - probed.logits).square().mean(dim=1).sqrt() / spread).median())


def _limit(dtype: torch.dtype) -> float:
    return _MOST_DIFFERENCE.get(dtype, _MOST_DIFFERENCE_ROUGH)

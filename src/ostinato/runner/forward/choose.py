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
from ostinato.runner.rounding import in_roundings

logger = logging.getLogger(__name__)

_MOST_ROUNDINGS = 1.0
"""Largest difference of logits from the plain modules', in multiples of what rounding explains."""


def choose_forward(
    model: PreTrainedModel, call: ModelCall, probed: Probed, wanted: ForwardName
) -> FusedForward | None:
    """Make a model as fast as it can be made without computing anything else.

    Args:
        model: In evaluation mode, with our attention.
        call: Calls it.
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
        _try_packed(model, call, probed)
    return fused


def _try_fused(model: PreTrainedModel, probed: Probed) -> FusedForward | None:
    """Return the fused forward, if there is one for this model; else leave the model plain."""
    native = library() if model.dtype in DTYPES else None
    reason = unlike(model)
    if native is None or reason is not None:
        missing = f"no native operations for {model.dtype}" if native is None else reason
        logger.info("%s runs its own modules: %s", type(model).__name__, missing)
        return None
    with torch.no_grad():
        fused = FusedForward(take_apart(model, probed.styles), NativeOps(native))
    found = _difference(model, probed, fused)
    if found <= _MOST_ROUNDINGS:
        logger.info("%s runs fused", type(model).__name__)
        return fused
    unpack_linears(model)
    logger.info(
        "%s runs its own modules: fused, its logits differ by %.2g times what rounding explains",
        type(model).__name__,
        found,
    )
    return None


def _try_packed(model: PreTrainedModel, call: ModelCall, probed: Probed) -> None:
    """Pack the linear layers, if the model comes out the same."""
    with torch.no_grad():
        num_packed = pack_linears(model)
    found = _difference(model, probed, call)
    if found <= _MOST_ROUNDINGS:
        logger.info("%s has %d packed linear layers", type(model).__name__, num_packed)
        return
    unpack_linears(model)
    logger.info(
        "%s keeps plain weights: packed, its logits differ by %.2g times what rounding explains",
        type(model).__name__,
        found,
    )


def _difference(model: PreTrainedModel, probed: Probed, call: StepCall) -> float:
    """Return how far logits are from the plain modules', see ``in_roundings``."""
    with torch.inference_mode():
        found = through_blocks(probed.spec, call, model, probed.attention)
    return in_roundings(found, probed.logits, probed.noise)

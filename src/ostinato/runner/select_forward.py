"""Chooses the forward for a model.

::

    auto     fused, if the decoder is supported and gives equal results; else packed
    packed   the modules of transformers, their linear layers with packed weights
    plain    the modules of transformers as they are

The chosen forward gives the logits of the plain modules for the probe's prompt, computed in chunks
and scattered blocks. Quantized weights are always packed, and the fused forward is compared with
modules of the same weights.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from ostinato.errors import ConfigError, UnsupportedModel
from ostinato.runner.attention.backend import CallsModel
from ostinato.runner.attention_choice import on_device
from ostinato.runner.experts.mixture import why_modules
from ostinato.runner.forward.decoder import Decoder
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.ops import DTYPES
from ostinato.runner.forward.packing import (
    pack_linears,
    pack_plain,
    share_in_linears,
    unpack_linears,
    why_unpacked,
)
from ostinato.runner.forward.quantized import Quantization, unstack
from ostinato.runner.forward.stand_ins import Unknown
from ostinato.runner.forward.structure import describe_decoder, pack_decoder, pack_model
from ostinato.runner.gpu.availability import why_not_on_device
from ostinato.runner.gpu.device_forward import DeviceForward, buffers_on_cpu
from ostinato.runner.gpu.device_weights import DevicePack
from ostinato.runner.model_call import ModelCall
from ostinato.runner.native.packed import required_library
from ostinato.runner.probe import Probed, through_blocks
from ostinato.runner.sampling.rounding import in_roundings, with_codes
from ostinato.runner.settings import ForwardName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIN_SHARE = 0.5
"""Minimum share of linear layers in a quantized model's weights, embeddings left out; with less,
quantizing saves little memory and time."""

_MAX_ROUNDINGS = 1.0
"""Largest difference of logits from the plain modules', in multiples of what rounding explains."""


Forward: TypeAlias = FusedForward | DeviceForward
"""Computes the steps of a decoder; called like a ``ModelCall``."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenForward:
    """How the steps of a model are computed.

    Attributes:
        name: ``fused``, ``packed`` or ``plain``.
        reason: Why it is not ``fused``, or which modules are called; empty if all is fused.
        fused: Computes steps in place of the model; None where the model does so itself.
    """

    name: str
    reason: str = ""
    fused: Forward | None = None


def choose_forward(
    model: "PreTrainedModel",
    call: ModelCall,
    probed: Probed,
    forward: ForwardName,
    quantization: Quantization | None = None,
    same_bits: bool = False,
) -> ChosenForward:
    """Make a model as fast as possible without changing its results.

    Args:
        model: In evaluation mode, with our attention.
        call: Calls it.
        probed: The probe's result with plain modules.
        forward: The setting ``forward``.
        quantization: How weights are quantized; None leaves them as they are.
        same_bits: Whether a device other than a CPU must give a row the same bits in any step.

    Raises:
        ConfigError: Quantized weights or the same bits are requested, and not supported here.
        UnsupportedModel: Likewise, because of the model.

    Effects: may replace linear layers of the model.
    """
    if on_device(probed.attention, model.device) and (quantization or forward != "plain"):
        return _choose_on_device(model, call, probed, quantization, same_bits)
    if quantization is not None:
        _check_quantizable(model, quantization)
    elif forward == "plain":
        return ChosenForward("plain", "forward='plain' is set")
    elif (unpacked := why_unpacked(model.dtype, model.device)) is not None:
        return ChosenForward("plain", unpacked)
    pack = pack_plain if quantization is None else quantization
    decoder, reason = None, "forward='packed' is set"
    if forward != "packed":
        decoder, reason = _described(model, probed)
    with torch.no_grad():
        if decoder is not None:
            pack_model(model, decoder, pack)
            fused = FusedForward(decoder, required_library(), call)
            if quantization is not None:
                probed = _probed_again(model, call, probed, quantization)
            if (different := _difference(model, probed, fused)) is None:
                reasons = filter(None, (fused.called, why_modules(model)))
                return ChosenForward("fused", "; ".join(reasons), fused)
            reason = f"fused, {different}"
            if quantization is None:
                unpack_linears(model)
            else:
                unstack(model)
        pack_linears(model, pack)
    reason = "; ".join(filter(None, (reason, why_modules(model))))
    if quantization is not None or (different := _difference(model, probed, call)) is None:
        return ChosenForward("packed", reason)
    unpack_linears(model)
    return ChosenForward("plain", f"{reason}; packed, {different}")


def _choose_on_device(
    model: "PreTrainedModel",
    call: ModelCall,
    probed: Probed,
    quantization: Quantization | None,
    same_bits: bool,
) -> ChosenForward:
    """Fuse a model whose steps a device computes; see ``gpu.device_forward``."""
    name = None if quantization is None else quantization.name
    if quantization is not None and quantization.activations.bits and name in ("int8", "int4"):
        name = f"{name} with activation_dtype='int8'"  # refused as w8a8 is
    with buffers_on_cpu(model):
        decoder, reason = _described(model, probed, for_device=True)
        reason = reason or why_not_on_device(model, name) or ""
    if decoder is not None and not reason:
        with torch.no_grad():
            pack_decoder(model, decoder, DevicePack(name, same_bits))
        fused = DeviceForward(decoder, call, same_bits)
        if quantization is not None:
            probed = _probed_again(model, call, probed, quantization)
        if same_bits and not fused.promises_bits:
            raise ConfigError(f"same_bits=True: {fused.called}: set same_bits=False")
        if (different := _difference(model, probed, fused)) is None:
            return ChosenForward("fused", fused.called, fused)
        reason = f"fused, {different}"
        unpack_linears(model)
    for setting, value in (("quantization", name), ("same_bits", same_bits)):
        if value:
            raise ConfigError(
                f"{setting}={value!r} needs the fused forward, and {reason}: unset it"
            )
    return ChosenForward("plain", reason)


def _probed_again(
    model: "PreTrainedModel", call: ModelCall, probed: Probed, quantization: Quantization
) -> Probed:
    """Return what the modules give with quantized weights."""
    with torch.inference_mode():
        logits = through_blocks(probed.spec, probed.states, call, model, probed.attention)
    noise = with_codes(probed.noise, model.dtype) if quantization.activations.bits else probed.noise
    return replace(probed, logits=logits.double(), noise=noise)


def _check_quantizable(model: "PreTrainedModel", quantization: Quantization) -> None:
    setting = f"quantization={quantization.name!r}"
    if (unpacked := why_unpacked(model.dtype, model.device)) is not None:
        raise ConfigError(f"{setting} needs packed weights, but {unpacked}: set quantization=None")
    share = share_in_linears(model)
    if quantization.stored is None and share < _MIN_SHARE:
        raise UnsupportedModel(
            f"{setting}: of the weights of {type(model).__name__} beside its embeddings, only "
            f"{share:.0%} are in linear layers and experts that are packed here (at least "
            f"{_MIN_SHARE:.0%} is needed): set quantization=None"
        )


def _described(
    model: "PreTrainedModel", probed: Probed, for_device: bool = False
) -> tuple[Decoder | None, str]:
    """Return a model's description, or why it cannot be fused."""
    if model.dtype not in DTYPES:
        dtype = str(model.dtype).removeprefix("torch.")
        return None, f"there are no fused operations in {dtype}"
    try:
        return describe_decoder(model, probed.styles_by_layer, for_device), ""
    except Unknown as unknown:
        reason = str(unknown)
    except Exception as error:  # code of any model
        reason = f"it cannot be described ({type(error).__name__}: {error})"
    return None, f"{type(model).__name__} is not fused: {reason}"


def _difference(model: "PreTrainedModel", probed: Probed, call: CallsModel) -> str | None:
    """Return how logits differ from the plain modules'; None if rounding explains it."""
    try:
        with torch.inference_mode():
            logits = through_blocks(probed.spec, probed.states, call, model, probed.attention)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that only looks like one that is supported
        return f"it fails on this model ({type(error).__name__}: {error})"
    away = in_roundings(logits, probed.logits, probed.noise)
    if away <= _MAX_ROUNDINGS:
        return None
    return f"its logits differ by {away:.2g} times what rounding explains"
